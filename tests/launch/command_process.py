"""The command `coordinator` as a user starts it: in a separate process group on a separate terminal.

It promises that neither it nor anything it started is left when the `with` block ends.
"""

import codecs
import os
import pty
import re
import select
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Mapping

import psutil

TIMEOUT = 60.0
# Makes the terminal the controlling one, so that Ctrl-C on it reaches the command, then executes the command.
_ON_A_TERMINAL = "import os, sys; os.login_tty(0); os.execv(sys.executable, [sys.executable, *sys.argv[1:]])"


class CommandProcess:
    """`python -m coordinator` with some arguments."""

    def __init__(self, *arguments: object, environment: Mapping[str, str]):
        self.output = ""
        # What is read may end within a character, and the terminal writes what is typed even between the bytes of one.
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._started: list[psutil.Process] = []
        self.terminal, terminal_of_command = pty.openpty()
        self.settings = termios.tcgetattr(self.terminal)
        self._process = subprocess.Popen(
            [sys.executable, "-c", _ON_A_TERMINAL, "-m", "coordinator", *map(str, arguments)],
            stdin=terminal_of_command,
            stdout=terminal_of_command,
            stderr=terminal_of_command,
            env=environment,
        )
        os.close(terminal_of_command)

    @property
    def pid(self) -> int:
        """The process id of the command."""
        return self._process.pid

    def type(self, keys: str) -> None:
        """Types on the terminal; `\\x03` is Ctrl-C."""
        os.write(self.terminal, keys.encode())

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the command alone."""
        self._process.send_signal(number)

    def wait_output(self, pattern: str) -> re.Match[str]:
        """Waits until the terminal shows a text, and returns its match; everything shown so far is searched."""
        deadline = time.monotonic() + TIMEOUT
        while not (match := re.search(pattern, self.output)):
            assert self._is_read(deadline), f"{pattern!r} was not printed. The terminal shows:\n{self.output}"
        self.record()
        return match

    def wait_ended(self) -> int:
        """Waits until the command has ended; returns its exit code, minus the signal if one killed it."""
        deadline = time.monotonic() + TIMEOUT
        while self._is_read(deadline):
            pass
        self.record()
        return self._process.wait(max(0.1, deadline - time.monotonic()))

    def record(self) -> list[psutil.Process]:
        """Returns all processes that the command has started so far, new ones included."""
        if self._process.poll() is None:
            now = psutil.Process(self._process.pid).children(recursive=True)
            self._started += [process for process in now if process not in self._started]
        return self._started

    def left(self) -> list[psutil.Process]:
        """Returns the processes started by the command that still run some seconds after its end."""
        return psutil.wait_procs(self._started, timeout=10)[1]

    def close(self) -> None:
        """Kills the command and all that it started."""
        for process in [*self.record()]:
            if process.is_running():
                process.kill()
        self._process.kill()
        self._process.wait()
        psutil.wait_procs(self._started, timeout=10)
        os.close(self.terminal)

    def __enter__(self) -> "CommandProcess":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _is_read(self, deadline: float) -> bool:
        """Reads some output; returns False when there is no more, or none came in time."""
        if not select.select([self.terminal], [], [], max(0.0, deadline - time.monotonic()))[0]:
            return False
        try:
            text = os.read(self.terminal, 65_536)
        except OSError:
            # A terminal reports this when no process has it open any more.
            return False
        self.output += self._decoder.decode(text)
        return bool(text)
