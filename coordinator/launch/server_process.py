"""The servers of a cluster: processes that are started, watched, killed, and started again at their addresses.

Each server has one process and one log. The server's starter decides how and where the process starts: on this machine,
forked from a fork server, or on another host. Each process has its own session, so Ctrl-C does not reach it.
Guarantees:

- All servers start at the same time. A server is ready only when it answers as its own task.
- A failure is reported with the end of the server's log.
- `close` leaves no process behind, frozen ones included.
- No server outlives this process, even if this process is killed. Each server reads a socket, and ends when the other
  end, which only this process holds open, is closed.
"""

import os
import pathlib
import secrets
import signal
import sysconfig
import threading
import time
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Protocol

import portpicker

from coordinator.background_thread import only_here
from coordinator.errors import ClusterSpecError, LaunchError
from coordinator.heartbeat.probes import TaskProbe
from coordinator.launch.program_process import log_file
from coordinator.launch.serve import SERVED_JOBS, serving_line
from coordinator.launch.server_starter import ForkServerProcess, ending_of
from coordinator.launch.task_config import VISIBLE, TaskConfig
from coordinator.options import DASHBOARD

# Servers listen below the ports that the kernel gives to outgoing connections. A client that retries a dead server on
# one of the kernel's ports is eventually given that very port, connects to itself, and keeps the server out.
PORTS = range(10_000, 32_768)
_MOST_ATTEMPTS = 10_000
_PROBE_TIMEOUT = 1.0
_POLL_INTERVAL = 0.1
# The pause between two checks for the restart of a server that has ended, in seconds.
_RESTART_INTERVAL = 0.1
_TAIL_LINES = 12


