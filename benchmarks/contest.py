"""Contestants on clusters of one kind, which run the same functions in turns."""

import contextlib
import dataclasses
import functools
import os
import pathlib
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import psutil
from tqdm import tqdm

from benchmarks.alternated import alternated
from benchmarks.contestants.contestant_process import ContestantProcess
from benchmarks.rounds import Rounds
from coordinator.launch.server_process import free_addresses
from coordinator.testing import LocalCluster

# Sides without this library have servers as TensorFlow starts them: with any such variable, memory is not kept.
_OTHERS = frozenset({"peer", "peer sharded", "bare", "hand"})
_STANDARD_SERVERS = {"MALLOC_PERTURB_": "0"}
# The devices of each worker; one where nothing is said.
_DEVICES = {"devices": 2}

# The rounds of each contestant, by row and column of the table.
Found = dict[str, dict[str, Rounds]]


def plain(found: Found) -> dict[str, Any]:
    """Returns all rounds, in JSON types."""
    return {
        row: {name: dataclasses.asdict(rounds) for name, rounds in columns.items()} for row, columns in found.items()
    }


@contextlib.contextmanager
def cluster_of(side: str, workers: int, ps: int) -> Iterator[LocalCluster]:
    """A scope with the servers of a side."""
    with contextlib.ExitStack() as ending:
        with mock.patch.dict(os.environ, _STANDARD_SERVERS if side in _OTHERS else {}):
            cluster = ending.enter_context(LocalCluster(workers, ps, devices_per_worker=_DEVICES.get(side, 1)))
        yield cluster


def spec_with_client(cluster: LocalCluster) -> dict[str, list[str]]:
    """Returns the addresses of each job of a cluster, and a free one for its client, which is the chief."""
    spec = cluster.spec
    return {**spec, "chief": free_addresses(1, besides=[address for job in spec.values() for address in job])}


@contextlib.contextmanager
def fresh_contestant(
    workload: str, side: str, workers: int, ps: int
) -> Iterator[tuple[LocalCluster, ContestantProcess]]:
    """A scope with a side's servers and its client, which has connected to them.

    Raises:
      LaunchError: a server did not start.
      RuntimeError: the client did not connect.
    """
    with tempfile.TemporaryDirectory(prefix="contestant-") as folder, cluster_of(side, workers, ps) as cluster:
        log = pathlib.Path(folder) / "log"
        with ContestantProcess(workload, side, spec_with_client(cluster), log) as process:
            process.wait_connected()
            yield cluster, process


@dataclasses.dataclass(frozen=True)
class Contest:
    """A comparison.

    Attributes:
      workload: what the contestants run, one of `WORKLOADS` in `benchmarks.contestants.program`.
      rows: for each row of the table and each of its columns, the side and the function of the workload that it runs.
      workers, ps: the size of each contestant's cluster.
    """

    workload: str
    rows: Mapping[str, Mapping[str, tuple[str, str]]]
    workers: int
    ps: int

    @property
    def sides(self) -> Sequence[str]:
        """The sides in it, each once."""
        return tuple(dict.fromkeys(side for columns in self.rows.values() for side, _ in columns.values()))

    def measure(self, repeats: int, seconds: float, warm_up: float = 0.0) -> Found:
        """Runs all of them in turns, each on a separate cluster.

        Args:
          repeats: the number of counted rounds of each.
          seconds: the approximate duration of a round.
          warm_up: the duration of the uncounted rounds of each column of each row, in seconds.

        Raises:
          LaunchError: a server did not start.
          RuntimeError: a contestant did not connect.
        """
        rounds = sum(map(len, self.rows.values())) * (repeats + 1)
        with self._contestants() as contestants, tqdm(total=rounds, file=sys.stderr, unit="round") as progress:
            found = {}
            for row, columns in self.rows.items():

                def show(column: str, row: str = row) -> None:
                    progress.set_description(f"{row}, {column}")
                    progress.update()

                runners = {
                    column: functools.partial(contestants[side].run, work, seconds)
                    for column, (side, work) in columns.items()
                }
                found[row] = alternated(runners, repeats, show, warm_up)
            return found

    @contextlib.contextmanager
    def _contestants(self) -> Iterator[dict[str, "_Contestant"]]:
        with contextlib.ExitStack() as ending:
            folder = pathlib.Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="contest-")))
            contestants = {}
            for side in self.sides:
                spec: dict[str, list[str]] = {}
                servers: Collection[int | None] = ()
                if side != "single":
                    cluster = ending.enter_context(cluster_of(side, self.workers, self.ps))
                    spec, servers = spec_with_client(cluster), cluster.processes.values()
                process = ContestantProcess(self.workload, side, spec, folder / f"{side}.log")
                contestants[side] = _Contestant(ending.enter_context(process), servers)
            for contestant in contestants.values():
                contestant.process.wait_connected()
            yield contestants


class _Contestant:
    """A contestant, of which the processor time is measured too.

    Args:
      process: which runs the rounds.
      servers: the process ids of its servers.
    """

    def __init__(self, process: ContestantProcess, servers: Collection[int | None]) -> None:
        self.process = process
        self._all = [psutil.Process(pid) for pid in (process.process.pid, *servers)]

    def run(self, work: str, seconds: float) -> dict[str, Any]:
        """Runs a round, see `ContestantProcess.run`.

        Beside a `rate` it has `processor`: the seconds of processor time, of all processes, for one of what is counted.
        """
        try:
            before, began = self._processor_time(), time.perf_counter()
            answer = self.process.run(work, seconds)
            used, took = self._processor_time() - before, time.perf_counter() - began
        except psutil.NoSuchProcess:
            return {"error": "is gone"}
        if "rate" in answer.get("figures", ()):
            answer["figures"]["processor"] = used / took / answer["figures"]["rate"]
        return answer

    def _processor_time(self) -> float:
        """Returns the processor time of the client and its servers until now, in seconds."""
        return sum(sum(each.cpu_times()[:2]) for each in self._all)
