"""What servers have used, as their kernels count, and how busy that makes what all workers share."""

import dataclasses
from collections.abc import Iterable, Sequence

from coordinator.dashboard.scale_advice import Resource


@dataclasses.dataclass(frozen=True)
class ServerUsage:
    """What a process has used since it was started, and its machine since it was, as its kernel counts.

    Attributes:
      task: its job and index, such as `ps 0`, or `client`.
      time: when this was read, in seconds since the epoch; 0 if it has not been read yet.
      is_reachable: whether it answers.
      memory: resident memory, in bytes.
      cpu: processor time, in seconds.
      received: bytes that its host has received over all its network interfaces.
      sent: bytes that its host has sent.
      processors: how many it may use at the same time.
      machine: tells machines apart.
      machine_cpu: processor time of all that runs on its machine, in seconds.
      machine_processors: how many its machine has.
    """

    task: str
    time: float = 0.0
    is_reachable: bool = True
    memory: int = 0
    cpu: float = 0.0
    received: int = 0
    sent: int = 0
    processors: float = 1.0
    machine: str = ""
    machine_cpu: float = 0.0
    machine_processors: int = 1


class UsageRecord:
    """The latest usage of each task, and the one before."""

    def __init__(self) -> None:
        self._pairs: dict[str, tuple[ServerUsage, ServerUsage]] = {}

    def add(self, usage: Iterable[ServerUsage]) -> bool:
        """Adds what tasks use now, and returns whether any of it is new."""
        is_new = False
        for each in usage:
            latest, before = self._pairs.get(each.task, (each, each))
            is_new |= each.time > latest.time
            self._pairs[each.task] = each, before if each.time == latest.time else latest
        return is_new

    def pairs(self) -> Sequence[tuple[ServerUsage, ServerUsage]]:
        """Returns the latest usage of each task, and the one before."""
        return tuple(self._pairs.values())

    def resources(self) -> tuple[Resource, ...]:
        """Returns how busy each task and each machine was between the latest two usages; nothing before there are two.

        The client is a Python program, which uses one processor at a time.
        """
        shares: dict[str, float] = {}
        machines: set[str] = set()
        for latest, before in self._pairs.values():
            if not is_comparable(latest, before):
                continue
            seconds, name = latest.time - before.time, _name(latest.task)
            shares[name] = (latest.cpu - before.cpu) / seconds / latest.processors
            if latest.machine not in machines:
                machines.add(latest.machine)
                busy = (latest.machine_cpu - before.machine_cpu) / seconds / latest.machine_processors
                shares[f"the machine of {name}"] = busy
        return tuple(Resource(name, min(1.0, max(0.0, share))) for name, share in shares.items())


def is_comparable(latest: ServerUsage, before: ServerUsage) -> bool:
    """Returns whether the differences are what was used in between: a process that was started again counts from 0."""
    is_later = latest.time > before.time > 0
    return is_later and latest.cpu >= before.cpu and latest.received >= before.received


def _name(task: str) -> str:
    job, _, index = task.partition(" ")
    return f"parameter server {index}" if job == "ps" else f"the {task}"
