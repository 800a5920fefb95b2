"""Describes what `coordinator run` or `coordinator slurm` runs, as a value.

The constructor of a `RunRequest` checks everything that can be checked before a process is started.
"""

import dataclasses
import importlib.machinery
import os
import pathlib
import re
import shlex
import sys
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from coordinator.addresses import parse_page_address
from coordinator.errors import ClusterSpecError, LaunchError, SettingError
from coordinator.options import check_integer, check_number

_HOST = re.compile(r"(?P<name>(?:\w[\w.-]*@)?(?:\w[\w.-]*|\[[0-9A-Fa-f:.]+\]))(?::(?P<slots>\d{1,4}))?")
_HOSTFILE_LINE = re.compile(r"(\S+)\s+slots\s*=\s*(\d+)")


class Host(NamedTuple):
    """A host for servers.

    `name` is written as for `ssh`, such as `node1` or `user@node1`, and has no brackets if it is an IPv6 address.
    `slots` is the maximum number of servers of one kind, workers or parameter servers.
    """

    name: str
    slots: int


def parse_hosts(option: str, text: str) -> tuple[Host, ...]:
    """Reads an option's list such as `a:2,user@b:4`; a host without a number has one slot. Raises SettingError."""
    return _checked(option, [part.strip() for part in text.split(",")])


