"""`coordinator doctor`: examines this installation, this machine, and the cluster of `TF_CONFIG`."""

import argparse
import os
from collections.abc import Sequence

import psutil

from coordinator.addresses import parse_address
from coordinator.errors import ClusterSpecError, LaunchError
from coordinator.heartbeat.probes import TaskProbe, find_obstacles
from coordinator.launch.doctor import Finding, examine
from coordinator.launch.serve import SERVED_JOBS
from coordinator.launch.task_config import TaskConfig
from coordinator.options import check_number
from coordinator.paths import path_text
from coordinator.version import __version__


def add_doctor(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to a parser's commands."""
    text = "examine this installation, this machine, and whether each task of TF_CONFIG's cluster answers"
    examining = commands.add_parser("doctor", help=text, description=text, allow_abbrev=False)
    text = "how long a task may take to answer (default 5)"
    examining.add_argument("--timeout", type=float, default=5.0, metavar="SECONDS", help=text)


def doctor(given: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
      The exit code: 1 if there is a problem.

    Raises:
      ClusterSpecError: `TF_CONFIG` is wrong.
      SettingError: the timeout is not above 0.
    """
    check_number("timeout", given.timeout, above=0, unit="seconds")
    text = os.environ.get("TF_CONFIG", "")
    config = TaskConfig.of_client(text) if text.strip() else None
    _print(Finding("coordinator", __version__))
    problems = 0
    for finding in examine(os.environ, config, given.timeout):
        problems += finding.is_problem
        _print(finding)
    print(f"{problems} problem{'' if problems == 1 else 's'} found." if problems else "No problem found.")
    return 1 if problems else 0


def _print(finding: Finding) -> None:
    print(f"{'!!' if finding.is_problem else '  '} {finding.subject:<11}  {finding.text}", flush=True)


# How long a server may take to answer, in seconds.
_PROBE_TIMEOUT = 5.0
# Longer profiles take gigabytes.
_MOST_SECONDS = 60.0


def add_profile(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to a parser's commands."""
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


def profile(given: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
      The exit code: 1 if not every server was profiled.

    Raises:
      ClusterSpecError: an address or `TF_CONFIG` is wrong, or there is none.
      LaunchError: there is no such process, or no profile came.
      SettingError: the time is out of bounds.
    """
    check_number("seconds", given.seconds, above=0, maximum=_MOST_SECONDS)
    addresses = _addresses(given.addresses, given.pid)
    silent = _silent(addresses)
    for address, reason in silent.items():
        print(f"{address} is left out, since it does not answer: {reason}", flush=True)
    answering = [address for address in addresses if address not in silent]
    if not answering:
        raise LaunchError("No server answers. Is the training still running?")
    found = _collect(answering, given.logdir, given.seconds)
    print(
        f"{len(found)} of {len(addresses)} servers were profiled for {given.seconds:g} s: {os.path.dirname(found[0])}"
    )
    print(f"To see them: tensorboard --logdir {given.logdir}")
    return 0 if len(found) == len(addresses) else 1


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


def _addresses(given: Sequence[str], pid: int | None) -> list[str]:
    if given and pid is not None:
        raise LaunchError("--pid cannot be given beside addresses.")
    if given:
        return [*given]
    text = os.environ.get("TF_CONFIG", "") if pid is None else _variable_of(pid, "TF_CONFIG")
    if not text.strip():
        where = "TF_CONFIG is not set" if pid is None else f"the process {pid} has no TF_CONFIG"
        raise ClusterSpecError(f"There is no cluster to profile: {where}. Give the addresses of servers, or --pid.")
    cluster = TaskConfig.of_client(text).cluster
    return [address for job in SERVED_JOBS for address in cluster.get(job, {}).values()]


def _variable_of(pid: int, name: str) -> str:
    if pid < 1:
        raise LaunchError(f"--pid must be the number of a process, got {pid}.")
    try:
        return str(psutil.Process(pid).environ().get(name, ""))
    except (psutil.Error, OverflowError) as error:
        raise LaunchError(f"The environment of the process {pid} cannot be read: {error}") from None


def _silent(addresses: Sequence[str]) -> dict[str, str]:
    """Returns why some of the servers do not answer, by address."""
    silent = []
    for address in addresses:
        with TaskProbe(address) as probe:
            if probe.status(_PROBE_TIMEOUT) is None:
                silent.append(address)
    return {address: obstacle.value for address, obstacle in find_obstacles(silent).items()}


def _collect(addresses: Sequence[str], logdir: str, seconds: float) -> list[str]:
    """Profiles the servers at once; returns the files, one for each server that has answered."""
    # The outcome is reported below; TensorFlow would log each call.
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
    import tensorflow as tf

    def profiles() -> set[str]:
        folders = tf.io.gfile.walk(os.path.join(logdir, "plugins", "profile"))
        return {
            os.path.join(folder, name) for folder, _, names in folders for name in names if name.endswith(".xplane.pb")
        }

    before = profiles()
    try:
        services = ",".join(f"grpc://{address}" for address in addresses)
        tf.profiler.experimental.client.trace(services, logdir, round(1000 * seconds), num_tracing_attempts=1)
    except (RuntimeError, tf.errors.OpError) as error:
        raise LaunchError(f"The servers could not be profiled: {str(error).partition(chr(10))[0]}") from None
    found = sorted(profiles() - before)
    if not found:
        raise LaunchError(f"The servers have answered, but there is no profile in {logdir}.")
    return found
