"""Contestants on clusters of one kind, which run the same functions in turns."""

import contextlib
import dataclasses
import functools
import pathlib
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tqdm import tqdm

from benchmarks.alternated import alternated
from benchmarks.contestants.contestant_process import ContestantProcess
from benchmarks.rounds import Rounds
from coordinator.launch.local_servers import free_addresses
from coordinator.testing import LocalCluster

# The rounds of each contestant, by row and column of the table.
Found = dict[str, dict[str, Rounds]]


def plain(found: Found) -> dict[str, Any]:
    """Returns all rounds, in JSON types."""
    return {
        row: {name: dataclasses.asdict(rounds) for name, rounds in columns.items()} for row, columns in found.items()
    }


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
        with self._processes() as processes, tqdm(total=rounds, file=sys.stderr, unit="round") as progress:
            found = {}
            for row, columns in self.rows.items():

                def show(column: str, row: str = row) -> None:
                    progress.set_description(f"{row}, {column}")
                    progress.update()

                runners = {
                    column: functools.partial(processes[side].run, work, seconds)
                    for column, (side, work) in columns.items()
                }
                found[row] = alternated(runners, repeats, show, warm_up)
            return found

    @contextlib.contextmanager
    def _processes(self) -> Iterator[dict[str, ContestantProcess]]:
        with contextlib.ExitStack() as ending:
            folder = pathlib.Path(ending.enter_context(tempfile.TemporaryDirectory(prefix="contest-")))
            processes = {}
            for side in self.sides:
                spec: dict[str, list[str]] = {}
                if side != "single":
                    spec = ending.enter_context(LocalCluster(self.workers, self.ps)).spec
                    spec["chief"] = free_addresses(1, besides=[address for job in spec.values() for address in job])
                process = ContestantProcess(self.workload, side, spec, folder / f"{side}.log")
                processes[side] = ending.enter_context(process)
            for process in processes.values():
                process.wait_connected()
            yield processes
