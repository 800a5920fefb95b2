"""Tests that programs run as in a separate interpreter and are reported when they fail, and of what a test leaves."""

import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest

from tests import ROOT
from tests.leftovers import THREAD_PREFIX, Leftovers
from tests.program_runner import PreloadedInterpreter, ProgramRunner


@pytest.mark.parametrize("fresh", [False, True], ids=["preloaded", "fresh"])
def test_a_program_is_the_main_module_of_a_separate_process(
    run_program: ProgramRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh: bool
) -> None:
    monkeypatch.setenv("TF_CONFIG", "{}")
    source = """
        import atexit, os, pathlib, sys, threading, __main__
        print(sys.argv[1:], repr(sys.stdin.read()), "tensorflow" in sys.modules, len(os.listdir("/proc/self/task")))
        here = pathlib.Path(__main__.__file__)
        assert __name__ == "__main__" and __main__.here is here and sys.path[0] == str(here.parent)
        assert here.parent == pathlib.Path.cwd() == pathlib.Path(sys.argv[1])
        import coordinator
        print(coordinator.__file__, "TF_CONFIG" in os.environ)
        print("no", file=sys.stderr)
        ended = threading.Event()
        atexit.register(print, "exit")
        threading.Thread(target=lambda: (ended.wait(), print("thread"))).start()
        threading.Timer(0.05, ended.set).start()
        print("program")
    """
    folder = tmp_path / "programs"
    program = run_program(source, folder, 2, fresh=fresh)
    first, second, *rest = program.stdout.splitlines()
    assert first == f"['{folder}', '2'] '' {not fresh} 1"
    assert second == f"{ROOT / 'coordinator' / '__init__.py'} False"
    assert rest == ["program", "thread", "exit"]
    assert program.stderr == "no\n"


# Neither its parents nor its environment connect the process with the program.
LEAVES = """
    import os, subprocess, sys
    if os.fork() == 0:
        os.setsid()
        wait = "import threading; threading.Event().wait()"
        quiet = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        print(subprocess.Popen([sys.executable, "-c", wait], env={}, start_new_session=True, **quiet).pid, flush=True)
        os._exit(0)
    os.wait()
"""


def test_a_process_that_a_program_leaves_is_named_and_killed(interpreter: PreloadedInterpreter, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"left .*threading.Event\(\).wait\(\)") as failure:
        ProgramRunner(interpreter, tmp_path, ending_timeout=0.1)(LEAVES, fresh=True)
    pid = int(str(failure.value).partition("--- output\n")[2].split()[0])
    assert not psutil.pid_exists(pid)


def test_threads_of_the_library_and_processes_are_waited_for_and_then_named() -> None:
    name = f"{THREAD_PREFIX}-worker-0"
    ends = [threading.Event() for _ in range(3)]

    def start(name: str, end: threading.Event) -> threading.Thread:
        thread = threading.Thread(target=end.wait, name=name)
        thread.start()
        return thread

    replaced = start(name, ends[0])
    before = Leftovers()
    ends[0].set()
    replaced.join()
    fresh = Leftovers()
    running = [start(name, ends[1]), start("grpc-poller", ends[2])]
    assert before.wait_gone(0.0) == []
    assert fresh.wait_gone(0.0) == [f"1 x thread {name}"]
    for end, thread in zip(ends[1:], running, strict=True):
        end.set()
        thread.join()
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        (left,) = fresh.wait_gone(0.1)
        assert "input()" in left
        process.communicate(b"\n", timeout=30.0)
    assert fresh.wait_gone(30.0) == []