class StartedProcess(Protocol):
    """A process of a server. `is_lost` is True if the process has ended with an unknown exit code."""

    is_lost: bool

    @property
    def pid(self) -> int | None:
        """The process id on this machine."""

    def wait(self, timeout: float | None = None) -> int | None:
        """Returns the exit code, or minus the signal that killed the process, or None if it did not end in time."""

    def kill(self) -> None:
        """Ends the process; returns when it is gone."""

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the process unless it has ended."""


class ServerStarter(Protocol):
    """Starts processes of servers, on this machine or on another host."""

    def start_server(self, environment: Mapping[str, str], log: int) -> StartedProcess:
        """Starts a server that prints to the descriptor `log`. Raises OSError."""

    def close(self) -> None:
        """Ends all processes, or tells them to end."""


def wait_answer(config: TaskConfig, deadline: float, wait_ended: Callable[[float], bool]) -> bool:
    """Waits until a server answers as its own task; returns False if its process has ended.

    `deadline` is on the clock of `time.monotonic`. `wait_ended` waits at most the given seconds, and returns True if
    the process has ended. Raises TimeoutError.
    """
    device_prefix = f"/job:{config.job}/replica:0/task:{config.index}/"
    with TaskProbe(config.address) as probe:
        while True:
            status = probe.status(min(_PROBE_TIMEOUT, max(0.0, deadline - time.monotonic())))
            is_ready = status is not None and any(name.startswith(device_prefix) for name in status.devices)
            # The end is checked after the answer, because another process may answer on the port of an ended server.
            if wait_ended(0.0 if is_ready else _POLL_INTERVAL):
                return False
            if is_ready:
                return True
            if time.monotonic() >= deadline:
                raise TimeoutError


class ServerProcess:
    """One server process, which may be started, killed, frozen, and started again on its port.

    Args:
      config: the server's task and its cluster.
      log_folder: an existing folder; the output of each start of the process is written to a new file there.
      environment: the environment that the process inherits. The attribute is the process's own environment.
      starter: starts the process.
      owner: the owner of the server's cluster, if there are several clusters.
    """

    def __init__(
        self,
        config: TaskConfig,
        log_folder: pathlib.Path,
        environment: Mapping[str, str],
        starter: ServerStarter,
        owner: str = "",
    ):
        self.config = config
        self.owner = owner
        self._log_folder = log_folder
        self.starts = 0
        # The number of the last start that has answered.
        self._answered_start = 0
        self.environment = server_environment(environment, config)
        self._starter = starter
        self._process: StartedProcess | None = None
        self._started_at = 0.0
        self._lock = threading.Lock()

    def start(self) -> None:
        """Starts the process, without waiting for its answer. Raises LaunchError if it runs already or cannot start."""
        with self._lock:
            if self.is_alive():
                raise LaunchError(f"{self.name} already runs, as process {self.pid}.")
            self._started_at = time.monotonic()
            try:
                with self._log_file(self.starts).open("wb") as log:
                    self._process = self._starter.start_server(self.environment, log.fileno())
                self.starts += 1
            except OSError as error:
                raise LaunchError(f"{self.name} could not be started: {error}.") from error

    def wait_ready(self, timeout: float) -> None:
        """Waits at most `timeout` seconds until the server answers. Raises LaunchError with the end of its log."""
        start = self.starts
        try:
            if not wait_answer(self.config, time.monotonic() + timeout, self.wait_ended):
                raise LaunchError(self.failure())
            self._answered_start = start
        except TimeoutError:
            age = time.monotonic() - self._started_at
            raise LaunchError(self._failure(f"does not answer, {age:.1f} s after its start")) from None

    def wait_ended(self, timeout: float | None = None) -> bool:
        """Waits at most `timeout` seconds; returns True if the process has ended, or was never started."""
        return self._process is None or self._process.wait(timeout) is not None

    def kill(self) -> None:
        """Ends the process with SIGKILL, frozen or not; returns when it is gone."""
        if self._process is not None:
            self._process.kill()

    def send(self, number: signal.Signals) -> None:
        """Sends a signal; raises LaunchError if the process does not run. After SIGSTOP its connections stay open."""
        if self._process is None or not self.is_alive():
            raise LaunchError(f"{self.name} is not running, so it cannot get {number.name}.")
        self._process.send(number)

    def is_alive(self) -> bool:
        return self._process is not None and self._process.wait(0) is None

    @property
    def is_ready(self) -> bool:
        """Whether the last start has answered in `wait_ready`, and its process runs."""
        return self.starts == self._answered_start and self.is_alive()

    @property
    def pid(self) -> int | None:
        """The process id of the last start, or None. Reading it waits until a fork server has forked the process."""
        return None if self._process is None else self._process.pid

    def has_served(self) -> bool:
        """Returns True if the last start has answered, or has begun to serve, according to its log."""
        if self.starts == self._answered_start:
            return self.starts > 0
        begin = serving_line(self.config).encode()
        with self.log_path.open("rb") as log:
            return any(line.startswith(begin) for line in log)

    @property
    def exit_code(self) -> int | None:
        """The exit code of the last start, or minus the signal that killed the process, or None."""
        return None if self._process is None else self._process.wait(0)

    @property
    def log_path(self) -> pathlib.Path:
        """The log of the last start, such as `ps-0.log`, or `ps-0.restart-1.log` after the second start."""
        return self._log_file(max(0, self.starts - 1))

    def _log_file(self, restarts: int) -> pathlib.Path:
        process = f"{self.owner and self.owner + '-'}{self.config.job}-{self.config.index}"
        return log_file(self._log_folder, process, restarts)

    @property
    def name(self) -> str:
        """The name of the task, with the name of its owner before it."""
        return f"the {self.owner}'s {self.config.name}" if self.owner else self.config.name

    @property
    def ending(self) -> str:
        """How the last start ended, such as `by SIGKILL` or `with code 1`."""
        code = self.exit_code
        if code is None:
            return "without being started"
        is_lost = self._process is not None and self._process.is_lost
        return ending_of(code) + (" (not its own: its fork server ended before it)" if is_lost else "")

    def failure(self) -> str:
        """Returns the message about a process that has ended while its cluster started."""
        return self._failure(f"ended {self.ending}" + ("" if self.has_served() else " before it served"))

    def _failure(self, what: str) -> str:
        lines = self.log_path.read_text(errors="replace").splitlines() if self.log_path.exists() else []
        tail = "\n".join(lines[-_TAIL_LINES:]) or "(empty)"
        return f"{self.name} at {self.config.address} {what}. Its log, {self.log_path}, ends with:\n{tail}"


def server_environment(inherited: Mapping[str, str], config: TaskConfig) -> dict[str, str]:
    """Returns the environment of a server process that inherits this process's environment."""
    environment = program_environment(inherited, config)
    # Every client of a server can read the server's environment, and this variable contains a token.
    environment.pop(DASHBOARD, None)
    root = str(pathlib.Path(__file__).resolve().parents[2])
    # The server must find this package. An installed package is found anyway, and its site-packages folder on
    # PYTHONPATH would precede the standard library.
    if root not in (sysconfig.get_path("purelib"), sysconfig.get_path("platlib")):
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, inherited.get("PYTHONPATH")]))
    if config.job == "ps":
        # Variables live in the host's memory; a parameter server would only take the GPU from workers.
        environment[VISIBLE] = ""
    return environment


def program_environment(inherited: Mapping[str, str], config: TaskConfig) -> dict[str, str]:
    """Returns the environment of the user's program in the role of a task."""
    environment = dict(inherited)
    environment["TF_CONFIG"] = config.to_json()
    environment.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    # Without this variable, the first process on a shared GPU would take all memory, and functions of others would
    # fail.
    environment.setdefault("TF_FORCE_GPU_ALLOW_GROWTH", "true")
    return environment


