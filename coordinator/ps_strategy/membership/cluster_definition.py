"""The cluster that a resolver describes, checked and converted to the form that TensorFlow's runtime takes.

Promises: a specification that cannot work is refused when the strategy is created, with a message that says what to
change. An `evaluator` job is left out, since the client never connects to it. But a cluster with an `evaluator` and no
`chief` belongs to the evaluator, which is its client.
"""

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from coordinator.addresses import local_path, parse_address
from coordinator.errors import ClusterSpecError

CLIENT_JOB = "chief"
_EVALUATOR_JOB = "evaluator"
_KNOWN_JOBS = (CLIENT_JOB, "worker", "ps", _EVALUATOR_JOB)

_TF_CONFIG = '{"cluster": {"worker": ["host:port"], "ps": ["host:port"]}, "task": {"type": "chief", "index": 0}}'

# The maximum number of workers of a cluster. The state variables of update rules have this length.
MAX_WORKERS = 1024


@dataclasses.dataclass(frozen=True, order=True)
class Task:
    """One server of the cluster."""

    job: str
    index: int

    def __str__(self) -> str:
        return f"/job:{self.job}/task:{self.index}"

    @property
    def device(self) -> str:
        """The full name, such as `/job:worker/replica:0/task:0`."""
        return f"/job:{self.job}/replica:0/task:{self.index}"


@dataclasses.dataclass(frozen=True)
class ClusterDefinition:
    """The servers of a cluster. The specification reserves `client_address`, `host:port`, for the client."""

    addresses: Mapping[Task, str]
    client_address: str | None
    protocol: str

    @classmethod
    def from_resolver(cls, resolver: Any) -> "ClusterDefinition":
        """Reads and checks the cluster of a resolver.

        Raises TypeError for another object, ClusterSpecError if the cluster cannot work or has another client.
        """
        if not isinstance(resolver, tf.distribute.cluster_resolver.ClusterResolver):
            raise TypeError(
                f"ParameterServerStrategy takes a tf.distribute.cluster_resolver.ClusterResolver, got {resolver!r}. "
                "With TF_CONFIG in the environment, pass TFConfigClusterResolver()."
            )
        try:
            spec, own_job, own_index = resolver.cluster_spec(), resolver.task_type, resolver.task_id
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ClusterSpecError(
                f"{type(resolver).__name__} could not describe the cluster: {error}. If it reads TF_CONFIG, that "
                f"must be JSON like {_TF_CONFIG}."
            ) from None
        jobs = {job: spec.task_indices(job) for job in spec.jobs} if spec else {}
        _check_jobs(jobs)
        belongs_to_evaluator = jobs.get(_EVALUATOR_JOB) and not jobs.get(CLIENT_JOB)
        client_job = _EVALUATOR_JOB if own_job == _EVALUATOR_JOB and belongs_to_evaluator else CLIENT_JOB
        _check_own_task(own_job, own_index, client_job)
        addresses: dict[Task, str] = {}
        for task in (Task(job, index) for job in ("ps", "worker") for index in jobs[job]):
            address = spec.task_address(task.job, task.index)
            check_address(task, address, addresses)
            addresses[task] = address
        clients = [spec.task_address(client_job, index) for index in jobs.get(client_job, ())]
        return cls(addresses, clients[0] if clients else None, resolver.rpc_layer or "grpc")

    def tasks(self, job: str) -> tuple[Task, ...]:
        return tuple(sorted(task for task in self.addresses if task.job == job))


def client_server_def(protocol: str, client_address: str) -> Any:
    """Returns the `tf.train.ServerDef` that makes this process the client of a cluster without servers.

    Workers that join later connect to the parameter servers and the client. Workers do not connect to each other, so
    that no worker depends on another worker, which may be lost. Parameter servers do not connect to each other either.
    """
    definition = server_def(protocol, client_address, {})
    # Filters can only be set when a process joins its first cluster, so they are set for all tasks that may ever join.
    # Each costs TensorFlow some microseconds. Parameter servers from index `MAX_WORKERS` on do see each other.
    for job, visible in (("worker", "/job:ps"), ("ps", "/job:worker")):
        filters = definition.cluster_device_filters.jobs.add(name=job)
        for index in range(MAX_WORKERS):
            filters.tasks[index].device_filters.extend([visible, f"/job:{CLIENT_JOB}"])
    return definition


def server_def(protocol: str, client_address: str, addresses: Mapping[Task, str]) -> Any:
    """Returns the `tf.train.ServerDef` by which the client is connected to exactly these tasks.

    The task indices of a job may have gaps: lost tasks are left out, since TensorFlow would wait for them.
    """
    definition = tf.train.ServerDef(job_name=CLIENT_JOB, task_index=0, protocol=protocol)
    for job in sorted({task.job for task in addresses}):
        job_def = definition.cluster.job.add(name=job)
        for task, address in addresses.items():
            if task.job == job:
                job_def.tasks[task.index] = address
    definition.cluster.job.add(name=CLIENT_JOB).tasks[0] = client_address
    return definition


def _check_jobs(jobs: Mapping[str, list[int]]) -> None:
    if not jobs:
        raise ClusterSpecError(
            "The cluster specification is empty. Set TF_CONFIG, start the program with `coordinator run`, or name the "
            "'worker' and 'ps' addresses in the resolver."
        )
    unknown = sorted(set(jobs) - set(_KNOWN_JOBS))
    if unknown:
        raise ClusterSpecError(
            f"The cluster specification names the job {unknown[0]!r}; only 'chief', 'worker', 'ps' and 'evaluator' are "
            "known. Rename or remove it."
        )
    for job, words in (("worker", "runs the steps"), ("ps", "holds the variables")):
        if not jobs.get(job):
            raise ClusterSpecError(
                f"The cluster specification has no task in the job {job!r}, which {words}. Add at least one address."
            )
    chiefs = jobs.get(CLIENT_JOB, [])
    if len(chiefs) > 1:
        raise ClusterSpecError(
            f"The cluster specification names {len(chiefs)} 'chief' tasks; there is one client. Keep one address."
        )


