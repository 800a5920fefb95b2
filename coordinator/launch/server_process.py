"""One server of a local cluster: a process that runs `coordinator serve`, forked from a zygote where there is one.

It promises that the server never outlives this process, even if this process is killed: the server reads a pipe that
only this process holds open. It has a session of its own, so a terminal's Ctrl-C does not reach it.
"""

import os
import pathlib
import signal
import threading
import time
from collections.abc import Mapping

from coordinator.errors import LaunchError
from coordinator.heartbeat.task_probe import TaskProbe
from coordinator.launch.child_environment import server_environment
from coordinator.launch.forked_process import ForkedProcess
from coordinator.launch.spawned_process import SpawnedProcess
from coordinator.launch.task_config import TaskConfig
from coordinator.launch.zygote_process import ZygoteProcess

_PROBE_TIMEOUT = 1.0
_POLL_INTERVAL = 0.1
_TAIL_LINES = 12


class ServerProcess:
    """One server process, which may be started, killed, frozen, and started again on its port.

    Args:
      config: the server to be, and its cluster.
      log_path: the file that takes what the process prints; it is begun anew at the first start.
      environment: the environment that the process inherits.
      zygote: what forks the process; None starts it as a fresh one, which takes some seconds longer.
    """

    def __init__(
        self,
        config: TaskConfig,
        log_path: pathlib.Path,
        environment: Mapping[str, str],
        zygote: ZygoteProcess | None = None,
    ):
        self.config = config
        self.log_path = log_path
        self._environment = environment
        self._zygote = zygote
        self._process: ForkedProcess | SpawnedProcess | None = None
        self._pipe: int | None = None
        self._started_at = 0.0
        self._lock = threading.Lock()

    def start(self) -> None:
        """Starts the process; it answers some time later (`wait_ready`).

        Raises:
          LaunchError: it is running, or cannot be started.
        """
        with self._lock:
            if self.is_alive():
                raise LaunchError(f"{self.config.name} already runs, as process {self.pid}.")
            self._close_pipe()
            self._started_at = time.monotonic()
            try:
                self._process = self._begin()
            except OSError as error:
                raise LaunchError(f"{self.config.name} could not be started: {error}.") from error

    def wait_ready(self, timeout: float) -> None:
        """Waits until the server answers.

        Args:
          timeout: in seconds.

        Raises:
          LaunchError: the process ended, or nothing answered in time; the message ends with the tail of its log.
        """
        deadline = time.monotonic() + timeout
        with TaskProbe(self.config.address) as probe:
            while True:
                status = probe.status(min(_PROBE_TIMEOUT, timeout))
                # Asked in this order: a process that ended leaves its port to somebody else, who may answer too.
                if self.wait_ended(_POLL_INTERVAL if status is None else 0.0):
                    raise LaunchError(self._failure(f"ended {self._ending()} before it served"))
                if status is not None and self._is_own(status.devices):
                    return
                if time.monotonic() >= deadline:
                    age = time.monotonic() - self._started_at
                    raise LaunchError(self._failure(f"does not answer, {age:.1f} s after its start"))

    def wait_ended(self, timeout: float | None = None) -> bool:
        """Waits until the process has ended.

        Args:
          timeout: in seconds; None waits as long as it takes.

        Returns:
          Whether it has ended. A process that was never started has.
        """
        return self._process is None or self._process.wait(timeout) is not None

    def kill(self) -> None:
        """Ends the process with SIGKILL, frozen or not, and returns when it is gone."""
        if self._process is not None:
            self._process.kill()
        self._close_pipe()

    def freeze(self) -> None:
        """Stops the process without ending it: its connections stay open, and it answers nothing.

        Raises:
          LaunchError: it is not running.
        """
        self._send(signal.SIGSTOP)

    def thaw(self) -> None:
        """Lets a frozen process go on.

        Raises:
          LaunchError: it is not running.
        """
        self._send(signal.SIGCONT)

    def is_alive(self) -> bool:
        """Whether the process runs; a frozen one does."""
        return self._process is not None and self._process.wait(0) is None

    @property
    def pid(self) -> int | None:
        """The id of the process started last, or None. It is waited for while a zygote is not ready to fork."""
        if self._process is None:
            return None
        self._process.wait_begun()
        return self._process.pid

    @property
    def exit_code(self) -> int | None:
        """The exit code of the process started last (minus the signal that killed it), or None while there is none."""
        return None if self._process is None else self._process.wait(0)

    def log_tail(self) -> str:
        """Returns the last lines of the log."""
        try:
            text = self.log_path.read_text(errors="replace")
        except FileNotFoundError:
            return ""
        return "\n".join(text.splitlines()[-_TAIL_LINES:])

    def __repr__(self) -> str:
        process = self._process
        state = "not running" if process is None or not self.is_alive() else f"process {process.pid or 'to come'}"
        return f"ServerProcess({self.config.name} at {self.config.address}, {state})"

    def _send(self, number: signal.Signals) -> None:
        if self._process is None or not self.is_alive():
            raise LaunchError(f"{self.config.name} is not running, so it cannot get {number.name}.")
        self._process.send(number)

    def _begin(self) -> ForkedProcess | SpawnedProcess:
        environment = server_environment(self._environment, self.config)
        start = SpawnedProcess if self._zygote is None else self._zygote.start_server
        with self.log_path.open("wb" if self._process is None else "ab") as log:
            standard_input, self._pipe = os.pipe()
            try:
                return start(environment, standard_input=standard_input, log=log.fileno())
            except BaseException:
                self._close_pipe()
                raise
            finally:
                os.close(standard_input)

    def _close_pipe(self) -> None:
        if self._pipe is not None:
            os.close(self._pipe)
            self._pipe = None

    def _is_own(self, devices: tuple[str, ...]) -> bool:
        prefix = f"/job:{self.config.job}/replica:0/task:{self.config.index}/"
        return any(device.startswith(prefix) for device in devices)

    def _ending(self) -> str:
        code = self.exit_code
        if code is None:
            return "without being started"
        return f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"

    def _failure(self, what: str) -> str:
        tail = self.log_tail() or "(empty)"
        return f"{self.config.name} at {self.config.address} {what}. Its log, {self.log_path}, ends with:\n{tail}"
