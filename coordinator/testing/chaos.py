"""Random faults with a seed: servers of a local cluster are killed, restarted and frozen during training.

    with LocalCluster(workers=3, ps=2) as cluster, Chaos(cluster, seed=7, jobs=("worker", "ps")) as chaos:
        ...train...
    print(chaos.faults)     # each injected fault, and when it began and ended

Guarantees: the same arguments give the same faults in the same order; at least one worker is always spared; every
server runs again after the end.
"""

import dataclasses
import random
import threading
import time
from collections.abc import Iterator, Sequence

from coordinator.background_thread import start_once
from coordinator.testing.local_cluster import LocalCluster

KINDS = ("kill", "restart", "freeze")


@dataclasses.dataclass(frozen=True)
class Fault:
    """A fault of one server.

    Attributes:
      kind: `kill` (the process ends, and is started again later), `restart` (it is started again immediately) or
        `freeze` (it is stopped until it thaws).
      job: the server's job, `worker` or `ps`.
      index: the server's index.
      begins: when the fault begins, in seconds after the start of the chaos. `Chaos.faults` has the actual times.
      ends: when the server answers again, in seconds after the start of the chaos.
    """

    kind: str
    job: str
    index: int
    begins: float
    ends: float


def plan(
    seed: int, servers: Sequence[tuple[str, int]], kinds: Sequence[str], interval: float, duration: tuple[float, float]
) -> Iterator[Fault]:
    """Yields faults without end, in the order in which they begin. A server has one fault at a time.

    `servers` may have faults, but at any time at least one worker has none. `interval` is the mean of the exponentially
    distributed time between two faults, `duration` the shortest and longest absence of a server; both in seconds.
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
    """Injects faults into a cluster, on its own thread.

    Args:
      cluster: a started `LocalCluster`.
      seed: the seed of the random numbers.
      jobs: the jobs whose servers may have faults, such as `("worker",)` or `("worker", "ps")`.
      kinds: some of `kill`, `restart` and `freeze`.
      interval: mean time between two faults, in seconds.
      duration: shortest and longest absence of a server, in seconds.

    Attributes:
      started_at: when the chaos started, on the clock of `time.monotonic`. The times of faults begin there.

    Raises:
      ValueError: no server may have a fault, or a kind is unknown.
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
        self.started_at = 0.0
        self._stop = threading.Event()
        self._faults: list[Fault] = []
        self._away: list[Fault] = []
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    @property
    def faults(self) -> tuple[Fault, ...]:
        """The faults that are over, with their actual times."""
        return tuple(self._faults)

    def start(self) -> None:
        """Starts to inject faults."""
        self.started_at = time.monotonic()
        self._thread = start_once("coordinator-chaos", self._run)

    def stop(self) -> None:
        """Stops injecting faults, and restarts or thaws every absent server. Returns when all servers answer.

        Raises:
          LaunchError: a server did not come back.
        """
        self._stop.set()
        if self._thread is not None:
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
        """Waits, and ends the faults that are due; returns False if the chaos was stopped."""
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
        return time.monotonic() - self.started_at
