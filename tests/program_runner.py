"""Runs whole programs, each in a separate Python process.

For actions that a process can do only once, such as connecting to a cluster, and for those that would affect this one.
No process of a program is left when the call returns, however the program ended.
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

from tests import ROOT

# The command `coordinator`, as a program for `run_program`.
COORDINATOR = "import sys; from coordinator.__main__ import main; sys.exit(main(sys.argv[1:]))"

# The environment variable that identifies all processes of a program, whatever session or parent they have.
_MARK = "COORDINATOR_TEST_RUN"
_DUMP_TIMEOUT = 10.0


class ProgramRunner:
    """Calling it runs a program.

    Args:
      folder: an empty folder; programs are written there and run in it.
      ending_timeout: how long the processes of a program may take to end after it, in seconds. Servers notice the end
        of a program that was killed, and end then.
    """

    def __init__(self, folder: Path, ending_timeout: float = 5.0):
        self._folder = folder
        self._ending_timeout = ending_timeout
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
          timeout: in seconds. A program that takes longer prints the stacks of all its threads and is killed.
          exit_code: the expected exit code (minus the signal's number, if a signal ended it); None allows any.
          environment: variables added to this process's environment.

        Returns:
          The output and the exit code of the program.

        Raises:
          AssertionError: the program took too long, ended with another code, or left a process; with its output.
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
            problem = "" if exit_code in (None, program.returncode) else f"ended with code {program.returncode}"
        except subprocess.TimeoutExpired:
            output, errors = self._dump_and_kill(program, mark)
            problem = f"did not end and close its output within {timeout:g} s"
        if left := self._kill_all(mark):
            problem = f"{problem or 'ended well'}, and left {', '.join(left)}"
        assert not problem, f"{path.name} {problem}.\n--- output\n{output}\n--- errors\n{errors}"
        return subprocess.CompletedProcess(program.args, program.returncode, output, errors)

    def _dump_and_kill(self, program: subprocess.Popen[str], mark: str) -> tuple[str, str]:
        """Ends a program that hangs, and returns what it printed, with the stacks of its threads."""
        program.send_signal(signal.SIGABRT)
        try:
            return program.communicate(timeout=_DUMP_TIMEOUT)
        except subprocess.TimeoutExpired:
            self._kill_all(mark)
            return program.communicate(timeout=_DUMP_TIMEOUT)

    def _kill_all(self, mark: str) -> list[str]:
        """Kills every process with the mark that does not end by itself in time, and returns their command lines."""
        marked = [process for process in psutil.process_iter() if _is_marked(process, mark)]
        _, found = psutil.wait_procs(marked, timeout=self._ending_timeout)
        commands = []
        for process in found:
            try:
                commands.append(" ".join(process.cmdline()))
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(found, timeout=_DUMP_TIMEOUT)
        return commands


def _environment(added: Mapping[str, str]) -> dict[str, str]:
    """Returns a program's environment: this checkout first on the path, no cluster from an outer `TF_CONFIG`."""
    inherited = {name: value for name, value in os.environ.items() if name != "TF_CONFIG"}
    path = os.pathsep.join([str(ROOT), *filter(None, [inherited.get("PYTHONPATH")])])
    return {**inherited, "PYTHONPATH": path, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1", **added}


def _is_marked(process: psutil.Process, mark: str) -> bool:
    try:
        return process.status() != psutil.STATUS_ZOMBIE and process.environ().get(_MARK) == mark
    except psutil.Error:
        return False
