"""The user's program in one role: a child process.

It has a session of its own, so a terminal's Ctrl-C does not reach it: it gets one signal, from the command that started
it, and not the terminal's as well. It still reads and writes the terminal. It promises to end when this process does.
"""

import os
import pathlib
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence

from coordinator.errors import LaunchError

# How long a program's last output may take to arrive after its end: somebody else may hold its output open for ever.
_LAST_OUTPUT_TIMEOUT = 2.0


class ProgramProcess:
    """A running program. It must be made by the main thread: the program ends when the thread that made it does.

    Args:
      command: the program's path and arguments.
      environment: its environment.
      on_line: gets each line that it prints; None gives it this process's own input and output.
      on_end: gets its code, minus the signal for one that was killed, after its last line.

    Raises:
      LaunchError: it could not be started.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        *,
        on_line: Callable[[str], None] | None,
        on_end: Callable[[int], None],
    ):
        launcher = pathlib.Path(__file__).with_name("exec_with_parent.py")
        try:
            self._process = subprocess.Popen(
                # Isolated: nothing of the user's is to run in the launcher.
                [sys.executable, "-I", "-S", str(launcher), str(os.getpid()), *command],
                env=environment,
                start_new_session=True,
                stdin=None if on_line is None else subprocess.DEVNULL,
                stdout=None if on_line is None else subprocess.PIPE,
                stderr=None if on_line is None else subprocess.STDOUT,
            )
        except OSError as error:
            raise LaunchError(f"{command[0]} could not be started: {error}.") from error
        self._reader = threading.Thread(
            target=self._read, args=(on_line,), name="coordinator-program-output", daemon=True
        )
        self._watcher = threading.Thread(
            target=self._watch, args=(on_end,), name="coordinator-program-end", daemon=True
        )
        self._reader.start()
        self._watcher.start()

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the program and to what it started, as a terminal would; to nobody if it has ended."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, number)

    def close(self) -> None:
        """Kills the program if it runs, and returns when it is gone."""
        self.send(signal.SIGKILL)
        self._watcher.join()

    def _read(self, on_line: Callable[[str], None] | None) -> None:
        if self._process.stdout is None or on_line is None:
            return
        for line in self._process.stdout:
            # Of a line that was drawn over and over, what was to be seen last.
            on_line(line.decode(errors="replace").rstrip("\r\n").rpartition("\r")[2])

    def _watch(self, on_end: Callable[[int], None]) -> None:
        code = self._process.wait()
        self._reader.join(_LAST_OUTPUT_TIMEOUT)
        if self._process.stdout is not None and not self._reader.is_alive():
            self._process.stdout.close()
        on_end(code)
