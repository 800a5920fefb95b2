"""One server of a local cluster: a process that runs `coordinator serve`, forked from a fork server where possible.

It promises that the server never outlives this process, even if this process is killed: the server reads a pipe that
only this process holds open. It has its own session, so a terminal's Ctrl-C does not reach it.
"""

import os
import pathlib
import signal
import sysconfig
import threading
import time
from collections.abc import Mapping

from coordinator.errors import LaunchError
from coordinator.heartbeat.task_probe import TaskProbe
from coordinator.launch.server_starter import ForkedProcess, ForkServerProcess, FreshProcess
from coordinator.launch.task_config import TaskConfig


def server_environment(inherited: Mapping[str, str], config: TaskConfig) -> dict[str, str]:
    """Returns the environment of a server process.

    Args:
      inherited: the environment of this process.
      config: the server's task.
    """
    environment = program_environment(inherited, config)
    if folders := _import_path(inherited.get("PYTHONPATH", "")):
        environment["PYTHONPATH"] = folders
    if config.job == "ps":
        # Variables live in the memory of the host; a parameter server would only take the GPU from the workers.
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return environment


def program_environment(inherited: Mapping[str, str], config: TaskConfig) -> dict[str, str]:
    """Returns the environment of the user's program in one role.

    Args:
      inherited: the environment of this process.
      config: the role.
    """
    environment = dict(inherited)
    environment["TF_CONFIG"] = config.to_json()
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    return environment


def _import_path(inherited: str) -> str:
    """Adds the folder that this package was loaded from, so that the child finds it, unless it is installed."""
    root = str(pathlib.Path(__file__).resolve().parents[2])
    # An installed package is found anyway; a site-packages folder on PYTHONPATH would go before the standard library.
    if root in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        return inherited
    return os.pathsep.join(filter(None, [root, inherited]))


_PROBE_TIMEOUT = 1.0
_POLL_INTERVAL = 0.1
_TAIL_LINES = 12


class ServerProcess:
    """One server process, which may be started, killed, frozen, and started again on its port.

    Args:
      config: the server's task and its cluster.
      log_path: the file that takes what the process prints; the first start empties it.
      environment: the environment that the process inherits.
      fork_server: forks the process; None starts it as a fresh one, which takes some seconds longer.
    """

    def __init__(
        self,
        config: TaskConfig,
        log_path: pathlib.Path,
        environment: Mapping[str, str],
        fork_server: ForkServerProcess | None = None,
    ):
        self.config = config
        self.log_path = log_path
        self._environment = environment
        self._fork_server = fork_server
        self._process: ForkedProcess | FreshProcess | None = None
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
                # In this order: another process may have taken the port of a process that ended, and answer too.
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
          True if it has ended, or was never started.
        """
        return self._process is None or self._process.wait(timeout) is not None

    def kill(self) -> None:
        """Ends the process with SIGKILL, frozen or not, and returns when it is gone."""
        if self._process is not None:
            self._process.kill()
        self._close_pipe()

    def freeze(self) -> None:
        """Stops the process without ending it: its connections stay open, and it does not answer.

        Raises:
          LaunchError: it is not running.
        """
        self._send(signal.SIGSTOP)

    def thaw(self) -> None:
        """Continues a frozen process.

        Raises:
          LaunchError: it is not running.
        """
        self._send(signal.SIGCONT)

    def is_alive(self) -> bool:
        """Returns True if the process runs, frozen or not."""
        return self._process is not None and self._process.wait(0) is None

    @property
    def pid(self) -> int | None:
        """The id of the process started last, or None. This waits until a fork server is ready to fork."""
        return None if self._process is None else self._process.pid

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

    def _send(self, number: signal.Signals) -> None:
        if self._process is None or not self.is_alive():
            raise LaunchError(f"{self.config.name} is not running, so it cannot get {number.name}.")
        self._process.send(number)

    def _begin(self) -> ForkedProcess | FreshProcess:
        environment = server_environment(self._environment, self.config)
        start = FreshProcess if self._fork_server is None else self._fork_server.start_server
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
