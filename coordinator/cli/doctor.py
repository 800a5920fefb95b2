"""`coordinator doctor` and `coordinator profile`: examine and profile the cluster of `TF_CONFIG`.

    doctor     examines this installation, this machine, and whether each task of the cluster answers
    profile    collects TensorFlow's profiles of all servers while they train

Guarantees of `doctor`: it changes nothing. It loads TensorFlow only to examine a version that was not tested, and in
another process. It waits for a task at most for the timeout, plus a few seconds to find out why the task does not
answer.
"""

import argparse
import concurrent.futures
import contextlib
import dataclasses
import os
import pathlib
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

import psutil

from coordinator.addresses import check_port_is_free, parse_address, path_text
from coordinator.errors import ClusterSpecError, LaunchError
from coordinator.heartbeat.listening import listen_only_at
from coordinator.heartbeat.probes import TaskProbe, TaskStatus, find_obstacles
from coordinator.launch.serve import SERVED_JOBS
from coordinator.launch.task_config import TaskConfig, visible_gpus
from coordinator.options import check_number
from coordinator.version import __version__
from coordinator.versions import NEWEST, off, unknown, version_of

_PACKAGES = ("tensorflow", "keras", "grpcio", "protobuf", "numpy", "psutil")
_EPHEMERAL_PORTS = pathlib.Path("/proc/sys/net/ipv4/ip_local_port_range")
_PRINT_MISSING_NAMES = (
    "from coordinator.ps_strategy.strategy_parts import missing_private_names\n"
    "print(*missing_private_names(), sep='\\n', end='')"
)
# How long TensorFlow may take to load, in seconds.
_LOADING_TIMEOUT = 120.0
_ROUND_TRIPS = 9
_MOST_AT_ONCE = 32
# How long a server may take to answer before it is profiled, in seconds.
_PROBE_TIMEOUT = 5.0
# The longest profile, in seconds. Longer profiles take gigabytes.
_MOST_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class Finding:
    """The result of examining a subject, and whether it is a problem that must be corrected."""

    subject: str
    text: str
    is_problem: bool = False


