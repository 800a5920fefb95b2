"""Tests that programs run as in a separate interpreter, are reported when they fail, and leave no process."""

import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests import ROOT
from tests.program_runner import PreloadedInterpreter, ProgramRunner

Run = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(params=[False, True], ids=["preloaded", "fresh"])
def run(request: pytest.FixtureRequest, run_program: ProgramRunner) -> Run:
    """Runs a program in either kind of interpreter."""
    return lambda *arguments, **options: run_program(*arguments, fresh=request.param, **options)


def test_a_program_gets_its_arguments_and_gives_its_output(run: Run) -> None:
    program = run("import sys\nprint(sys.argv[1:], repr(sys.stdin.read()))\nprint('no', file=sys.stderr)", "one", 2)
    assert program.stdout == "['one', '2'] ''\n"
    assert program.stderr == "no\n"


def test_a_program_is_the_main_module_of_a_separate_process_in_its_folder(run: Run, tmp_path: Path) -> None:
    source = """
        import os, pathlib, sys, __main__
        here = pathlib.Path(__main__.__file__)
        assert __name__ == "__main__" and __main__.here is here and here.parent == pathlib.Path.cwd()
        assert sys.argv == [str(here)] and sys.path[0] == str(here.parent)
        print(here.parent, os.getpid())
    """
    folder, pid = run(source).stdout.split()
    assert folder == str(tmp_path / "programs")
    assert int(pid) != os.getpid()