def read_hostfile(path: pathlib.Path) -> tuple[Host, ...]:
    """Reads a file with a host on each line: `a slots=2`, `a:2` or `a`; `#` begins a comment. Raises SettingError."""
    try:
        lines = [line.partition("#")[0].strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError("hostfile", f"cannot be read: {error}.") from None
    parts = [f"{match[1]}:{match[2]}" if (match := _HOSTFILE_LINE.fullmatch(line)) else line for line in lines if line]
    return _checked("hostfile", parts)


def _checked(option: str, parts: Sequence[str]) -> tuple[Host, ...]:
    hosts: list[Host] = []
    for part in parts:
        match = _HOST.fullmatch(part)
        if match is None or int(match["slots"] or 1) == 0:
            raise SettingError(option, f"must name hosts as in 'a:2,b:4', with 1 to 9999 servers each, got {part!r}.")
        name = match["name"].replace("[", "").replace("]", "")
        if name in (host.name for host in hosts):
            raise SettingError(option, f"names {name} twice.")
        hosts.append(Host(name, int(match["slots"] or 1)))
    if not hosts:
        raise SettingError(option, "names no host.")
    return tuple(hosts)


def slots_of(hosts: Iterable[Host]) -> int:
    """Returns the number of slots of all hosts together."""
    return sum(host.slots for host in hosts)


def fill(hosts: Sequence[Host], count: int) -> list[str]:
    """Returns the host of each server; the first host is filled first."""
    return [host.name for host in hosts for _ in range(host.slots)][:count]


def spread(hosts: Sequence[Host], count: int) -> list[str]:
    """Returns the host of each server; the hosts get one server each in turn."""
    return [hosts[index % len(hosts)].name for index in range(count)]


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A program and the cluster to run it on, as the command line gives them. All times are in seconds.

    Attributes:
      program: the path of a Python program, or the name of a module.
      hosts: the hosts of the servers, reached by ssh; empty for this machine. They get the parameter servers in turn.
      ps_hosts: separate hosts for the parameter servers.
      gpus_per_worker: how many GPUs each worker has for itself; with None every worker sees all GPUs.
      restarts: how often a failed program is restarted, on the same servers.
      server_restarts: how often each server that ends is restarted, on its port.
      evaluator: whether the program also runs once as evaluator.
      evaluator_workers: the number of workers in the evaluator's own cluster, which also has a parameter server; 0 for
        no such cluster. With such a cluster the program always runs as evaluator, too.
      evaluator_timeout: how long the evaluator may run after the chief has ended with code 0.
      start_timeout: how long all servers together may take until they answer.
      env: variables that are added to the environment of all processes.
      log_dir: the folder in which each run creates a folder, for the logs of servers and of TensorFlow's C++ code in
        the program. With None the servers' logs are kept only if a log explains a failure.
      tee: whether the program's output is also written to logs, and the command also shows the servers' logs.
      verbose: whether to show the logs of TensorFlow's C++ code.
      dashboard: the address of the program's dashboard, `host:port` or `host:port/token`; None for no dashboard.
      looks_for_files: whether the constructor calls `check_files`. Otherwise the host that needs the files calls it.

    Raises:
      ClusterSpecError: there is no worker, or no parameter server.
      LaunchError: a file is missing, or options are wrong or contradict each other.
      SettingError: a number is out of bounds.
    """

    program: str
    module: bool = False
    arguments: tuple[str, ...] = ()
    workers: int = 1
    ps: int = 1
    hosts: tuple[Host, ...] = ()
    ps_hosts: tuple[Host, ...] = ()
    ssh: str = "ssh"
    gpus_per_worker: int | None = None
    restarts: int = 0
    server_restarts: int = 3
    evaluator: bool = False
    evaluator_workers: int = 0
    evaluator_timeout: float = 300.0
    start_timeout: float = 120.0
    env: tuple[tuple[str, str], ...] = ()
    log_dir: pathlib.Path | None = None
    tee: bool = False
    verbose: bool = False
    dashboard: str | None = None
    trace: pathlib.Path | None = None
    dry_run: bool = False
    looks_for_files: bool = True

    def __post_init__(self) -> None:
        for option, count in (("--workers", self.workers), ("--ps", self.ps)):
            if count < 1:
                message = f"{option} must be at least 1, got {count}: training needs both kinds of server."
                raise ClusterSpecError(message)
        for name in ("gpus_per_worker", "restarts", "server_restarts", "evaluator_workers"):
            if (count := getattr(self, name)) is not None:
                check_integer(name, count, 0)
        for name in ("evaluator_timeout", "start_timeout"):
            check_number(name, getattr(self, name), above=0, unit="seconds")
        self._check_surroundings()
        if self.tee and self.log_dir is None:
            raise LaunchError("--tee needs --log-dir FOLDER, for the files.")
        if "TF_CONFIG" in dict(self.env):
            raise LaunchError("--env cannot set TF_CONFIG: each process gets its own.")
        self._check_hosts()
        if self.looks_for_files:
            self.check_files()

    def _check_surroundings(self) -> None:
        try:
            os.getcwd()
        except OSError:
            message = "The folder that this command runs in does not exist any more: change to another one."
            raise LaunchError(message) from None
        try:
            if not shlex.split(self.ssh):
                raise LaunchError("--ssh must be a command, got nothing.")
        except ValueError as error:
            message = f"--ssh must be a command as a shell takes it, got {self.ssh!r}: {error}."
            raise LaunchError(message) from None
        try:
            if self.dashboard is not None:
                parse_page_address(self.dashboard, "--dashboard")
        except ValueError as error:
            raise LaunchError(str(error)) from None

    def _check_hosts(self) -> None:
        for option, count, hosts in (("workers", self.workers, self.hosts), ("ps", self.ps, self.ps_hosts)):
            if hosts and count > slots_of(hosts):
                raise LaunchError(f"--{option} {count} is more than the hosts have: {slots_of(hosts)}.")
        if self.ps_hosts and not self.hosts:
            raise LaunchError("--ps-hosts needs --hosts or --hostfile, for the workers.")
        if self.hosts and self.evaluator_workers:
            raise LaunchError("--evaluator-workers cannot be used with --hosts: its servers would be on this machine.")

    def check_files(self) -> None:
        """Raises LaunchError if this machine lacks the program or the folder for the trace."""
        if self.trace is not None and (self.trace.is_dir() or not self.trace.parent.is_dir()):
            raise LaunchError(f"--trace must be a file in a folder that exists, got {self.trace}.")
        if self.module:
            folders = dict(self.env).get("PYTHONPATH", "").split(os.pathsep)
            if not _has_module(self.program, folders):
                how = f"it is looked for as `python -m {self.program}` does"
                raise LaunchError(f"There is no module {self.program} to run: {how}.")
        elif os.path.isdir(self.program):
            raise LaunchError(f"{self.program} is a folder: give the path of a Python program.")
        elif not os.path.isfile(self.program):
            raise LaunchError(f"There is no program {self.program}: give the path of a Python program.")

    @property
    def command(self) -> tuple[str, ...]:
        """The arguments of the interpreter that run the program."""
        return ("-m", self.program, *self.arguments) if self.module else (self.program, *self.arguments)


def _has_module(name: str, folders: Sequence[str]) -> bool:
    """Returns True if `python -m` finds a module to run. Unlike `importlib.util.find_spec`, it imports nothing."""
    path: list[str] | None = [os.getcwd(), *folders, *sys.path]
    full_name = ""
    for part in [*name.split("."), "__main__"]:
        full_name = f"{full_name}.{part}" if full_name else part
        if path is None:
            # The module before `part` is not a package, and can be run only if it is the whole `name`.
            return part == "__main__" and full_name == f"{name}.__main__"
        spec = importlib.machinery.PathFinder.find_spec(full_name, path)
        if spec is None:
            return False
        folders_of_package = spec.submodule_search_locations
        path = None if folders_of_package is None else list(folders_of_package)
    return True