def add_doctor(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "examine this installation, this machine, and whether each task of TF_CONFIG's cluster answers"
    examining = commands.add_parser("doctor", help=text, description=text, allow_abbrev=False)
    text = "how long a task may take to answer (default 5)"
    examining.add_argument("--timeout", type=float, default=5.0, metavar="SECONDS", help=text)


def doctor(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code, 1 if there is a problem."""
    check_number("timeout", options.timeout, above=0, unit="seconds")
    text = os.environ.get("TF_CONFIG", "")
    config = TaskConfig.of_client(text) if text.strip() else None
    _print(Finding("coordinator", __version__))
    problems = 0
    for finding in _examine(config, options.timeout):
        problems += finding.is_problem
        _print(finding)
    print(f"{problems} problem{'' if problems == 1 else 's'} found." if problems else "No problem found.")
    return 1 if problems else 0


def _print(finding: Finding) -> None:
    print(f"{'!!' if finding.is_problem else '  '} {finding.subject:<11}  {finding.text}", flush=True)


def _examine(config: TaskConfig | None, timeout: float) -> Iterator[Finding]:
    yield from _surroundings()
    if config is None:
        yield Finding("cluster", "TF_CONFIG is not set, so there is no cluster to examine")
        return
    yield from _ports(config)
    tasks = [(job, index, address) for job in SERVED_JOBS for index, address in config.cluster.get(job, {}).items()]
    with concurrent.futures.ThreadPoolExecutor(_MOST_AT_ONCE, "coordinator-doctor") as threads:
        yield from threads.map(lambda task: _task(*task, timeout=timeout), tasks)


def _surroundings() -> Iterator[Finding]:
    system = f"{platform.system()} {platform.release()} {platform.machine()}"
    yield Finding("python", f"{platform.python_version()} on {system}")
    installed = {name: version for name in _PACKAGES if (version := version_of(name)) is not None}
    for package in _PACKAGES:
        yield Finding(package, installed.get(package, "is not installed"), is_problem=package not in installed)
    versions = {name: version for name, version in installed.items() if name in NEWEST}
    untested = unknown(versions)
    for remark in untested + off(versions):
        yield Finding("versions", remark)
    if untested:
        yield from _missing_names()
    memory = psutil.virtual_memory()
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gib = f"{memory.available / 2**30:.1f} GiB of {memory.total / 2**30:.1f} GiB memory available"
    yield Finding("machine", f"{socket.gethostname()}: {cpus} CPUs, {gib}, {len(visible_gpus(os.environ))} GPUs")
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            listen_only_at("127.0.0.1", server.getsockname()[1])
        yield Finding("loopback", "servers on localhost can be closed to other machines")
    except (OSError, LaunchError) as error:
        yield Finding("loopback", f"servers are open to other machines, see docs/security.md: {error}", is_problem=True)


def _missing_names() -> Iterator[Finding]:
    """Examines, in a process of its own that loads TensorFlow, what the library finds in a version without tests."""
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "TF_CPP_MIN_LOG_LEVEL": "3"}
    command = [sys.executable, "-c", _PRINT_MISSING_NAMES]
    try:
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=_LOADING_TIMEOUT, check=False
        )
    except subprocess.TimeoutExpired:
        yield Finding("versions", f"TensorFlow did not load within {_LOADING_TIMEOUT:g} s", is_problem=True)
        return
    if ended.returncode != 0:
        reason = (ended.stderr.strip().splitlines() or [f"exit code {ended.returncode}"])[-1]
        yield Finding("versions", f"coordinator cannot be loaded with it: {reason}", is_problem=True)
    for lack in ended.stdout.splitlines():
        yield Finding("versions", lack, is_problem=True)


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
    # On these ports, a client that retries a dead server of its own machine may connect to itself, and block the port.
    try:
        first, last = map(int, _EPHEMERAL_PORTS.read_text().split())
    except (OSError, ValueError):
        return
    ports = range(first, last + 1)
    if shared := [address for address in _served_addresses(config) if parse_address(address).port in ports]:
        text = f"the kernel gives ports from {ports.start} to {ports.stop - 1} to connections, too"
        yield Finding("ports", f"{', '.join(shared)}: {text}; a server may find its port taken: choose lower ones")


def _served_addresses(config: TaskConfig) -> list[str]:
    return [address for job in SERVED_JOBS for address in config.cluster.get(job, {}).values()]


def _task(job: str, index: int, address: str, *, timeout: float) -> Finding:
    subject = f"{job} {index}"
    with TaskProbe(address) as probe:

        def ask() -> tuple[TaskStatus | None, float]:
            started = time.perf_counter()
            return probe.status(timeout), time.perf_counter() - started

        status, connected = ask()
        if status is None:
            [obstacle] = find_obstacles([address]).values()
            return Finding(subject, f"{address} does not answer: {obstacle.value}", is_problem=True)
        prefix = f"/job:{job}/replica:0/task:{index}/"
        if not any(device.startswith(prefix) for device in status.devices):
            devices = ", ".join(status.devices)
            return Finding(subject, f"{address} is another task, with the devices {devices}", is_problem=True)
        times = [ask()[1] for _ in range(_ROUND_TRIPS)]
    endpoints = socket.getaddrinfo(*parse_address(address), type=socket.SOCK_STREAM)
    hosts = ", ".join(sorted({str(endpoint[4][0]) for endpoint in endpoints}))
    devices = ", ".join(device.rpartition("device:")[2] for device in status.devices)
    seconds = statistics.median(times), max(times), connected
    typical, longest, first = (f"{1000 * each:.1f} ms" for each in seconds)
    return Finding(subject, f"{address} ({hosts}) answers in {typical}, at most {longest}; at first {first}; {devices}")


def add_profile(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "collect TensorFlow's profiles of all servers while they train, as one run for TensorBoard"
    profiling = commands.add_parser("profile", help=text, description=text, allow_abbrev=False)
    text = "servers (default: the workers and parameter servers of TF_CONFIG)"
    profiling.add_argument("addresses", nargs="*", type=_address, metavar="HOST:PORT", help=text)
    profiling.add_argument(
        "--pid", type=int, metavar="N", help="instead: those of the TF_CONFIG of this process, such as the program's"
    )
    text = "a folder for TensorBoard; the profiles are added to those that are there"
    profiling.add_argument("--logdir", type=_folder, required=True, metavar="FOLDER", help=text)
    profiling.add_argument("--seconds", type=float, default=2.0, metavar="S", help="how long to profile (default 2)")


def profile(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code, 1 if not every server was profiled."""
    check_number("seconds", options.seconds, above=0, maximum=_MOST_SECONDS)
    addresses = _addresses(options.addresses, options.pid)
    silent = _silent(addresses)
    for address, reason in silent.items():
        print(f"{address} is left out, since it does not answer: {reason}", flush=True)
    answering = [address for address in addresses if address not in silent]
    if not answering:
        raise LaunchError("No server answers. Is the training still running?")
    files = _collect(answering, options.logdir, options.seconds)
    count = f"{len(files)} of {len(addresses)} servers"
    print(f"{count} were profiled for {options.seconds:g} s: {os.path.dirname(files[0])}")
    print(f"To see them: tensorboard --logdir {options.logdir}")
    return 0 if len(files) == len(addresses) else 1


def _folder(text: str) -> str:
    try:
        return path_text(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _address(text: str) -> str:
    try:
        parse_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return text


def _addresses(addresses: Sequence[str], pid: int | None) -> list[str]:
    if addresses and pid is not None:
        raise LaunchError("--pid cannot be given beside addresses.")
    if addresses:
        return [*addresses]
    text = os.environ.get("TF_CONFIG", "") if pid is None else _variable_of(pid, "TF_CONFIG")
    if not text.strip():
        where = "TF_CONFIG is not set" if pid is None else f"the process {pid} has no TF_CONFIG"
        raise ClusterSpecError(f"There is no cluster to profile: {where}. Give the addresses of servers, or --pid.")
    return _served_addresses(TaskConfig.of_client(text))


def _variable_of(pid: int, name: str) -> str:
    if pid < 1:
        raise LaunchError(f"--pid must be the number of a process, got {pid}.")
    try:
        return str(psutil.Process(pid).environ().get(name, ""))
    except (psutil.Error, OverflowError) as error:
        raise LaunchError(f"The environment of the process {pid} cannot be read: {error}") from None


def _silent(addresses: Sequence[str]) -> dict[str, str]:
    """Probes all servers at the same time; returns the addresses that do not answer, each with the reason."""
    with contextlib.ExitStack() as opened:
        probes = {address: opened.enter_context(TaskProbe(address)) for address in addresses}
        results = {address: probe.begin_status(_PROBE_TIMEOUT) for address, probe in probes.items()}
        silent = [address for address, result in results.items() if result() is None]
    return {address: obstacle.value for address, obstacle in find_obstacles(silent).items()}


def _collect(addresses: Sequence[str], logdir: str, seconds: float) -> list[str]:
    """Profiles the servers at the same time; returns the files, one for each server that answered."""
    # TensorFlow would log each call, and this function reports the outcome.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    def profiles() -> set[str]:
        folders = tf.io.gfile.walk(os.path.join(logdir, "plugins", "profile"))
        files = (os.path.join(folder, name) for folder, _, names in folders for name in names)
        return {file for file in files if file.endswith(".xplane.pb")}

    before = profiles()
    try:
        services = ",".join(f"grpc://{address}" for address in addresses)
        tf.profiler.experimental.client.trace(services, logdir, round(1000 * seconds), num_tracing_attempts=1)
    except (RuntimeError, tf.errors.OpError) as error:
        raise LaunchError(f"The servers could not be profiled: {str(error).partition(chr(10))[0]}") from None
    if not (new := sorted(profiles() - before)):
        raise LaunchError(f"The servers have answered, but there is no profile in {logdir}.")
    return new
