"""A cluster whose servers are on other hosts: the addresses that they will have, and what starts them.

The programs run on this machine. It promises to have reached every host before anything is started, and to say which
host cannot be used, and why.
"""

import concurrent.futures
import dataclasses
import ipaddress
import shlex
import socket
from collections import Counter
from collections.abc import Iterable, Mapping

from coordinator.addresses import in_address
from coordinator.errors import LaunchError
from coordinator.launch.gpus import VISIBLE, divide_gpus
from coordinator.launch.host_report import HostReport
from coordinator.launch.hosts import fill, spread
from coordinator.launch.local_servers import free_addresses
from coordinator.launch.run_request import RunRequest
from coordinator.launch.server_process import server_environment
from coordinator.launch.ssh import SshHost
from coordinator.launch.task_config import TaskConfig

_MOST_AT_ONCE = 16


@dataclasses.dataclass(frozen=True)
class SshCluster:
    """The cluster.

    Attributes:
      addresses: of each job.
      starters: what starts each server, by job and index.
      worker_gpus: `CUDA_VISIBLE_DEVICES` of each worker; empty if each worker sees all of its host.
    """

    addresses: dict[str, list[str]]
    starters: dict[tuple[str, int], SshHost]
    worker_gpus: list[str]


def connect(
    request: RunRequest, roles: Iterable[str], environment: Mapping[str, str], found: Mapping[str, str]
) -> SshCluster:
    """Reaches all hosts, and decides which server is where.

    Args:
      request: what to run, with hosts.
      roles: the jobs of the programs, which are on this machine.
      environment: the environment that all processes inherit.
      found: the environment of this process.

    Raises:
      LaunchError: a host cannot be reached, or lacks something.
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
            # The GPUs of this machine are not those to divide.
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
    return SshCluster(addresses, starters, _worker_gpus(request, places["worker"], reports))


def _worker_gpus(request: RunRequest, places: list[str], reports: Mapping[str, HostReport]) -> list[str]:
    if request.gpus_per_worker is None:
        return []
    per_worker = request.gpus_per_worker
    counts = Counter(places)
    divided = {
        name: iter(divide_gpus(reports[name].gpus, count, per_worker, f"{name} has")[0])
        for name, count in counts.items()
    }
    return [next(divided[name]) for name in places]


def _own_host(names: Iterable[str]) -> str:
    """Returns the address at which the servers reach this machine.

    Raises:
      LaunchError: some hosts are this machine by its loopback address, and others are not.
    """
    own = {name: _source_address(name) for name in names}
    is_loopback = {name: ipaddress.ip_address(address).is_loopback for name, address in own.items()}
    if len(set(is_loopback.values())) > 1:
        local = ", ".join(name for name, is_local in is_loopback.items() if is_local)
        raise LaunchError(f"Other hosts cannot reach {local}: name this machine as they do, or leave it out.")
    return next(iter(own.values()))


def _source_address(name: str) -> str:
    """Returns the address that this machine has towards a host."""
    try:
        family, kind, protocol, _, endpoint = socket.getaddrinfo(name, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as trial:
            # Sends nothing, but chooses the interface.
            trial.connect(endpoint)
            return str(trial.getsockname()[0])
    except OSError as error:
        raise LaunchError(f"There is no way to {name}: {error}.") from error
