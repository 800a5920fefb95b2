"""Starts the servers of a cluster on other hosts, each by a separate `ssh` process; programs run on this machine.

    this machine                             the host
    ssh  <-- standard input, a pipe here -->  sshd -- coordinator serve --exit-with-parent

    alive thread, one for each host: writes to each standard input from time to time

    python -m coordinator.launch.ssh COUNT    runs on a host first, and prints its report for COUNT servers

A server ends when its standard input is closed, which happens when its connection, its `ssh` or this process ends in
any way. If packets no longer arrive, the host does not notice that end, and the server ends five minutes after the last
byte that it received. Guarantees:

- Every host is reached before anything is started; an error says which host cannot be used, and why.
- `ssh` asks for no password. A connection is lost if its host has not answered for half a minute.
"""

import concurrent.futures
import contextlib
import dataclasses
import ipaddress
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from coordinator.addresses import in_address, parse_address
from coordinator.background_thread import BackgroundThread
from coordinator.errors import LaunchError
from coordinator.launch.run_request import RunRequest, fill, spread
from coordinator.launch.serve import SERVE_COMMAND
from coordinator.launch.server_process import free_addresses, server_environment
from coordinator.launch.task_config import VISIBLE, TaskConfig, divide_gpus, visible_gpus
from coordinator.version import __version__
from coordinator.versions import version_of

_OPTIONS = (
    *("-o", "BatchMode=yes"),
    *("-o", "ConnectTimeout=15"),
    *("-o", "ServerAliveInterval=10"),
    *("-o", "ServerAliveCountMax=3"),
)
_REPORT_TIMEOUT = 90.0
# The maximum number of hosts that are asked at the same time.
_MOST_AT_ONCE = 16
# How long a server may take to end after its standard input is closed, in seconds.
_END_TIMEOUT = 5.0
# The exit code of `ssh` if the connection failed or was lost, or a signal ended the remote shell.
_SSH_FAILED = 255
# The seconds without a byte after which a server ends. A terminal may suspend this process for some minutes.
_PARENT_TIMEOUT = 300.0
_ALIVE_INTERVAL = 20.0
# `SERVE_COMMAND` ends with `--exit-with-parent`, whose value is the timeout.
_SERVE = (*SERVE_COMMAND, f"{_PARENT_TIMEOUT:g}")
_SENT = ("TF_CONFIG", "TF_CPP_MIN_LOG_LEVEL", "PYTHONPATH")


@dataclasses.dataclass(frozen=True)
class HostReport:
    """The facts about a host that are needed before servers start there.

    `ports` are free ports, one for each server; `gpus` are named as in `CUDA_VISIBLE_DEVICES`.
    """

    versions: str
    ports: list[int]
    gpus: list[str]


def _installed_versions() -> str:
    return f"coordinator {__version__}, TensorFlow {version_of('tensorflow')}"


class SshProcess:
    """A server on another host; `process` is its `ssh`, with a pipe for standard input."""

    # If the exit code is unknown, `ssh` itself has written the reason to the server's log.
    is_lost = False

    def __init__(self, process: "subprocess.Popen[bytes]"):
        assert process.stdin is not None
        self._process = process
        self._input = process.stdin
        self._closed_at = 0.0

    @property
    def pid(self) -> int:
        """The process id of the server's `ssh` on this machine."""
        return self._process.pid

    def wait(self, timeout: float | None = None) -> int | None:
        """Returns the server's exit code, or minus the signal that killed it, or 255 if the connection was lost.

        Returns None if the server did not end in time.
        """
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        # The remote shell reports the signal n as 128 + n.
        return 128 - code if 128 < code < _SSH_FAILED else code

    def keep_alive(self) -> None:
        """Tells the server that this process is alive."""
        # The write fails if the server has ended or was closed.
        with contextlib.suppress(OSError, ValueError):
            self._input.write(b"\n")

    def close(self) -> None:
        if not self._input.closed:
            self._closed_at = time.monotonic()
            self._input.close()

    def kill(self) -> None:
        """Ends the server; returns when its `ssh` is gone."""
        self.close()
        # Servers that were closed at the same time share one timeout.
        if self.wait(max(0.0, self._closed_at + _END_TIMEOUT - time.monotonic())) is None:
            self._process.kill()
            self._process.wait()

    def send(self, number: signal.Signals) -> None:
        """Raises LaunchError, because a server on another host cannot get signals."""
        raise LaunchError(f"A server on another host cannot get {number.name}.")


