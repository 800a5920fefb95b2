"""Faults at random, by a seed: servers of a local cluster are killed, restarted and frozen while something trains.

    with LocalCluster(workers=3, ps=2) as cluster, Chaos(cluster, seed=7, jobs=("worker", "ps")) as chaos:
        ...train...
    print(chaos.faults)     # each fault that was injected, and when it began and ended

Promises: the same arguments give the same faults in the same order; at least one worker is always left alone; when it
is stopped, every server that it touched runs again.
"""

import dataclasses
import random
import threading
import time
from collections.abc import Iterator, Sequence

from coordinator.testing.local_cluster import LocalCluster

KINDS = ("kill", "restart", "freeze")


@dataclasses.dataclass(frozen=True)
class Fault:
    """One thing that goes wrong.

    Attributes:
      kind: `kill` (the process ends, and is started again later), `restart` (at once) or `freeze` (until it thaws).
      job: of the server, `worker` or `ps`.
      index: its index.
      begins: seconds after the start of the chaos; as planned, or as it was once it is among `Chaos.faults`.
      ends: likewise; the server answers again.
    """

    kind: str
    job: str
    index: int
    begins: float
    ends: float


def plan(
    seed: int, servers: Sequence[tuple[str, int]], kinds: Sequence[str], interval: float, duration: tuple[float, float]
) -> Iterator[Fault]:
    """Yields faults without an end, in the order in which they begin; a server suffers one at a time.

    Args:
      seed: decides them all.
      servers: whom they may befall, by job and index. One worker at least is always left alone.
      kinds: of `KINDS`.
      interval: mean of the exponentially distributed time from one to the next, in seconds.
      duration: shortest and longest time that a server is away, in seconds.
    """
    chance = random.Random(seed)
    ends_of: dict[tuple[str, int], float] = {}
    workers = sum(job == "worker" for job, _ in servers)
    now = 0.0
    while True:
        now += chance.expovariate(1 / interval)
        (job, index), kind = chance.choice(servers), chance.choice(kinds)
        length = chance.uniform(*duration)
        away = {server for server, end in ends_of.items() if end > now}
        is_last = job == "worker" and sum(server[0] == "worker" for server in away) >= workers - 1
        if (job, index) in away or is_last:
            continue
        fault = Fault(kind, job, index, now, now if kind == "restart" else now + length)
        ends_of[job, index] = fault.ends
        yield fault


class Chaos:
    """Injects faults into a cluster, on a thread of its own.

    Args:
      cluster: a started `LocalCluster`.
      seed: decides the faults.
      jobs: whose servers they befall: `("worker",)`, or with `"ps"` too.
      kinds: of `kill`, `restart` and `freeze`.
      interval: mean time between two faults, in seconds.
      duration: shortest and longest time that a server is away, in seconds.

    Raises:
      ValueError: there is nobody whom a fault may befall, or a kind is unknown.
    """

    def __init__(
        self,
        cluster: LocalCluster,
        *,
        seed: int,
        jobs: Sequence[str] = ("worker",),
        kinds: Sequence[str] = KINDS,
        interval: float = 5.0,
        duration: tuple[float, float] = (1.0, 10.0),
    ) -> None:
        servers = sorted(server for server in cluster.processes if server[0] in jobs)
        if not servers or servers == [("worker", 0)]:
            raise ValueError(f"No server is left to be hurt among {jobs}: one worker is always spared.")
        unknown = set(kinds) - set(KINDS)
        if unknown or not kinds:
            raise ValueError(f"Chaos knows {', '.join(KINDS)}, got {kinds!r}.")
        self._cluster = cluster
        self._plan = plan(seed, servers, kinds, interval, duration)
        self._started_at = 0.0
        self._stop = threading.Event()
        self._faults: list[Fault] = []
        self._away: list[Fault] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="chaos", daemon=True)

    @property
    def faults(self) -> tuple[Fault, ...]:
        """What was injected so far and is over, with the times as they were."""
        return tuple(self._faults)

    @property
    def started_at(self) -> float:
        """When it began, on the `time.monotonic` clock: what the faults' times count from."""
        return self._started_at

    def start(self) -> None:
        """Begins."""
        self._started_at = time.monotonic()
        self._thread.start()

    def stop(self) -> None:
        """Ends, and brings back every server that is away. Returns when they answer.

        Raises:
          LaunchError: a server did not come back.
        """
        self._stop.set()
        self._thread.join()
        if self._error is not None:
            raise self._error

    def __enter__(self) -> "Chaos":
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _run(self) -> None:
        try:
            for fault in self._plan:
                if not self._wait_until(fault.begins):
                    break
                self._begin(dataclasses.replace(fault, begins=self._now()))
            while self._away:
                self._end(self._away[0])
        except BaseException as error:  # noqa: BLE001 - raised by stop
            self._error = error

    def _wait_until(self, at: float) -> bool:
        """Ends the faults that are over by then; False if the chaos was stopped meanwhile."""
        while True:
            due = min(self._away, key=lambda fault: fault.ends, default=None)
            until = at if due is None else min(at, due.ends)
            if self._stop.wait(max(0.0, until - self._now())):
                return False
            if due is None or due.ends > at:
                return True
            self._end(due)

    def _begin(self, fault: Fault) -> None:
        match fault.kind:
            case "kill":
                self._cluster.kill(fault.job, fault.index)
            case "freeze":
                self._cluster.freeze(fault.job, fault.index)
        self._away.append(fault)

    def _end(self, fault: Fault) -> None:
        self._away.remove(fault)
        if fault.kind == "freeze":
            self._cluster.thaw(fault.job, fault.index)
        else:
            self._cluster.restart(fault.job, fault.index)
        self._faults.append(dataclasses.replace(fault, ends=self._now()))

    def _now(self) -> float:
        return time.monotonic() - self._started_at
