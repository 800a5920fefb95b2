"""Runs whole programs, each in a separate Python process.

For actions that a process can do only once, such as connecting to a cluster, and for those that would affect this one.
No process of a program is left when the call returns, however the program ended.
"""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import IO

import psutil

from tests import ROOT

# The command `coordinator`, as a program for `run_program`.
COORDINATOR = "import sys; from coordinator.__main__ import main; sys.exit(main(sys.argv[1:]))"

# How long the interpreter may take to load TensorFlow, in seconds.
_BEGIN_TIMEOUT = 240.0
_LEFT_OUT = {
    "TF_CONFIG",
    "GRPC_FAIL_FAST",
    "GRPC_POLL_STRATEGY",
    "grpc_proxy",
    "TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE",
    "TF_PS_DISABLE_ASYNC_EXECUTOR_GLOBALLY",
}
_DUMP_TIMEOUT = 10.0
_KILL_TIMEOUT = 10.0
_POLL_INTERVAL = 0.05
_LONGEST_MESSAGE = 64


class PreloadedInterpreter:
    """The process that programs are forked from, `preloaded_interpreter.py`. It loads TensorFlow for the first one."""

    def __init__(self) -> None:
        self._log = tempfile.TemporaryFile("w+", errors="replace")  # noqa: SIM115 - closed by `close`
        self._control, other_end = socket.socketpair()
        with other_end:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.preloaded_interpreter"],
                cwd=ROOT,
                env=_environment({}),
                stdin=other_end.fileno(),
                stdout=self._log,
                stderr=subprocess.STDOUT,
            )

    def start(self, wanted: Mapping[str, object], output: int, errors: int) -> "_Program":
        """Starts a program with the files that it prints to; returns when it has begun."""
        report, other_end = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with other_end, tempfile.TemporaryFile() as request:
            request.write(json.dumps(wanted).encode())
            request.seek(0)
            socket.send_fds(self._control, [b"p"], [request.fileno(), output, errors, other_end.fileno()])
        report.settimeout(_BEGIN_TIMEOUT)
        begun = report.recv(_LONGEST_MESSAGE)
        if not begun:
            self._log.seek(0)
            raise AssertionError(f"No program can be started:\n{self._log.read()}")
        return _Program(report, *map(int, begun.split()[1:]))

    def close(self) -> None:
        """Ends the process."""
        self._control.close()
        self._process.wait()
        self._log.close()


class _Program:
    """A running program with all processes that it has started; its supervisor reports its end, and theirs."""

    def __init__(self, report: socket.socket, supervisor: int, pid: int):
        self._report = report
        self._supervisor: psutil.Process | None = None
        # A short program may have ended already, and its supervisor with it.
        with contextlib.suppress(psutil.NoSuchProcess):
            self._supervisor = psutil.Process(supervisor)
        self._pid = pid
        self._is_gone = False
        self.exit_code: int | None = None

    def wait(self, timeout: float) -> bool:
        """Waits until the program has ended; returns False if it did not in time."""
        return self._follow(timeout, lambda: self.exit_code is not None)

    def abort(self) -> None:
        """Makes a program that hangs print the stacks of its threads, and end."""
        os.kill(self._pid, signal.SIGABRT)

    def kill_all(self, timeout: float) -> list[str]:
        """Kills every process of it that does not end by itself in time, and returns their command lines."""
        if self._follow(timeout, lambda: self._is_gone):
            return []
        commands = []
        for process in self._processes():
            with contextlib.suppress(psutil.NoSuchProcess):
                commands.append(" ".join(process.cmdline()))
        deadline = time.monotonic() + _KILL_TIMEOUT
        while not self._follow(_POLL_INTERVAL, lambda: self._is_gone):
            assert time.monotonic() < deadline, f"{commands} cannot be killed"
            for process in self._processes():
                with contextlib.suppress(psutil.NoSuchProcess):
                    process.kill()
        return commands

    def _processes(self) -> list[psutil.Process]:
        with contextlib.suppress(psutil.NoSuchProcess):
            return self._supervisor.children(recursive=True) if self._supervisor else []
        return []

    def _follow(self, timeout: float, is_done: Callable[[], bool]) -> bool:
        """Takes reports until something is so; returns False if it was not in time."""
        deadline = time.monotonic() + timeout
        while not (is_done() or self._is_gone):
            self._report.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                report = self._report.recv(_LONGEST_MESSAGE)
            except TimeoutError:
                return False
            if report:
                self.exit_code = int(report.split()[1])
            else:
                self._is_gone = True
                self._report.close()
        return True


class ProgramRunner:
    """Calling it runs a program in a folder. After it, its processes may take `ending_timeout` seconds to end."""

    def __init__(self, interpreter: PreloadedInterpreter, folder: Path, ending_timeout: float = 5.0):
        self._interpreter = interpreter
        self._folder = folder
        self._ending_timeout = ending_timeout
        self._count = 0

    def __call__(
        self,
        source: str,
        *arguments: object,
        timeout: float = 240.0,
        exit_code: int | None = 0,
        environment: Mapping[str, str] | None = None,
        fresh: bool = False,
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program to its end; indentation common to all lines of its source is removed.

        A program that takes longer than `timeout` seconds prints the stacks of all its threads and is killed. If
        `exit_code` is None, any is right. With `fresh`, or with additions to the environment, nothing is loaded when
        it begins; otherwise TensorFlow and this library are. Raises an AssertionError with its output if it took too
        long, ended with another code, or left a process.
        """
        self._count += 1
        path = self._folder / f"program_{self._count}.py"
        path.write_text(textwrap.dedent(source), encoding="utf-8")
        wanted = {
            "path": str(path),
            "arguments": [*map(str, arguments)],
            "folder": str(self._folder),
            "environment": _environment(environment or {}),
            "is_fresh": fresh,
        }
        with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
            program = self._interpreter.start(wanted, output.fileno(), errors.fileno())
            ending_timeout = 0.0
            try:
                problem = _problem(program, timeout, exit_code)
                ending_timeout = self._ending_timeout
            finally:
                left = program.kill_all(ending_timeout)
            printed, complained = _text(output), _text(errors)
        if left:
            problem = f"{problem or 'ended well'}, and left {', '.join(left)}"
        assert not problem, f"{path.name} {problem}.\n--- output\n{printed}\n--- errors\n{complained}"
        assert program.exit_code is not None
        return subprocess.CompletedProcess([str(path), *map(str, arguments)], program.exit_code, printed, complained)


def _problem(program: _Program, timeout: float, exit_code: int | None) -> str:
    """Waits for a program, and makes one end that takes too long; returns what is wrong with its end, if anything."""
    if program.wait(timeout):
        return "" if exit_code in (None, program.exit_code) else f"ended with code {program.exit_code}"
    program.abort()
    program.wait(_DUMP_TIMEOUT)
    return f"did not end within {timeout:g} s"


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _environment(added: Mapping[str, str]) -> dict[str, str]:
    """Returns a program's environment, without `TF_CONFIG` and what a strategy of this process has set for itself."""
    inherited = {name: value for name, value in os.environ.items() if name not in _LEFT_OUT}
    path = os.pathsep.join([str(ROOT), *filter(None, [inherited.get("PYTHONPATH")])])
    return {**inherited, "PYTHONPATH": path, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1", **added}
