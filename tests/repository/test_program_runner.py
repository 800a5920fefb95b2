"""Tests that programs of tests end, are reported when they fail, and leave no process."""

from pathlib import Path

import psutil
import pytest

from tests import ROOT
from tests.program_runner import ProgramRunner


def test_a_program_gets_its_arguments_and_gives_its_output(run_program: ProgramRunner) -> None:
    program = run_program("import sys\nprint(sys.argv[1:])", "one", 2)
    assert program.stdout == "['one', '2']\n"


def test_a_program_imports_the_checkout_without_an_outer_tf_config(
    run_program: ProgramRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_CONFIG", "{}")
    program = run_program("import os, coordinator\nprint(coordinator.__file__, 'TF_CONFIG' in os.environ)")
    assert program.stdout.split() == [str(ROOT / "coordinator" / "__init__.py"), "False"]


def test_a_program_that_fails_shows_its_traceback(run_program: ProgramRunner) -> None:
    with pytest.raises(AssertionError, match=r"(?s)ended with code 1\..*KeyError: 'no such thing'"):
        run_program("raise KeyError('no such thing')")


def test_an_expected_exit_code_is_no_failure(run_program: ProgramRunner) -> None:
    assert run_program("raise SystemExit(3)", exit_code=3).returncode == 3


@pytest.mark.long
def test_a_program_that_hangs_shows_where(run_program: ProgramRunner) -> None:
    source = """
        import threading

        def wait_for_ever():
            threading.Event().wait()

        wait_for_ever()
    """
    with pytest.raises(AssertionError, match=r"(?s)did not end .* within 3 s\..*in wait_for_ever"):
        run_program(source, timeout=3.0)


@pytest.mark.long
def test_a_process_that_a_program_leaves_is_named_and_killed(tmp_path: Path) -> None:
    source = """
        import subprocess, sys

        wait = "import threading; threading.Event().wait()"
        quiet = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        print(subprocess.Popen([sys.executable, "-c", wait], start_new_session=True, **quiet).pid)
    """
    with pytest.raises(AssertionError, match=r"left .*threading.Event\(\).wait\(\)") as failure:
        ProgramRunner(tmp_path, ending_timeout=0.5)(source)
    pid = int(str(failure.value).partition("--- output\n")[2].split()[0])
    assert not psutil.pid_exists(pid)
