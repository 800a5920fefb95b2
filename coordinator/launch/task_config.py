"""`TF_CONFIG` as a value: the cluster, and the task of this process.

It promises that a `TaskConfig` is valid: every address has a host and a port, and the task is in the cluster. The
constructor refuses anything else, in one sentence that names the entry to change.
"""

import dataclasses
import json
import types
from collections.abc import Mapping, Sequence
from typing import Any

from coordinator.addresses import parse_address
from coordinator.errors import ClusterSpecError
from coordinator.setting_checks import is_integer


@dataclasses.dataclass(frozen=True)
class TaskConfig:
    """The cluster and one task of it.

    Args:
      cluster: for each job its addresses (`host:port`), as a list, or as a mapping from index to address where
        indices are missing. The attribute is the mapping.
      job: the job of this task, such as `worker`.
      index: its index in the job.

    Raises:
      ClusterSpecError: the cluster is not of that form, or the task is not in it.
    """

    cluster: Mapping[str, Mapping[int, str]]
    job: str
    index: int

    def __init__(self, cluster: Mapping[str, Sequence[str] | Mapping[int, str]], job: str, index: int):
        if not isinstance(cluster, Mapping) or not cluster:
            raise ClusterSpecError(f"'cluster' must name at least one job with its addresses, got {cluster!r}.")
        jobs = {name: _addresses(name, tasks) for name, tasks in cluster.items()}
        object.__setattr__(self, "cluster", types.MappingProxyType(jobs))
        object.__setattr__(self, "job", job)
        object.__setattr__(self, "index", index)
        if not isinstance(job, str) or job not in jobs:
            raise ClusterSpecError(f"There is no job {job!r} in the cluster: it has {', '.join(sorted(jobs))}.")
        if not is_integer(index) or index not in jobs[job]:
            indices = ", ".join(map(str, jobs[job]))
            raise ClusterSpecError(f"There is no task {index!r} in job {job!r}: it has {indices}.")

    @classmethod
    def from_json(cls, text: str, *, job: str | None = None, index: int | None = None) -> "TaskConfig":
        """Reads the text of `TF_CONFIG`.

        Args:
          text: a JSON object with `cluster` and, unless both are given here, `task`.
          job: the job, in place of the task's `type`.
          index: the index, in place of the task's `index`.

        Raises:
          ClusterSpecError: the text is not JSON, not of the right form, or the task is not in the cluster.
        """
        try:
            config: Any = json.loads(text)
        except json.JSONDecodeError as error:
            raise ClusterSpecError(f"TF_CONFIG is not JSON: {error}.") from None
        if not isinstance(config, dict):
            raise ClusterSpecError(f"TF_CONFIG must be a JSON object with 'cluster' and 'task', got {text.strip()!r}.")
        task = config.get("task", {})
        if not isinstance(task, dict):
            raise ClusterSpecError(f"TF_CONFIG's 'task' must be an object with 'type' and 'index', got {task!r}.")
        job = task.get("type") if job is None else job
        index = task.get("index") if index is None else index
        if job is None or index is None:
            raise ClusterSpecError("TF_CONFIG's 'task' needs 'type' and 'index', where they are not given otherwise.")
        try:
            return cls(config.get("cluster", {}), job, index)
        except ClusterSpecError as error:
            raise ClusterSpecError(f"TF_CONFIG: {error}") from None

    def to_json(self) -> str:
        """Returns the text for `TF_CONFIG`."""
        cluster = {job: _as_json(tasks) for job, tasks in self.cluster.items()}
        return json.dumps({"cluster": cluster, "task": {"type": self.job, "index": self.index}})

    def without(self, job: str) -> "TaskConfig":
        """Returns the same task in a cluster that lacks one job; the task must not be of that job."""
        cluster = {name: tasks for name, tasks in self.cluster.items() if name != job}
        return TaskConfig(cluster, self.job, self.index)

    @property
    def name(self) -> str:
        """The name of the task, such as `/job:worker/task:0`."""
        return f"/job:{self.job}/task:{self.index}"

    @property
    def address(self) -> str:
        """The address of the task, as `host:port`."""
        return self.cluster[self.job][self.index]

    @property
    def port(self) -> int:
        """The port of the task."""
        return parse_address(self.address).port


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
            message = (
                f"Task {index} of job {job!r} must be a 'host:port', with a port from 1 to 65535, got {address!r}."
            )
            raise ClusterSpecError(message) from None
    return types.MappingProxyType(dict(numbered))


def _index(job: str, key: object) -> int:
    # JSON has no integers as keys: there, and only there, they are written as text.
    if is_integer(key, minimum=0):
        return key
    if isinstance(key, str) and key.isdecimal():
        return int(key)
    raise ClusterSpecError(f"An index of job {job!r} must be an integer of at least 0, got {key!r}.")


def _as_json(tasks: Mapping[int, str]) -> list[str] | dict[int, str]:
    if list(tasks) == list(range(len(tasks))):
        return list(tasks.values())
    return dict(tasks)
