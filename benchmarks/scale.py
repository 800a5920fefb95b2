"""The cost of the core alone: with many workers, and with a million closures in its queue. No TensorFlow, no servers.

    python -m benchmarks.scale [--repeats 5] [--quick] [--json FILE]

In the first table workers of the fake runtime run closures that take 1 ms and no processor time. Many workers request
more closures in a second than two cores can dispatch, so what counts is the processor time of a closure and the number
of thread wake-ups for it; a loop of as many threads without a queue is the baseline. The second table is about one
future for many runs of an empty function, the third about closures that wait in the queue.
"""

import dataclasses
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from tqdm import tqdm

from benchmarks.piped_process import ROOT
from benchmarks.speed_arguments import SpeedArguments, machine_line
from coordinator.simulation.result import aligned

WORKERS = (4, 64, 256, 1024)
CLOSURES, QUICK_CLOSURES = 3_000, 2_000
RUNS, QUICK_RUNS = 500_000, 20_000
QUEUED, QUICK_QUEUED = 1_000_000, 20_000
_US = 1e6


@dataclasses.dataclass(frozen=True)
class Scale:
    """The figures of `benchmarks.core_load`, for each repeat.

    Attributes:
      busy: by number of workers.
      loop: the same without a queue.
      runs: many runs with one future, by number of workers.
      queued: closures that wait in the queue.
    """

    busy: Mapping[int, list[dict[str, float]]]
    loop: Mapping[int, list[dict[str, float]]]
    runs: Mapping[int, list[dict[str, float]]]
    queued: list[dict[str, float]]


def measure(workers: Sequence[int], closures: int, runs: int, queued: int, repeats: int) -> Scale:
    """Measures each, repeat by repeat, each time in a fresh process.

    Raises:
      subprocess.CalledProcessError: a process failed.
    """
    found = Scale(
        {count: [] for count in workers}, {count: [] for count in workers}, {count: [] for count in workers}, []
    )
    with tqdm(total=repeats * (3 * len(workers) + 1), file=sys.stderr, unit="round") as progress:

        def run(load: str, *settings: int) -> dict[str, float]:
            progress.set_description(f"{load} {settings}")
            figures = _run(load, *settings)
            progress.update()
            return figures

        for _ in range(repeats):
            for count in workers:
                # Enough closures for every worker.
                total = max(closures, 2 * count)
                found.busy[count].append(run("busy", count, total))
                found.loop[count].append(run("loop", count, total))
                found.runs[count].append(run("runs", count, runs))
            found.queued.append(run("queued", queued))
    return found


def workers_table(found: Scale) -> str:
    """Returns a row for each number of workers; times are microseconds for one closure."""
    base = _median(found.busy[min(found.busy)], "cpu")
    rows = []
    for count, rounds in found.busy.items():
        cpu = _median(rounds, "cpu")
        rows.append(
            (
                f"{count:,}",
                f"{1 / _median(rounds, 'wall'):,.0f}",
                f"{count / 0.001:,.0f}",
                f"{cpu * _US:.1f}",
                f"{_median(found.loop[count], 'cpu') * _US:.1f}",
                f"{cpu / base:.2f}",
                f"{_median(rounds, 'switches'):.2f}",
                f"{_median(found.loop[count], 'switches'):.2f}",
            )
        )
    head = ("workers", "closures/s", "if free", "cpu us", "loop's", f"/ {min(found.busy)} workers", "waits", "loop's")
    return aligned(head, rows)


def runs_table(found: Scale) -> str:
    """Returns a row for each number of workers, with the processor time of a run in microseconds."""
    rows = [
        (f"{count:,}", f"{1 / _median(rounds, 'wall'):,.0f}", f"{_median(rounds, 'cpu') * _US:.2f}")
        for count, rounds in found.runs.items()
    ]
    return aligned(("workers", "runs of one future/s", "cpu us"), rows)


def queue_table(found: Scale, queued: int) -> str:
    """Returns the memory of a waiting closure, and the time of a `schedule`."""
    row = (
        f"{queued:,}",
        f"{_median(found.queued, 'bytes'):,.0f}",
        f"{_median(found.queued, 'schedule_p50') * _US:.1f}",
        f"{_median(found.queued, 'schedule_p99') * _US:.1f}",
    )
    return aligned(("closures in the queue", "bytes each", "schedule us: p50", "p99"), [row])


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints the tables."""
    assert __doc__ is not None
    chosen = SpeedArguments("scale", __doc__.partition("\n")[0], arguments)
    print(f"{machine_line()}, medians of {chosen.repeats}", flush=True)
    workers = WORKERS[:2] if chosen.is_quick else WORKERS
    closures, queued = (QUICK_CLOSURES, QUICK_QUEUED) if chosen.is_quick else (CLOSURES, QUEUED)
    runs = QUICK_RUNS if chosen.is_quick else RUNS
    found = measure(workers, closures, runs, queued, chosen.repeats)
    chosen.write(dataclasses.asdict(found))
    print(f"\n{workers_table(found)}\n\n{runs_table(found)}\n\n{queue_table(found, queued)}")


def _run(load: str, *settings: int) -> dict[str, float]:
    command = [sys.executable, "-m", "benchmarks.core_load", load, *map(str, settings)]
    finished = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True)
    figures: dict[str, Any] = json.loads(finished.stdout)
    return figures


def _median(rounds: Sequence[Mapping[str, float]], figure: str) -> float:
    return statistics.median(each[figure] for each in rounds)


if __name__ == "__main__":
    main()
