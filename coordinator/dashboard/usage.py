"""What servers have used, as their kernels count, and how busy that makes what all workers share."""

import dataclasses
from collections import deque
from collections.abc import Iterable, Sequence

from coordinator.dashboard.scale_advice import Resource

# A task that uses this share of its host's processor time is what keeps the host busy.
_MOST = 0.75


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
      host: the name of its machine.
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
    host: str = ""
    machine_cpu: float = 0.0
    machine_processors: int = 1


class UsageRecord:
    """What each task has used lately.

    Args:
      window: for how long usages are kept, in seconds; the latest two of a task always are.
    """

    def __init__(self, window: float = 0.0) -> None:
        self._window = window
        self._kept: dict[str, deque[ServerUsage]] = {}

    def add(self, usage: Iterable[ServerUsage]) -> bool:
        """Adds what tasks use now, and returns whether any of it is new."""
        is_new = False
        for each in usage:
            kept = self._kept.setdefault(each.task, deque([each]))
            if each.time == kept[-1].time:
                # Whether it answers may have changed.
                kept[-1] = each
                continue
            if not is_comparable(each, kept[-1]):
                kept.clear()
            kept.append(each)
            while len(kept) > 2 and kept[0].time < each.time - self._window:
                kept.popleft()
            is_new = True
        return is_new

    def pairs(self) -> Sequence[tuple[ServerUsage, ServerUsage]]:
        """Returns the latest usage of each task, and the one before."""
        return [(kept[-1], kept[-2] if len(kept) > 1 else kept[-1]) for kept in self._kept.values()]

    def period(self) -> tuple[float, float]:
        """Returns when the latest usages that are kept begin and end, in seconds since the epoch."""
        kept = max(self._kept.values(), key=lambda kept: kept[-1].time)
        return kept[0].time, kept[-1].time

    def resources(self) -> tuple[Resource, ...]:
        """Returns how busy each task and each host was, in the time of the usages that are kept; nothing of only one.

        The client is a Python program, which uses one processor at a time. If one task uses most of the processor time
        of its host, both are one resource, with the name of the task.
        """
        shares: dict[str, float] = {}
        hosts: dict[str, tuple[str, float]] = {}
        used_by_one: set[str] = set()
        for before, *_, latest in (kept for kept in self._kept.values() if len(kept) > 1):
            seconds, name = latest.time - before.time, _name(latest.task)
            cpu, cpu_of_host = latest.cpu - before.cpu, latest.machine_cpu - before.machine_cpu
            share = cpu_of_host / seconds / latest.machine_processors
            shares[name] = cpu / seconds / latest.processors
            hosts.setdefault(latest.machine, (f"the processors of host {latest.host}", share))
            if cpu >= _MOST * cpu_of_host:
                shares[name] = max(shares[name], share)
                used_by_one.add(latest.machine)
        shares |= dict(host for machine, host in hosts.items() if machine not in used_by_one)
        return tuple(Resource(name, min(1.0, max(0.0, share))) for name, share in shares.items())


def is_comparable(latest: ServerUsage, before: ServerUsage) -> bool:
    """Returns whether the differences are what was used in between: a process that was started again counts from 0."""
    is_later = latest.time > before.time > 0
    return is_later and latest.cpu >= before.cpu and latest.received >= before.received


def _name(task: str) -> str:
    job, _, index = task.partition(" ")
    return f"parameter server {index}" if job == "ps" else f"the {task}"
