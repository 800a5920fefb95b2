"""Runs whole programs, each in a Python process of its own.

It is for what one process cannot do twice, such as connecting to a cluster, and for what must not happen to the process
of the tests. It promises that no process of a program is left when the call returns, however the program ended.
"""

import os
import signal
import subprocess
import sys
import textwrap
import uuid
from collections.abc import Mapping
from pathlib import Path

import psutil

from tests.import_graph import ROOT

# The command `coordinator`, as a program for `run_program`.
COORDINATOR = "import sys; from coordinator.__main__ import main; sys.exit(main(sys.argv[1:]))"

# Names the run in the environment that all processes of a program inherit, whatever session or parent they have.
_MARK = "COORDINATOR_TEST_RUN"
_DUMP_TIMEOUT = 10.0
# Servers notice the end of a program that was killed, and end after it.
_ENDING_TIMEOUT = 5.0


class ProgramRunner:
    """Calling it runs a program.

    Args:
      folder: an empty folder; programs are written there and run in it.
    """

    def __init__(self, folder: Path):
        self._folder = folder
        self._count = 0

    def __call__(
        self,
        source: str,
        *arguments: object,
        timeout: float = 120.0,
        exit_code: int | None = 0,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program to its end.

        Args:
          source: the program; indentation common to all lines is removed.
          *arguments: what it finds in `sys.argv[1:]`, as strings.
          timeout: in seconds. A program that takes longer is made to print the stacks of all its threads, and killed.
          exit_code: the code that it must end with (minus the signal, if a signal ended it); None allows any.
          environment: added to this process's environment.

        Returns:
          What it printed, and its exit code.

        Raises:
          AssertionError: it took too long, ended with another code, or left a process; its output is in the message.
        """
        self._count += 1
        path = self._folder / f"program_{self._count}.py"
        path.write_text(textwrap.dedent(source), encoding="utf-8")
        mark = uuid.uuid4().hex
        program = subprocess.Popen(
            [sys.executable, str(path), *map(str, arguments)],
            cwd=self._folder,
            env=_environment({**(environment or {}), _MARK: mark}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            output, errors = program.communicate(timeout=timeout)
            complaint = "" if exit_code in (None, program.returncode) else f"ended with code {program.returncode}"
        except subprocess.TimeoutExpired:
            output, errors = _dump_and_kill(program, mark)
            complaint = f"did not end and close its output within {timeout:g} s"
        if left := _kill_all(mark):
            complaint = f"{complaint or 'ended well'}, and left {', '.join(left)}"
        assert not complaint, f"{path.name} {complaint}.\n--- output\n{output}\n--- errors\n{errors}"
        return subprocess.CompletedProcess(program.args, program.returncode, output, errors)


def _environment(added: Mapping[str, str]) -> dict[str, str]:
    """The environment of a program: this checkout first on the path, and no cluster described by an outer one."""
    inherited = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    path = os.pathsep.join([str(ROOT), *filter(None, [inherited.get("PYTHONPATH")])])
    return {**inherited, "PYTHONPATH": path, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1", **added}


def _dump_and_kill(program: subprocess.Popen[str], mark: str) -> tuple[str, str]:
    """Ends a program that hangs, and returns what it printed, with the stacks of its threads."""
    program.send_signal(signal.SIGABRT)
    try:
        return program.communicate(timeout=_DUMP_TIMEOUT)
    except subprocess.TimeoutExpired:
        _kill_all(mark)
        return program.communicate(timeout=_DUMP_TIMEOUT)


def _kill_all(mark: str) -> list[str]:
    """Kills every process with the mark that does not end by itself in a moment, and returns their command lines."""
    marked = [process for process in psutil.process_iter() if _is_marked(process, mark)]
    _, found = psutil.wait_procs(marked, timeout=_ENDING_TIMEOUT)
    commands = []
    for process in found:
        try:
            commands.append(" ".join(process.cmdline()))
            process.kill()
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(found, timeout=_DUMP_TIMEOUT)
    return commands


def _is_marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_MARK) == mark
    except psutil.Error:
        return False