def free_addresses(count: int, *, besides: Collection[str] = ()) -> list[str]:
    """Returns `count` different `127.0.0.1:port` addresses, not among `besides`, where nothing listens.

    `besides` may contain the address of a server that is down at present. Raises LaunchError if too few ports are free.
    """
    addresses: list[str] = []
    for _ in range(_MOST_ATTEMPTS):
        if len(addresses) == count:
            return addresses
        # `secrets` has no seed. With `random`, two programs with the same seed would draw the same ports.
        port = secrets.choice(PORTS)
        address = f"127.0.0.1:{port}"
        if address not in addresses and address not in besides and portpicker.is_port_free(port):
            addresses.append(address)
    raise LaunchError(f"There are no {count} free ports between {PORTS.start} and {PORTS.stop}: end some servers.")


def free_cluster(counts: Mapping[str, int], *, besides: Collection[str] = ()) -> dict[str, list[str]]:
    """Returns free addresses for each job, as many as `counts` says."""
    addresses = iter(free_addresses(sum(counts.values()), besides=besides))
    return {job: [next(addresses) for _ in range(count)] for job, count in counts.items()}


class LocalServers:
    """Server processes by job and index, for the workers and parameter servers of a cluster.

    Args:
      cluster: the addresses of each job.
      log_folder: an existing folder, for logs such as `ps-0.log` of `/job:ps/task:0`, and `fork-server.log`.
      environment: the environment that the processes inherit; later changes have no effect.
      worker_gpus: `CUDA_VISIBLE_DEVICES` of each worker; by default the workers inherit the variable.
      starters: the hosts of servers on other machines, by job and index.
      worker_devices: the number of logical CPU devices of each worker.
    """

    def __init__(
        self,
        cluster: Mapping[str, Sequence[str]],
        log_folder: pathlib.Path,
        environment: Mapping[str, str],
        worker_gpus: Sequence[str] = (),
        starters: Mapping[tuple[str, int], ServerStarter] = types.MappingProxyType({}),
        worker_devices: int = 1,
    ):
        self._log_folder = log_folder
        self._environment = dict(environment)
        self._close = only_here(self._end)
        self._fork_server = ForkServerProcess(log_folder / "fork-server.log")
        self._starters = starters
        self._servers: dict[tuple[str, str, int], ServerProcess] = {}
        self.add_cluster(cluster, worker_gpus=worker_gpus, worker_devices=worker_devices)

    def add_cluster(
        self,
        cluster: Mapping[str, Sequence[str]],
        owner: str = "",
        worker_gpus: Sequence[str] = (),
        worker_devices: int = 1,
    ) -> None:
        """Adds the servers of a cluster, not started; `owner` becomes part of the names of servers and logs."""
        for job in SERVED_JOBS:
            for index in range(len(cluster.get(job, ()))):
                gpus = worker_gpus[index] if job == "worker" and worker_gpus else None
                self.add(TaskConfig(cluster, job, index, worker_devices if job == "worker" else 1), owner, gpus)

    def add(self, config: TaskConfig, owner: str = "", gpus: str | None = None) -> ServerProcess:
        """Adds a server, not started; `gpus` is its `CUDA_VISIBLE_DEVICES`."""
        starter = self._starters.get((config.job, config.index), self._fork_server)
        environment = self._environment if gpus is None else {**self._environment, VISIBLE: gpus}
        server = ServerProcess(config, self._log_folder, environment, starter, owner)
        self._servers[owner, config.job, config.index] = server
        return server

    def start(self) -> None:
        """Starts all servers at the same time; raises LaunchError if one could not be started."""
        for server in self:
            server.start()

    def wait_ready(self, timeout: float, is_given_up: Callable[[ServerProcess], bool] | None = None) -> None:
        """Waits at most `timeout` seconds until all servers answer. Raises LaunchError with the end of a log.

        `is_given_up` returns True for a server that need not answer. If `is_given_up` is given, another thread restarts
        ended servers, and this method waits for them. Otherwise an ended server is an error.
        """
        deadline, pause = time.monotonic() + timeout, threading.Event()
        while silent := [server for server in self if not (server.is_ready or (is_given_up and is_given_up(server)))]:
            try:
                silent[0].wait_ready(max(0.0, deadline - time.monotonic()))
            except LaunchError:
                # The server has ended if time is left; the other thread may have restarted it since.
                if is_given_up is None or time.monotonic() >= deadline:
                    raise
                pause.wait(_RESTART_INTERVAL)

    def close(self) -> None:
        """Ends all servers; returns when they are gone. Does nothing in a process forked from this one."""
        self._close()

    def _end(self) -> None:
        self._fork_server.close()
        for starter in self._starters.values():
            starter.close()
        for server in self:
            server.kill()

    def __getitem__(self, task: tuple[str, int]) -> ServerProcess:
        job, index = task
        if ("", job, index) not in self._servers:
            names = ", ".join(server.name for server in self)
            raise ClusterSpecError(f"There is no /job:{job}/task:{index} here; there are {names}.")
        return self._servers["", job, index]

    def __iter__(self) -> Iterator[ServerProcess]:
        return iter(tuple(self._servers.values()))
