"""`TF_CONFIG` as a value: the cluster, and the task of this process.

Guarantee: a `TaskConfig` is valid. Every address has a host and a port, and the task is in the cluster. For anything
else the constructor raises an error of one sentence that names the entry to change.
"""

import dataclasses
import json
import pathlib
import re
import socket
import types
from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.addresses import parse_address
from coordinator.errors import ClusterSpecError, LaunchError
from coordinator.heartbeat.listening import loopback_of
from coordinator.options import is_integer

VISIBLE = "CUDA_VISIBLE_DEVICES"
_DEVICES = pathlib.Path("/dev")
# TensorFlow's messages have 32 bits for an index.
_LARGEST_INDEX = 2**31 - 1
_MOST_DIGITS = 10


def divide_gpus(gpus: Sequence[str], workers: int, gpus_per_worker: int, where: str) -> tuple[list[str], str]:
    """Gives each worker its own GPUs of a machine, named as in `CUDA_VISIBLE_DEVICES`.

    Returns a `CUDA_VISIBLE_DEVICES` for each worker, and another for the remaining GPUs. Raises LaunchError if there
    are too few GPUs; `where` names the machine in the error, such as `this machine has`.
    """
    needed = workers * gpus_per_worker
    if needed > len(gpus):
        raise LaunchError(
            f"--gpus-per-worker {gpus_per_worker} needs {needed} GPUs for {workers} workers, and {where} {len(gpus)}; "
            f"{VISIBLE} limits them where it is set."
        )
    starts = [worker * gpus_per_worker for worker in range(workers)]
    return [",".join(gpus[start : start + gpus_per_worker]) for start in starts], ",".join(gpus[needed:])


