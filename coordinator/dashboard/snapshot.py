"""The data that the dashboard shows, as values that become JSON objects with the names of the attributes.

The page, `/api/state`, `/metrics` and `coordinator top` show a `Snapshot`. Times are in seconds since the epoch,
durations in seconds.
"""

import dataclasses
from collections import deque
from collections.abc import Iterable, Sequence

from coordinator.dashboard.scale_advice import Resource, ScaleAdvice

# A task that uses this share of the busy processor time of its host is one resource with the host.
_MOST = 0.75


@dataclasses.dataclass(frozen=True)
class ServerUsage:
    """The kernel's counts of what a process has used since its start, and its machine since the machine's start.

    `received` and `sent` are bytes of the host, over all its network interfaces; processor times are in seconds.
    """

    # Job and index, such as `ps 0`, or `client`.
    task: str
    # When the usage was read; 0 if it has not been read.
    time: float = 0.0
    is_reachable: bool = True
    # Resident memory, in bytes.
    memory: int = 0
    cpu: float = 0.0
    received: int = 0
    sent: int = 0
    # The number of processors that the process may use at the same time.
    processors: float = 1.0
    machine: str = ""
    # The machine's name; then its processor time in all, and its number of processors.
    host: str = ""
    machine_cpu: float = 0.0
    machine_processors: int = 1


class UsageRecord:
    """Keeps the usages of each task in the last `window` seconds, and always the latest two usages."""

    def __init__(self, window: float = 0.0) -> None:
        self._window = window
        self._kept: dict[str, deque[ServerUsage]] = {}

    def add(self, usage: Iterable[ServerUsage]) -> bool:
        """Adds the present usage of tasks; returns whether at least one usage is new."""
        is_new = False
        for latest in usage:
            kept = self._kept.setdefault(latest.task, deque([latest]))
            if latest.time == kept[-1].time:
                # `is_reachable` may have changed.
                kept[-1] = latest
                continue
            if not is_comparable(latest, kept[-1]):
                kept.clear()
            kept.append(latest)
            while len(kept) > 2 and kept[0].time < latest.time - self._window:
                kept.popleft()
            is_new = True
        return is_new

    def pairs(self) -> Sequence[tuple[ServerUsage, ServerUsage]]:
        """Returns each task's latest usage and the usage before it; a task's only usage is returned twice."""
        return [(kept[-1], kept[-2] if len(kept) > 1 else kept[-1]) for kept in self._kept.values()]

    def period(self) -> tuple[float, float]:
        """Returns the times of the first and last kept usage of the task that was read last."""
        kept = max(self._kept.values(), key=lambda kept: kept[-1].time)
        return kept[0].time, kept[-1].time

    def resources(self) -> tuple[Resource, ...]:
        """Returns how busy tasks and hosts were between a task's first and last kept usage.

        Tasks with one kept usage are left out. The client is a Python program, which uses one processor at a time. If a
        task uses most of the busy processor time of its host, task and host are one resource with the task's name.
        """
        shares: dict[str, float] = {}
        hosts: dict[str, tuple[str, float]] = {}
        used_by_one: set[str] = set()
        for before, *_, latest in (kept for kept in self._kept.values() if len(kept) > 1):
            job, _, index = latest.task.partition(" ")
            name = f"parameter server {index}" if job == "ps" else f"the {latest.task}"
            seconds = latest.time - before.time
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
    """Returns whether the counts grew by what was used in between. A restarted process counts from 0 again."""
    is_later = latest.time > before.time > 0
    return is_later and latest.cpu >= before.cpu and latest.received >= before.received


@dataclasses.dataclass(frozen=True)
class WorkerRow:
    """A worker. The fields from `finished` on come from `coordinator.WorkerStatistics`."""

    index: int
    # `live`, `lost` or `stopped`.
    state: str
    # The running function, or ""; then the number of closures in its call, and the time when the call began, or 0.
    function: str
    calls: int
    running_since: float
    # Finished closures per second in the last 10 s; then this rate as a share of the fastest worker's rate.
    rate: float
    share: float
    # The share of the last minute without a running call.
    idle: float
    # The largest share of its time in which the worker waited for one update rule; None without a rule.
    waited: float | None
    finished: int
    failed: int
    retried: int
    losses: int
    reconnections: int
    reconnecting_seconds: float


@dataclasses.dataclass(frozen=True)
class ServerRow:
    """A parameter server: its usage so far, and its rates between the latest two readings."""

    usage: ServerUsage
    # The number of processors that the parameter server keeps busy.
    cores: float
    # Bytes per second of its host.
    receiving: float
    sending: float


@dataclasses.dataclass(frozen=True)
class RuleRow:
    """The counters of an update rule; see `coordinator.updates.RuleStatistics`."""

    # Distinguishes rules of the same class.
    number: int
    name: str
    updates: int
    pushes: int
    rejected: int
    bytes_pulled: int
    bytes_pushed: int
    mean: float
    p99: int
    # The number of gradients of each staleness; the last entry also counts all larger ones.
    histogram: tuple[int, ...]
    # Task index -> the share of the worker's time in which it waited for the rule.
    waited: dict[int, float]


@dataclasses.dataclass(frozen=True)
class TimelineEntry:
    """An event that is shown in the timeline."""

    number: int
    time: float
    kind: str
    # `good`, `info`, `warning` or `error`.
    level: str
    # The server, such as `worker 0`, or "".
    task: str
    text: str


@dataclasses.dataclass(frozen=True)
class Segment:
    """A period in which a worker ran calls of one function with only short breaks."""

    worker: int
    # The start of the first call; then the end of the last call, or the time of the snapshot while that call runs.
    start: float
    end: float
    function: str
    # `finished`, `failed`, `cancelled`, `retried`, `lost`, or `running` while the last call runs.
    outcome: str
    closures: int


@dataclasses.dataclass(frozen=True)
class RateHistory:
    """The rate and the reported values over time, as columns of equal length."""

    # The end of each of the equal periods; then the closures finished per second in each period.
    times: tuple[float, ...] = ()
    rates: tuple[float, ...] = ()
    # Reported name -> its mean in each period; None where it was not reported.
    values: dict[str, tuple[float | None, ...]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """All data that the dashboard shows. `coordinator.ClusterStatistics` has the same counts of closures."""

    time: float
    started: float
    program: str
    # Finished closures per second of all workers, in the last 10 s.
    rate: float = 0.0
    waiting: int = 0
    running: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    retried: int = 0
    # When the latest checkpoint was complete, or 0; then its path.
    checkpoint_time: float = 0.0
    checkpoint: str = ""
    # The latest value of each reported name, such as the loss.
    values: dict[str, float] = dataclasses.field(default_factory=dict)
    # Steps that were undone when a checkpoint was restored after the loss of a parameter server.
    steps_lost: int = 0
    event_counts: dict[str, int] = dataclasses.field(default_factory=dict)
    workers: tuple[WorkerRow, ...] = ()
    servers: tuple[ServerRow, ...] = ()
    rules: tuple[RuleRow, ...] = ()
    # The history since the strategy was created.
    history: RateHistory = RateHistory()
    # The oldest entry is first.
    timeline: tuple[TimelineEntry, ...] = ()
    # The segments of the last minute.
    stream: tuple[Segment, ...] = ()
    # The recommended number of workers; None before enough was measured.
    advice: ScaleAdvice | None = None