class SshHost:
    """Starts servers on the host `name`, written as for `ssh`; the argument `ssh` is the command with its options.

    `found` is the environment of this process. A server gets the variables that differ from `found`, and the variables
    named in `_SENT` and `chosen`. The server has all other variables from its host.
    """

    def __init__(self, name: str, ssh: Sequence[str], found: Mapping[str, str], chosen: Collection[str] = ()):
        self.name = name
        self._ssh = ssh
        self._found = found
        self._sent = {*_SENT, *chosen}
        # Guards `_processes` and `_is_closed`.
        self._lock = threading.Lock()
        self._processes: list[SshProcess] = []
        self._is_closed = False
        self._alive = BackgroundThread("coordinator-ssh-alive", self._keep_alive)

    def resolved_name(self) -> str:
        """Returns the name or address that `ssh` connects to, which the configuration of `ssh` may change."""
        settings = self._run([*self._ssh, "-G", self.name])
        names = [line.split()[1] for line in settings.splitlines() if line.startswith("hostname ")]
        return names[0] if names else self.name.rpartition("@")[2]

    def report(self, servers: int, environment: Mapping[str, str]) -> HostReport:
        """Asks the host for its report. Raises LaunchError if the host cannot be reached or has other versions."""
        command = [sys.executable, "-m", "coordinator.launch.ssh", str(servers)]
        printed = self._run(self.command(environment, command))
        try:
            # The shell may have printed other lines before the report.
            report = HostReport(**json.loads(printed.splitlines()[-1]))
        except (ValueError, IndexError, TypeError):
            raise LaunchError(f"{self.name} answers {printed!r} by ssh, which is no report of the library.") from None
        if report.versions != _installed_versions():
            here = f"this machine has {_installed_versions()}"
            raise LaunchError(f"{self.name} has {report.versions}, and {here}: install the same on all hosts.")
        return report

    def command(self, environment: Mapping[str, str], command: Sequence[str] = _SERVE) -> list[str]:
        """Returns the command line that runs a command on the host, in the same folder as here if the host has it."""
        assignments = [
            f"{name}={value}"
            for name, value in environment.items()
            # An empty value is sent to a parameter server, so that it gets no GPU even if the host has some.
            if name in self._sent or self._found.get(name) != value or (name == VISIBLE and not value)
        ]
        folder = shlex.quote(os.getcwd())
        # The shell does not `exec` the command, so that the shell can report a signal that ends the command.
        script = f"cd {folder} 2>/dev/null; {shlex.join(['env', *assignments, *command])}; exit $?"
        return [*self._ssh, *_OPTIONS, self.name, f"exec sh -c {shlex.quote(script)}"]

    def start_server(self, environment: Mapping[str, str], log: int) -> SshProcess:
        """Starts a server that prints to the descriptor `log`. Raises LaunchError if closed, OSError if `ssh` fails."""
        command = self.command(environment)
        with self._lock:
            if self._is_closed:
                raise LaunchError("The servers are closed; none is started any more.")
            ssh = subprocess.Popen(
                command, bufsize=0, stdin=subprocess.PIPE, stdout=log, stderr=log, start_new_session=True
            )
            if not self._processes:
                self._alive.start()
            self._processes.append(SshProcess(ssh))
            return self._processes[-1]

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            for process in self._processes:
                process.close()
        self._alive.stop()
        self._alive.wait_stopped()

    def _keep_alive(self) -> None:
        while not self._alive.stopping.wait(_ALIVE_INTERVAL):
            for process in tuple(self._processes):
                process.keep_alive()

    def _run(self, command: Sequence[str]) -> str:
        try:
            ended = subprocess.run(
                command, capture_output=True, text=True, stdin=subprocess.DEVNULL, timeout=_REPORT_TIMEOUT, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise LaunchError(f"{self.name} cannot be reached by ssh: {error}.") from error
        if ended.returncode != 0:
            reason = next(reversed(ended.stderr.strip().splitlines()), f"exit code {ended.returncode}")
            by_hand = shlex.join([*self._ssh, self.name, "true"])
            raise LaunchError(
                f"{self.name}: {reason} (`{by_hand}` must work without a password, and the Python "
                f"{sys.executable} must be there, with the library)."
            )
        return ended.stdout


def connect(
    request: RunRequest, roles: Iterable[str], environment: Mapping[str, str], found: Mapping[str, str]
) -> tuple[dict[str, list[str]], dict[tuple[str, int], SshHost], list[str]]:
    """Reaches all hosts, and assigns the servers to them. Raises LaunchError if a host cannot be reached or used.

    Returns the addresses of each job, each server's host by job and index, and `CUDA_VISIBLE_DEVICES` of each worker.
    The last list is empty if each worker sees all GPUs of its host.

    `roles` are the jobs of the programs on this machine. All processes inherit `environment`; `found` is the
    environment of this process.
    """
    places = {
        "worker": fill(request.hosts, request.workers),
        "ps": fill(request.ps_hosts, request.ps) if request.ps_hosts else spread(request.hosts, request.ps),
    }
    counts = Counter(name for names in places.values() for name in names)
    chosen = set(dict(request.env))
    sample = server_environment(environment, TaskConfig({"worker": ["localhost:1"]}, "worker", 0))
    if request.gpus_per_worker is not None:
        if VISIBLE not in chosen:
            # The GPUs of the hosts are divided, not the GPUs of this machine.
            sample.pop(VISIBLE, None)
        chosen.add(VISIBLE)
    hosts = {name: SshHost(name, shlex.split(request.ssh), found, chosen) for name in counts}
    with concurrent.futures.ThreadPoolExecutor(_MOST_AT_ONCE, "coordinator-ssh") as threads:
        named = dict(zip(hosts, threads.map(SshHost.resolved_name, hosts.values()), strict=True))
        asked = {name: threads.submit(hosts[name].report, count, sample) for name, count in counts.items()}
        reports = {name: answer.result() for name, answer in asked.items()}
    ports = {name: iter(report.ports) for name, report in reports.items()}
    addresses = {
        job: [f"{in_address(named[name])}:{next(ports[name])}" for name in names] for job, names in places.items()
    }
    own = in_address(_own_host(named.values()))
    for role, address in zip(roles, free_addresses(len(tuple(roles))), strict=True):
        addresses[role] = [f"{own}:{address.rpartition(':')[2]}"]
    starters = {(job, index): hosts[name] for job, names in places.items() for index, name in enumerate(names)}
    if (per_worker := request.gpus_per_worker) is None:
        return addresses, starters, []
    gpus = {
        name: iter(divide_gpus(reports[name].gpus, count, per_worker, f"{name} has")[0])
        for name, count in Counter(places["worker"]).items()
    }
    return addresses, starters, [next(gpus[name]) for name in places["worker"]]


def _own_host(names: Iterable[str]) -> str:
    """Returns this machine's address for the servers; raises LaunchError if only some of them would use loopback."""
    own = {name: _source_address(name) for name in names}
    is_loopback = {name: ipaddress.ip_address(address).is_loopback for name, address in own.items()}
    if len(set(is_loopback.values())) > 1:
        local = ", ".join(name for name, is_local in is_loopback.items() if is_local)
        raise LaunchError(f"Other hosts cannot reach {local}: name this machine as they do, or leave it out.")
    return next(iter(own.values()))


def _source_address(name: str) -> str:
    try:
        family, kind, protocol, _, endpoint = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as trial:
            # `connect` sends nothing, because this is a datagram socket, but makes the kernel choose the interface.
            trial.connect(endpoint)
            return str(trial.getsockname()[0])
    except OSError as error:
        raise LaunchError(f"There is no way to {name}: {error}.") from error


if __name__ == "__main__":
    report = HostReport(
        versions=_installed_versions(),
        ports=[parse_address(address).port for address in free_addresses(int(sys.argv[1]))],
        gpus=visible_gpus(os.environ),
    )
    print(json.dumps(dataclasses.asdict(report)))
