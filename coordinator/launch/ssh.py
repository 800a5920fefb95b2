"""Servers on another host, each in the session of a separate `ssh`.

    this machine                             the host
    ssh  <-- standard input, a pipe here -->  sshd -- coordinator serve --exit-with-parent

    alive thread, one for each host: writes to each standard input from time to time

A server ends when its standard input is closed: with its connection, with the `ssh`, and with this process, however
they end. Where the host does not notice that, since no packet arrives any more, the server ends five minutes after the
last byte. It promises that no password is asked for, and that a connection without an answer for half a minute is lost.
"""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Mapping, Sequence

from coordinator.background_thread import BackgroundThread
from coordinator.errors import LaunchError
from coordinator.launch.gpus import VISIBLE
from coordinator.launch.host_report import HostReport, installed_versions
from coordinator.launch.serve import SERVE_COMMAND

_OPTIONS = (
    *("-o", "BatchMode=yes"),
    *("-o", "ConnectTimeout=15"),
    *("-o", "ServerAliveInterval=10"),
    *("-o", "ServerAliveCountMax=3"),
)
_REPORT_TIMEOUT = 90.0
# How long a server may take to end after its standard input, in seconds.
_END_TIMEOUT = 5.0
# Of `ssh`: the connection failed or was lost, or a signal ended the remote shell.
_SSH_FAILED = 255
# A terminal may suspend this process for some minutes without a loss.
_PARENT_TIMEOUT = 300.0
_ALIVE_INTERVAL = 20.0
# The command ends with `--exit-with-parent`.
_SERVE = (*SERVE_COMMAND, f"{_PARENT_TIMEOUT:g}")
_SENT = ("TF_CONFIG", "TF_CPP_MIN_LOG_LEVEL", "PYTHONPATH")


class SshProcess:
    """A server on another host.

    Args:
      process: its `ssh`, with a pipe for its standard input.

    Attributes:
      is_lost: False; what is not known of the server's end, its `ssh` has said.
    """

    is_lost = False

    def __init__(self, process: "subprocess.Popen[bytes]"):
        assert process.stdin is not None
        self._process = process
        self._input = process.stdin
        self._closed_at = 0.0

    @property
    def pid(self) -> int:
        """The id of its `ssh` on this machine."""
        return self._process.pid

    def wait(self, timeout: float | None = None) -> int | None:
        """Returns the server's exit code, minus the signal that killed it; None if it did not end in time.

        It is 255 if the connection was lost.
        """
        try:
            code = self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None
        # The shell that it ran in reports the signal n as 128 + n.
        return 128 - code if 128 < code < _SSH_FAILED else code

    def keep_alive(self) -> None:
        """Tells the server that this process is there."""
        # It has ended, or was closed.
        with contextlib.suppress(OSError, ValueError):
            self._input.write(b"\n")

    def close(self) -> None:
        """Closes the server's standard input, so that it ends."""
        if not self._input.closed:
            self._closed_at = time.monotonic()
            self._input.close()

    def kill(self) -> None:
        """Ends the server, and returns when its `ssh` is gone."""
        self.close()
        # Those that were closed together end together, or not at all.
        if self.wait(max(0.0, self._closed_at + _END_TIMEOUT - time.monotonic())) is None:
            self._process.kill()
            self._process.wait()

    def send(self, number: signal.Signals) -> None:
        """Raises LaunchError: a server on another host gets no signals."""
        raise LaunchError(f"A server on another host cannot get {number.name}.")


class SshHost:
    """Starts servers on a host.

    Args:
      name: of the host, as `ssh` takes it.
      ssh: the command, with its options.
      found: the environment of this process. What a server's own has beside it is sent; the rest is that of the host.
      chosen: names of variables that are sent also where they are the same in `found`.
    """

    def __init__(self, name: str, ssh: Sequence[str], found: Mapping[str, str], chosen: Collection[str] = ()):
        self.name = name
        self._ssh = ssh
        self._found = found
        self._sent = {*_SENT, *chosen}
        self._processes: list[SshProcess] = []
        self._is_closed = threading.Event()
        self._lock = threading.Lock()
        self._alive: BackgroundThread | None = None

    def resolved_name(self) -> str:
        """Returns the name or address that `ssh` connects to, which its configuration may give."""
        settings = self._run([*self._ssh, "-G", self.name])
        names = [line.split()[1] for line in settings.splitlines() if line.startswith("hostname ")]
        return names[0] if names else self.name.rpartition("@")[2]

    def report(self, servers: int, environment: Mapping[str, str]) -> HostReport:
        """Asks the host what has to be known before servers are started there.

        Args:
          servers: how many it is to have.
          environment: that of a server.

        Raises:
          LaunchError: the host cannot be reached, or has not what this machine has.
        """
        command = [sys.executable, "-m", "coordinator.launch.host_report", str(servers)]
        printed = self._run(self.command(environment, command))
        try:
            # What a shell prints when it starts comes before.
            report = HostReport(**json.loads(printed.splitlines()[-1]))
        except (ValueError, IndexError, TypeError):
            raise LaunchError(f"{self.name} answers {printed!r} by ssh, which is no report of the library.") from None
        if report.versions != installed_versions():
            here = f"this machine has {installed_versions()}"
            raise LaunchError(f"{self.name} has {report.versions}, and {here}: install the same on all hosts.")
        return report

    def command(self, environment: Mapping[str, str], command: Sequence[str] = _SERVE) -> list[str]:
        """Returns the command line that runs a command on the host, in the folder of the same path if there is one."""
        sent = {name: value for name, value in environment.items() if self._is_sent(name, value)}
        assignments = [f"{name}={value}" for name, value in sent.items()]
        folder = shlex.quote(os.getcwd())
        # Not `exec`: the shell stays, and reports a signal that ends the command.
        script = f"cd {folder} 2>/dev/null; {shlex.join(['env', *assignments, *command])}; exit $?"
        return [*self._ssh, *_OPTIONS, self.name, f"exec sh -c {shlex.quote(script)}"]

    def start_server(self, environment: Mapping[str, str], log: int) -> SshProcess:
        """Starts a server.

        Args:
          environment: its environment.
          log: the descriptor that takes what it prints.

        Raises:
          LaunchError: this is closed.
          OSError: `ssh` cannot be started.
        """
        with self._lock:
            if self._is_closed.is_set():
                raise LaunchError("The servers are closed; none is started any more.")
            process = SshProcess(
                subprocess.Popen(
                    self.command(environment),
                    bufsize=0,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )
            self._processes.append(process)
            if self._alive is None:
                self._alive = BackgroundThread("coordinator-ssh-alive", self._keep_alive)
                self._alive.start()
        return process

    def close(self) -> None:
        """Has all servers begin to end."""
        with self._lock:
            self._is_closed.set()
            for process in self._processes:
                process.close()
        if self._alive is not None:
            self._alive.stop()
            self._alive.wait_stopped()

    def _keep_alive(self) -> None:
        while not self._is_closed.wait(_ALIVE_INTERVAL):
            for process in tuple(self._processes):
                process.keep_alive()

    def _is_sent(self, name: str, value: str) -> bool:
        # No GPU for a parameter server, also where the host has some.
        return name in self._sent or self._found.get(name) != value or (name == VISIBLE and not value)

    def _run(self, command: Sequence[str]) -> str:
        """Returns what a command prints.

        Raises:
          LaunchError: it failed.
        """
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