def test_a_program_imports_the_checkout_without_an_outer_tf_config(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TF_CONFIG", "{}")
    program = run("import os, coordinator\nprint(coordinator.__file__, 'TF_CONFIG' in os.environ)")
    assert program.stdout.split() == [str(ROOT / "coordinator" / "__init__.py"), "False"]


LOADED = (
    "import os, sys\nprint('tensorflow' in sys.modules, len(os.listdir('/proc/self/task')), os.environ.get('OPTION'))"
)


def test_tensorflow_is_loaded_but_not_used_where_a_program_begins(run_program: ProgramRunner) -> None:
    assert run_program(LOADED).stdout == "True 1 None\n"


@pytest.mark.long
@pytest.mark.usefixtures("interpreter")
def test_it_is_although_this_process_has_a_strategy(
    run_program: ProgramRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GRPC_FAIL_FAST", "true")
    monkeypatch.setenv("TF_PS_DISABLE_ASYNC_EXECUTOR_GLOBALLY", "True")
    monkeypatch.setenv("TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE", "False")
    assert run_program(LOADED).stdout == "True 1 None\n"


def test_a_program_that_asks_for_it_begins_with_nothing_loaded(run_program: ProgramRunner) -> None:
    assert run_program(LOADED, fresh=True).stdout == "False 1 None\n"


def test_a_program_with_another_environment_begins_with_nothing_loaded(run_program: ProgramRunner) -> None:
    assert run_program(LOADED, environment={"OPTION": "1"}).stdout == "False 1 1\n"


@pytest.mark.long
def test_programs_share_nothing(run_program: ProgramRunner) -> None:
    source = """
        import os, random, coordinator
        print(hasattr(coordinator, "mine"), os.environ.get("MINE"), random.random())
        coordinator.mine = os.environ["MINE"] = "mine"
    """
    first, second = (run_program(source).stdout.split() for _ in range(2))
    assert first[:2] == second[:2] == ["False", "None"]
    assert first[2] != second[2]


def test_a_program_that_fails_shows_its_traceback(run: Run) -> None:
    with pytest.raises(AssertionError, match=r"(?s)ended with code 1\..*program_1.py.*KeyError: 'no such thing'"):
        run("raise KeyError('no such thing')")


@pytest.mark.parametrize(
    ("ending", "exit_code"),
    [
        ("raise SystemExit(3)", 3),
        ("os._exit(4)", 4),
        ("os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL),
        ("os.kill(os.getpid(), signal.SIGINT)", -signal.SIGINT),
    ],
)
def test_an_expected_exit_code_is_no_failure(run: Run, ending: str, exit_code: int) -> None:
    assert run(f"import os, signal\n{ending}", exit_code=exit_code).returncode == exit_code


def test_a_program_ends_with_its_threads_and_its_exit_functions(run: Run) -> None:
    source = """
        import atexit, threading
        ended = threading.Event()
        atexit.register(print, "exit")
        threading.Thread(target=lambda: (ended.wait(), print("thread"))).start()
        threading.Timer(0.05, ended.set).start()
        print("program")
    """
    assert run(source).stdout.split() == ["program", "thread", "exit"]


@pytest.mark.parametrize(("fresh", "timeout"), [(False, 1.0), pytest.param(True, 5.0, marks=pytest.mark.long)])
def test_a_program_that_hangs_shows_where(run_program: ProgramRunner, fresh: bool, timeout: float) -> None:
    source = """
        import threading

        def wait_for_ever():
            threading.Event().wait()

        wait_for_ever()
    """
    with pytest.raises(AssertionError, match=r"(?s)did not end within \d s\..*in wait_for_ever"):
        run_program(source, timeout=timeout, fresh=fresh)


LEAVES = """
    import subprocess, sys

    wait = "import threading; threading.Event().wait()"
    quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    print(subprocess.Popen([sys.executable, "-c", wait], env={}, start_new_session=True, **quiet).pid)
"""
# Neither its parents nor its environment connect the process with the program.
LEAVES_GRANDCHILD = f"""
    import os
    if os.fork() == 0:
        os.setsid()
        exec({LEAVES!r}.replace("    ", ""))
        os._exit(0)
    os.wait()
"""


@pytest.mark.parametrize("source", [LEAVES, LEAVES_GRANDCHILD], ids=["child", "grandchild"])
def test_a_process_that_a_program_leaves_is_named_and_killed(
    interpreter: PreloadedInterpreter, tmp_path: Path, source: str
) -> None:
    with pytest.raises(AssertionError, match=r"left .*threading.Event\(\).wait\(\)") as failure:
        ProgramRunner(interpreter, tmp_path, ending_timeout=0.1)(source, fresh=True)
    pid = int(str(failure.value).partition("--- output\n")[2].split()[0])
    assert not psutil.pid_exists(pid)


@pytest.mark.long
def test_a_forked_process_that_a_program_leaves_is_killed(interpreter: PreloadedInterpreter, tmp_path: Path) -> None:
    source = """
        import os, threading
        pid = os.fork()
        if pid == 0:
            threading.Event().wait()
        print(pid, flush=True)
    """
    with pytest.raises(AssertionError, match="left ") as failure:
        ProgramRunner(interpreter, tmp_path, ending_timeout=0.1)(source)
    assert not psutil.pid_exists(int(str(failure.value).partition("--- output\n")[2].split()[0]))


SERVERS = """
    import psutil, sys, threading
    from coordinator.testing import LocalCluster

    end = threading.Event()
    thread = threading.Thread(target=end.wait)
    if sys.argv[1:] == ["with a thread"]:
        thread.start()
    with LocalCluster(workers=1, ps=1) as cluster:
        # A title may be shorter than the command line was.
        lines = [psutil.Process(pid).parent().cmdline() for pid in cluster.processes.values()]
        print({" ".join([*filter(None, line)][-2:]) for line in lines})
    end.set()
    assert not psutil.Process().children()
"""


def test_servers_of_a_program_are_forked_from_it_by_way_of_their_fork_server(run_program: ProgramRunner) -> None:
    assert run_program(SERVERS).stdout == "{'-m tests.preloaded_interpreter'}\n"


@pytest.mark.long
def test_servers_of_a_program_with_several_threads_are_not(run_program: ProgramRunner) -> None:
    assert run_program(SERVERS, "with a thread").stdout == "{'coordinator fork server'}\n"
