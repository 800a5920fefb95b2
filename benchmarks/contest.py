"""Some contestants on clusters of one kind, and the works that they run in turns."""

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
from coordinator.launch.free_addresses import free_addresses
from coordinator.testing import LocalCluster

# The rounds of each contestant, by row and column of the table.
Found = dict[str, dict[str, Rounds]]


def plain(found: Found) -> dict[str, Any]:
    """All rounds, in the types of JSON."""
    return {
        row: {name: dataclasses.asdict(rounds) for name, rounds in columns.items()} for row, columns in found.items()
    }


@dataclasses.dataclass(frozen=True)
class Contest:
    """What is compared.

    Attributes:
      course: what contestants run; see `benchmarks.contestants.program`.
      rows: for each row of the table, and each of its columns, the side that runs and the work that it runs.
      workers, ps: the size of each contestant's cluster.
    """

    course: str
    rows: Mapping[str, Mapping[str, tuple[str, str]]]
    workers: int
    ps: int

    @property
    def sides(self) -> Sequence[str]:
        """Those that have a process in it, each once."""
        return tuple(dict.fromkeys(side for columns in self.rows.values() for side, _ in columns.values()))

    def measure(self, repeats: int, seconds: float, warm_up: float = 0.0) -> Found:
        """Has all of them run, on clusters of their own, of which one is at work at a time.

        Args:
          repeats: rounds of each, besides those that are not counted.
          seconds: how long a round is to take, about.
          warm_up: for how long rounds are not counted, of each column of each row, in seconds.

        Raises:
          LaunchError: a server did not start.
          RuntimeError: a contestant did not connect.
        """
        rounds = sum(map(len, self.rows.values())) * (repeats + 1)
        with self._processes() as processes, tqdm(total=rounds, file=sys.stderr, unit="round") as progress:
            found = {}
            for row, columns in self.rows.items():

                def tell(column: str, row: str = row) -> None:
                    progress.set_description(f"{row}, {column}")
                    progress.update()

                runners = {
                    column: functools.partial(processes[side].run, work, seconds)
                    for column, (side, work) in columns.items()
                }
                found[row] = alternated(runners, repeats, tell, warm_up)
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
                process = ContestantProcess(self.course, side, spec, folder / f"{side}.log")
                processes[side] = ending.enter_context(process)
            for process in processes.values():
                process.wait_connected()
            yield processes
