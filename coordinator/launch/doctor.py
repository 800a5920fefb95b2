"""What `coordinator doctor` examines: this installation, this machine, and whether each task of the cluster answers.

It promises to change nothing, to load no TensorFlow, and to wait for no task longer than its timeout and a few seconds
more, in which it finds out why the task does not answer.
"""

import concurrent.futures
import dataclasses
import importlib.metadata
import os
import pathlib
import platform
import socket
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence

import psutil

from coordinator.addresses import check_port_is_free, parse_address
from coordinator.errors import LaunchError
from coordinator.heartbeat.listening import listen_only_at
from coordinator.heartbeat.probes import TaskProbe, find_obstacles
from coordinator.launch.serve import SERVED_JOBS
from coordinator.launch.task_config import TaskConfig, visible_gpus

_PACKAGES = ("tensorflow", "keras", "grpcio", "protobuf", "numpy", "psutil")
_EPHEMERAL_PORTS = pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range")
_ROUND_TRIPS = 9
_MOST_AT_ONCE = 32


@dataclasses.dataclass(frozen=True)
class Finding:
    """Something that was examined.

    Attributes:
      subject: what was examined.
      text: what was found.
      is_problem: it has to be corrected.
    """

    subject: str
    text: str
    is_problem: bool = False


def examine(environment: Mapping[str, str], config: TaskConfig | None, timeout: float) -> Iterator[Finding]:
    """Yields what is found, one thing after the other.

    Args:
      environment: the environment of this process.
      config: the cluster and the task of this process, or None without a cluster.
      timeout: how long a task may take to answer, in seconds.
    """
    yield from _installation()
    yield from _machine(environment)
    if config is None:
        yield Finding("cluster", "TF_CONFIG is not set, so there is no cluster to examine")
        return
    yield from _ports(config)
    tasks = [(job, index, address) for job in SERVED_JOBS for index, address in config.cluster.get(job, {}).items()]
    with concurrent.futures.ThreadPoolExecutor(_MOST_AT_ONCE, "coordinator-doctor") as threads:
        yield from threads.map(lambda task: _task(*task, timeout=timeout), tasks)


def _installation() -> Iterator[Finding]:
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    yield Finding("python", f"{platform.python_version()} on {system}")
    for package in _PACKAGES:
        try:
            yield Finding(package, importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            yield Finding(package, "is not installed", is_problem=True)


def _machine(environment: Mapping[str, str]) -> Iterator[Finding]:
    memory = psutil.virtual_memory()
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gib = f"{memory.available / 2**30:.1f} GiB of {memory.total / 2**30:.1f} GiB memory available"
    yield Finding("machine", f"{socket.gethostname()}: {cpus} CPUs, {gib}, {len(visible_gpus(environment))} GPUs")
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            listen_only_at("127.0.0.1", server.getsockname()[1])
        yield Finding("loopback", "servers on localhost can be closed to other machines")
    except (OSError, LaunchError) as error:
        yield Finding("loopback", f"servers are open to other machines, see docs/security.md: {error}", is_problem=True)


def _ports(config: TaskConfig) -> Iterator[Finding]:
    own = f"{config.name} at {config.address}"
    if config.job not in SERVED_JOBS:
        try:
            check_port_is_free(config.name, config.address)
            yield Finding("this task", f"{own}; its port is free")
        except LaunchError as error:
            yield Finding("this task", str(error), is_problem=True)
    else:
        yield Finding("this task", own)
    # A client that tries to reach a dead server on its own machine may connect to itself there, and keep it out.
    ports = _ephemeral_ports()
    shared = [
        address
        for job in SERVED_JOBS
        for address in config.cluster.get(job, {}).values()
        if parse_address(address).port in ports
    ]
    if shared:
        text = f"the kernel gives ports from {ports.start} to {ports.stop - 1} to connections, too"
        yield Finding("ports", f"{', '.join(shared)}: {text}; a server may find its port taken: choose lower ones")


def _ephemeral_ports() -> range:
    try:
        first, last = map(int, _EPHEMERAL_PORTS.read_text().split())
    except (OSError, ValueError):
        return range(0)
    return range(first, last + 1)


def _task(job: str, index: int, address: str, *, timeout: float) -> Finding:
    subject = f"{job} {index}"
    with TaskProbe(address) as probe:
        started = time.perf_counter()
        status = probe.status(timeout)
        connected = time.perf_counter() - started
        if status is None:
            [obstacle] = find_obstacles([address]).values()
            return Finding(subject, f"{address} does not answer: {obstacle.value}", is_problem=True)
        prefix = f"/job:{job}/replica:0/task:{index}/"
        if not any(device.startswith(prefix) for device in status.devices):
            devices = ", ".join(status.devices)
            return Finding(subject, f"{address} is another task, with the devices {devices}", is_problem=True)
        times = _round_trips(probe, timeout)
    hosts = ", ".join(_resolved(address))
    devices = ", ".join(device.rpartition("device:")[2] for device in status.devices)
    typical, longest, first = (f"{1000 * each:.1f} ms" for each in (statistics.median(times), max(times), connected))
    return Finding(subject, f"{address} ({hosts}) answers in {typical}, at most {longest}; at first {first}; {devices}")


def _round_trips(probe: TaskProbe, timeout: float) -> Sequence[float]:
    times = []
    for _ in range(_ROUND_TRIPS):
        started = time.perf_counter()
        probe.status(timeout)
        times.append(time.perf_counter() - started)
    return times


def _resolved(address: str) -> list[str]:
    host, port = parse_address(address)
    return sorted({str(endpoint[4][0]) for endpoint in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)})