def _check_own_task(job: str | None, index: int | None, client_job: str) -> None:
    if job in (None, "", client_job):
        if index not in (None, 0):
            raise ClusterSpecError(f"This process is task {index} of the job {client_job!r}; the client is task 0.")
        return
    advice = {
        "worker": "Run `coordinator serve` there instead.",
        "ps": "Run `coordinator serve` there instead.",
        _EVALUATOR_JOB: "Use coordinator.SidecarEvaluator there without a strategy, or give the evaluator a cluster of "
        "its own, without a 'chief' (`coordinator run --evaluator-workers`).",
    }.get(job, "Set the task's type to 'chief'.")
    raise ClusterSpecError(
        f"The strategy is created by the client, the 'chief' task, but this task's type is {job!r}. {advice}"
    )


def check_address(task: Task, address: str, others: Mapping[Task, str]) -> None:
    """Raises ClusterSpecError if a task's index is too large, or its address is not `host:port` or another task's."""
    if task.job == "worker" and task.index >= MAX_WORKERS:
        raise ClusterSpecError(f"{task} is one too many: a cluster has at most {MAX_WORKERS} workers, from index 0 on.")
    try:
        parse_address(address)
    except ValueError:
        message = f"The address of {task} is {address!r}; it must be 'host:port', with a port from 1 to 65535."
        raise ClusterSpecError(message) from None
    for other, taken in others.items():
        if taken == address and other != task:
            raise ClusterSpecError(f"{other} and {task} have the same address {address}. Give each its own.")


class PolledClusterResolver(tf.distribute.cluster_resolver.ClusterResolver):
    """A cluster that a function or a file describes. The description is read periodically: workers come and go.

        resolver = coordinator.PolledClusterResolver("cluster.json", interval=5.0)
        strategy = coordinator.ParameterServerStrategy(resolver)

    The strategy adds workers that appear and removes workers that disappear. If a lost worker disappears and another
    worker appears, they count as one worker that has moved. Parameter servers hold the variables and cannot change. An
    invalid description raises an error, and changes nothing.

    Args:
      source: a function that returns a cluster, or the path of a JSON file with one, in the form of "cluster" in
        TF_CONFIG: `{"worker": ["host:port", ...], "ps": ["host:port", ...]}`.
      interval: the time from one reading to the next, in seconds.
      rpc_layer: the protocol of the servers.

    Raises:
      TypeError: `source` is neither a function nor a path.
      ValueError: `interval` is not positive, or the path is a URL.
    """

    def __init__(
        self,
        source: Callable[[], Mapping[str, Sequence[str]]] | str | os.PathLike[str],
        interval: float = 5.0,
        rpc_layer: str = "grpc",
    ) -> None:
        if not callable(source) and not isinstance(source, str | os.PathLike):
            raise TypeError(f"PolledClusterResolver takes a function or the path of a JSON file, got {source!r}.")
        if not interval > 0:
            raise ValueError(f"interval must be a positive number of seconds, got {interval!r}.")
        if not callable(source):
            source = functools.partial(_cluster_in, local_path(source, "The file of a cluster"))
        self._read = source
        self.rpc_layer = rpc_layer
        self._parameter_servers: list[str] | None = None
        self.task_type = "chief"
        self.task_id = 0
        self.interval = interval

    def cluster_spec(self) -> tf.train.ClusterSpec:
        """Reads the description, and returns the cluster."""
        cluster = self._read()
        if not isinstance(cluster, Mapping):
            raise ClusterSpecError(f"A cluster is a dict of addresses by job, got {cluster!r}.")
        return tf.train.ClusterSpec({job: list(addresses) for job, addresses in cluster.items()})

    def worker_addresses(self) -> Mapping[int, str] | list[str]:
        """Returns the present addresses of the workers; a mapping by index if each worker keeps its index.

        Raises:
          ClusterSpecError: the description names no worker, or other parameter servers than before.
        """
        spec = self.cluster_spec().as_dict()
        if not spec.get("worker"):
            raise ClusterSpecError("The description no longer has a 'worker'; at least one must stay.")
        if self._parameter_servers is None:
            self._parameter_servers = spec.get("ps")
        elif spec.get("ps") != self._parameter_servers:
            raise ClusterSpecError(
                f"The description has the parameter servers {spec.get('ps')} instead of {self._parameter_servers}, "
                "but they hold the variables and cannot change."
            )
        return list(spec["worker"])

    def close(self) -> None:
        """Ends a call of `worker_addresses` in subclasses in which it waits. `strategy.close()` calls this."""

    def master(self, task_type: str | None = None, task_id: int | None = None, rpc_layer: str | None = None) -> str:
        """Returns the empty name: the client is its own master."""
        return ""

    def num_accelerators(self, *_: Any, **__: Any) -> dict[str, int]:
        """Returns no accelerators: functions run on the CPUs of the workers."""
        return {}


def _cluster_in(path: str) -> Any:
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except (OSError, ValueError) as error:
        raise ClusterSpecError(f"The cluster cannot be read from {path}: {error}") from None


def resolver_of(resolver: Any) -> Any:
    """Returns the resolver, or a `PolledClusterResolver` for a function or a path."""
    is_source = callable(resolver) or isinstance(resolver, os.PathLike)
    return PolledClusterResolver(resolver) if is_source else resolver
