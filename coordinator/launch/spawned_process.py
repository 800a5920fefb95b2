"""A server as a fresh process: what `coordinator serve` is for whoever types it."""

import os
import signal
import subprocess
import sys
from collections.abc import Mapping

SERVE_ARGUMENTS = ("serve", "--exit-with-parent")
SERVE_COMMAND = (sys.executable, "-m", "coordinator", *SERVE_ARGUMENTS)


class SpawnedProcess:
    """A child process of this one, in a session of its own.

    Args:
      environment: its environment.
      standard_input: the descriptor that it reads, and at whose end it ends.
      log: the descriptor that it prints to.

    Raises:
      OSError: it could not be started.
    """

    def __init__(self, environment: Mapping[str, str], *, standard_input: int, log: int):
        self._process = subprocess.Popen(
            SERVE_COMMAND,
            stdin=standard_input,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def wait(self, timeout: float | None = None) -> int | None:
        """Waits for the end of the process, at most `timeout` seconds, and returns its exit code, or None."""
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None

    def wait_begun(self) -> None:
        """Returns at once: the process began when this object was made."""

    def kill(self) -> None:
        """Ends the process with SIGKILL, and returns when it is gone."""
        self._process.kill()
        self._process.wait()

    def send(self, number: signal.Signals) -> None:
        """Sends a signal, to nobody if the process has ended. A process that SIGSTOP stopped has stopped on return."""
        self._process.send_signal(number)
        if number is signal.SIGSTOP and self._process.poll() is None:
            # The signal is delivered to the process's threads one by one: only now is it sure that none answers.
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