def visible_gpus(environment: Mapping[str, str]) -> list[str]:
    """Returns the GPUs of this machine that an environment allows, named as in `CUDA_VISIBLE_DEVICES`."""
    visible = environment.get(VISIBLE)
    if visible is None:
        files = [path.name for path in _DEVICES.glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
        return [str(index) for index in range(len(files))]
    gpus = [gpu.strip() for gpu in visible.split(",")]
    # CUDA ignores the first invalid GPU, such as -1, and all GPUs after it.
    valid = next((index for index, gpu in enumerate(gpus) if not gpu or gpu.startswith("-")), len(gpus))
    return gpus[:valid]


@dataclasses.dataclass(frozen=True)
class TaskConfig:
    """The cluster and one task in it.

    Args:
      cluster: each job's addresses (`host:port`), as a list, or as a mapping from index to address if indices are
        missing. The attribute is always a mapping.
      job: the job of this task, such as `worker`.
      index: the index of this task in the job.
      devices: how many logical CPU devices a server has; `devices` of the task in `TF_CONFIG`.

    Raises:
      ClusterSpecError: the cluster has another form, the task is not in it, or the number of devices is wrong.
    """

    cluster: Mapping[str, Mapping[int, str]]
    job: str
    index: int
    devices: int

    def __init__(
        self, cluster: Mapping[str, Sequence[str] | Mapping[int, str]], job: str, index: int, devices: int = 1
    ):
        if not isinstance(cluster, Mapping) or not cluster:
            raise ClusterSpecError(f"'cluster' must name at least one job with its addresses, got {cluster!r}.")
        jobs = {name: _addresses(name, tasks) for name, tasks in cluster.items()}
        object.__setattr__(self, "cluster", types.MappingProxyType(jobs))
        object.__setattr__(self, "job", job)
        object.__setattr__(self, "index", index)
        object.__setattr__(self, "devices", devices)
        if not isinstance(job, str) or job not in jobs:
            raise ClusterSpecError(f"There is no job {job!r} in the cluster: it has {', '.join(sorted(jobs))}.")
        if not is_integer(index) or index not in jobs[job]:
            indices = ", ".join(map(str, jobs[job]))
            raise ClusterSpecError(f"There is no task {index!r} in job {job!r}: it has {indices}.")
        if not is_integer(devices, minimum=1):
            raise ClusterSpecError(f"The devices of a server must be an integer of at least 1, got {devices!r}.")

    @classmethod
    def of_server(
        cls,
        text: str,
        *,
        job: str | None = None,
        index: int | None = None,
        address: str | None = None,
        devices: int | None = None,
    ) -> "TaskConfig":
        """Returns a server's task, as the only task of its cluster: a server learns the other tasks from its client.

        Accepts a `TF_CONFIG` as schedulers write it: jobs without a task, jobs of any other name, and numbers as text.
        In an enlarged job, the index may be beyond the addresses. Such a task serves on its job's common port.

        Args:
          text: the text of `TF_CONFIG`; may be empty if the next three arguments are given.
          job: the job, `worker` or `ps`, instead of the task's `type`.
          index: the index in the job, instead of the task's `index`.
          address: `host:port` at which the client reaches the server, instead of the entry in `cluster`.
          devices: the number of logical CPU devices, instead of the task's `devices`; each of a worker's is a replica.

        Raises:
          ClusterSpecError: the text is not JSON, has another form, or lacks a needed value.
        """
        config = _parsed(text) if None in (job, index, address) else {}
        task = config.get("task") or {}
        if not isinstance(task, dict):
            raise ClusterSpecError(f"TF_CONFIG's 'task' must be an object with 'type' and 'index', got {task!r}.")
        job = task.get("type") if job is None else job
        number = task.get("index") if index is None else index
        if not isinstance(job, str) or not job or number is None:
            raise ClusterSpecError("TF_CONFIG's 'task' needs 'type' and 'index', if --job and --index are not given.")
        try:
            number = _index(job, number)
            address = _listed_address(config.get("cluster"), job, number) if address is None else address
            return cls({job: {number: address}}, job, number, task.get("devices", 1) if devices is None else devices)
        except ClusterSpecError as error:
            raise ClusterSpecError(f"TF_CONFIG: {error}" if address is None else str(error)) from None

    @classmethod
    def of_client(cls, text: str) -> "TaskConfig":
        """Returns the task and cluster from the text of `TF_CONFIG`, without empty jobs. Raises ClusterSpecError."""
        config = _parsed(text)
        task, cluster = config.get("task"), config.get("cluster")
        if not isinstance(task, dict) or not {"type", "index"} <= task.keys():
            raise ClusterSpecError(f"TF_CONFIG's 'task' must be an object with 'type' and 'index', got {task!r}.")
        # If `cluster` is not an object, the constructor refuses it.
        jobs: Any = {job: tasks for job, tasks in cluster.items() if tasks} if isinstance(cluster, dict) else cluster
        try:
            return cls(jobs, task["type"], task["index"])
        except ClusterSpecError as error:
            raise ClusterSpecError(f"TF_CONFIG: {error}") from None

    def to_json(self) -> str:
        cluster = {
            job: list(tasks.values()) if list(tasks) == list(range(len(tasks))) else dict(tasks)
            for job, tasks in self.cluster.items()
        }
        task = {"type": self.job, "index": self.index, **({"devices": self.devices} if self.devices > 1 else {})}
        return json.dumps({"cluster": cluster, "task": task})

    @property
    def name(self) -> str:
        """The name of the task, such as `/job:worker/task:0`."""
        return f"/job:{self.job}/task:{self.index}"

    @property
    def address(self) -> str:
        return self.cluster[self.job][self.index]

    @property
    def port(self) -> int:
        return parse_address(self.address).port


def _parsed(text: str) -> dict[str, Any]:
    try:
        config: Any = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ClusterSpecError(f"TF_CONFIG is not JSON: {error}.") from None
    if not isinstance(config, dict):
        raise ClusterSpecError(f"TF_CONFIG must be a JSON object with 'cluster' and 'task', got {text.strip()!r}.")
    return config


def _listed_address(cluster: object, job: str, index: int) -> str:
    """Returns the task's listed address, or this host's name with the port that all tasks of its job have."""
    tasks = cluster.get(job) if isinstance(cluster, Mapping) else None
    listed = _addresses(job, tasks) if tasks else {}
    if index in listed:
        return listed[index]
    addresses = [parse_address(address) for address in listed.values()]
    ports = {address.port for address in addresses}
    if len(ports) == 1 and not any(loopback_of(address.host) for address in addresses):
        return f"{socket.gethostname()}:{ports.pop()}"
    known = f"its tasks are {', '.join(map(str, listed))}" if listed else "it has no address"
    raise ClusterSpecError(f"There is no task {index} in job {job!r}: {known}. Give it one by --address HOST:PORT.")


def _addresses(job: object, tasks: object) -> Mapping[int, str]:
    if not isinstance(job, str) or not job:
        raise ClusterSpecError(f"The name of a job in 'cluster' must be a string, got {job!r}.")
    if isinstance(tasks, Mapping):
        numbered = [(_index(job, key), address) for key, address in tasks.items()]
    elif isinstance(tasks, Sequence) and not isinstance(tasks, str):
        numbered = list(enumerate(tasks))
    else:
        raise ClusterSpecError(f"Job {job!r} in 'cluster' must be a list of addresses, got {tasks!r}.")
    if not numbered:
        raise ClusterSpecError(f"Job {job!r} in 'cluster' has no address: add one, or leave the job out.")
    for index, address in numbered:
        try:
            parse_address(address)
        except ValueError:
            task = f"Task {index} of job {job!r}"
            message = f"{task} must be a 'host:port', with a port from 1 to 65535, got {address!r}."
            raise ClusterSpecError(message) from None
    return types.MappingProxyType(dict(numbered))


def _index(job: str, key: object) -> int:
    number = key
    # An index may be text, because the keys of a JSON object are text.
    if isinstance(key, str) and key.isdecimal() and len(key) <= _MOST_DIGITS:
        number = int(key)
    if is_integer(number, 0, _LARGEST_INDEX):
        return number
    bounds = f"below {_LARGEST_INDEX + 1}" if is_integer(number, 0) else "of at least 0"
    raise ClusterSpecError(f"An index of job {job!r} must be an integer {bounds}, got {key!r}.")
