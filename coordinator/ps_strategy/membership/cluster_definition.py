"""What a cluster resolver says, checked, and in the form that TensorFlow's runtime takes.

Promises: a specification that cannot work is refused when the strategy is made, in words that say what to change; an
`evaluator` job is left out, since the client never talks to it.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import tensorflow as tf

from coordinator.errors import ClusterSpecError

CLIENT_JOB = "chief"
_KNOWN_JOBS = (CLIENT_JOB, "worker", "ps", "evaluator")

_TF_CONFIG = '{"cluster": {"worker": ["host:port"], "ps": ["host:port"]}, "task": {"type": "chief", "index": 0}}'

# Filters can be given only when a process joins its first cluster, so they are given for every task it may ever meet.
_FILTERED_TASKS = 4096


@dataclasses.dataclass(frozen=True, order=True)
class Task:
    """One server of the cluster."""

    job: str
    index: int

    def __str__(self) -> str:
        return f"/job:{self.job}/task:{self.index}"

    @property
    def device(self) -> str:
        """Its name as TensorFlow writes it in full."""
        return f"/job:{self.job}/replica:0/task:{self.index}"


@dataclasses.dataclass(frozen=True)
class ClusterDefinition:
    """The servers of a cluster.

    Attributes:
      addresses: `host:port` of each worker and parameter server.
      client_address: `host:port` that the specification reserves for the client, or None.
      protocol: of the servers, such as `grpc`.
    """

    addresses: Mapping[Task, str]
    client_address: str | None
    protocol: str

    @classmethod
    def from_resolver(cls, resolver: Any) -> "ClusterDefinition":
        """Reads and checks what a resolver says.

        Raises:
          TypeError: it is not a `tf.distribute.cluster_resolver.ClusterResolver`.
          ClusterSpecError: it describes a cluster that cannot work, or this process is not its client.
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
                f"{type(resolver).__name__} could not say what the cluster is: {error}. If it reads TF_CONFIG, that "
                f"must be JSON like {_TF_CONFIG}."
            ) from error
        jobs = _addresses_by_job(spec) if spec else {}
        _check_jobs(jobs)
        _check_own_task(own_job, own_index)
        addresses = {
            Task(job, index): spec.task_address(job, index)
            for job in ("ps", "worker")
            for index in spec.task_indices(job)
        }
        _check_addresses(addresses)
        chiefs = jobs.get(CLIENT_JOB)
        return cls(addresses, chiefs[0] if chiefs else None, resolver.rpc_layer or "grpc")

    def tasks(self, job: str) -> tuple[Task, ...]:
        """The tasks of a job, by index."""
        return tuple(sorted(task for task in self.addresses if task.job == job))


def client_server_def(protocol: str, client_address: str) -> Any:
    """The `tf.train.ServerDef` by which this process becomes the client of a cluster that has no servers yet.

    Workers that join later will see the parameter servers and the client, but not each other, and likewise parameter
    servers: what one of them does must not depend on another that may be away.
    """
    definition = server_def(protocol, client_address, {})
    for job, visible in (("worker", "/job:ps"), ("ps", "/job:worker")):
        filters = definition.cluster_device_filters.jobs.add(name=job)
        for index in range(_FILTERED_TASKS):
            filters.tasks[index].device_filters.extend([visible, f"/job:{CLIENT_JOB}"])
    return definition


def server_def(protocol: str, client_address: str, addresses: Mapping[Task, str]) -> Any:
    """The `tf.train.ServerDef` by which the client is connected to exactly these tasks.

    The task numbers of a job may have gaps: a task that is away is left out, since naming it would make everybody wait
    for it.
    """
    definition = tf.train.ServerDef(job_name=CLIENT_JOB, task_index=0, protocol=protocol)
    for job in sorted({task.job for task in addresses}):
        job_def = definition.cluster.job.add(name=job)
        for task, address in addresses.items():
            if task.job == job:
                job_def.tasks[task.index] = address
    definition.cluster.job.add(name=CLIENT_JOB).tasks[0] = client_address
    return definition


def _addresses_by_job(spec: Any) -> dict[str, list[str]]:
    return {job: [spec.task_address(job, index) for index in spec.task_indices(job)] for job in spec.jobs}


def _check_jobs(jobs: Mapping[str, list[str]]) -> None:
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


def _check_own_task(job: str | None, index: int | None) -> None:
    if job in (None, "", CLIENT_JOB):
        if index not in (None, 0):
            raise ClusterSpecError(f"This process is task {index} of the job 'chief'; the client is task 0.")
        return
    advice = {
        "worker": "Run `coordinator serve` there instead.",
        "ps": "Run `coordinator serve` there instead.",
        "evaluator": "Use coordinator.SidecarEvaluator there instead.",
    }.get(job, "Set the task's type to 'chief'.")
    raise ClusterSpecError(
        f"The strategy is made by the client, the 'chief' task, but this task's type is {job!r}. {advice}"
    )


def check_address(task: Task, address: str, others: Mapping[Task, str]) -> None:
    """Refuses an address for a task that is none, or that another of these tasks has.

    Raises:
      ClusterSpecError: it is refused.
    """
    host, colon, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    if not (host and colon and port.isdigit() and 0 < int(port) < 65536):
        raise ClusterSpecError(f"The address of {task} is {address!r}; it must be 'host:port'.")
    for other, taken in others.items():
        if taken == address and other != task:
            raise ClusterSpecError(f"{other} and {task} have the same address {address}. Give each its own.")


def _check_addresses(addresses: Mapping[Task, str]) -> None:
    seen: dict[Task, str] = {}
    for task, address in addresses.items():
        check_address(task, address, seen)
        seen[task] = address
