"""The memory that the client and the parameter servers keep when a worker is restarted again and again.

    python -m benchmarks.memory [--repeats 30] [--quick] [--json FILE]

A recommender trains on two workers and two parameter servers. A worker is killed and started again, and steps are made,
many times; this library and TensorFlow's own coordinator do so one after the other. Memory is the resident set, in MB,
before the counted restarts, which come after 15 others, and after them.
"""

import sys
from collections.abc import Mapping, Sequence

import psutil
from tqdm import tqdm

from benchmarks.contest import fresh_contestant
from benchmarks.speed_arguments import SpeedArguments, machine_line
from coordinator.simulation.result import aligned

SIDES = {"ours": "alone", "peer": "peer"}
SERVERS = 2
REPEATS = 30
# In which the processes' own caches fill.
WARM_UP, QUICK_WARM_UP = 15, 0
# Of steps after each restart.
SECONDS = 0.5
_MB = 1e6

# The bytes that a process has before the counted restarts and after each of them, by the process's name.
Sizes = dict[str, list[int]]


def sizes_of(side: str, restarts: int, warm_up: int, progress: "tqdm[None]") -> Sizes:
    """Restarts a worker of a side's cluster again and again.

    Args:
      side: of `benchmarks.contestants.program`.
      restarts: how many are counted.
      warm_up: how many come before.
      progress: counts all of them.

    Raises:
      RuntimeError: the side did not bear it.
    """
    found: Sizes = {}
    with fresh_contestant("recommender", side, workers=2, ps=SERVERS) as (cluster, process):
        processes = {
            "client": process.process.pid,
            **{f"ps {index}": cluster.pid("ps", index) for index in range(SERVERS)},
        }
        for repetition in range(warm_up + restarts + 1):
            answer = process.run("plain 64", SECONDS)
            if "error" in answer:
                raise RuntimeError(f"{side}, restart {repetition}: {answer['error']}. It printed:\n{process.tail()}")
            if repetition >= warm_up:
                for name, pid in processes.items():
                    found.setdefault(name, []).append(psutil.Process(pid).memory_info().rss)
            cluster.restart("worker", 0)
            progress.update()
    return found


def table(found: Mapping[str, Sizes]) -> str:
    """Returns a row for each process of each side."""
    rows = [
        (
            f"{side}, {name}",
            f"{sizes[0] / _MB:.0f}",
            f"{sizes[-1] / _MB:.0f}",
            f"{sizes[-1] / sizes[0] - 1:+.1%}",
            f"{(sizes[-1] - sizes[0]) / (len(sizes) - 1) / _MB:.2f}",
        )
        for side, by_name in found.items()
        for name, sizes in by_name.items()
    ]
    return aligned(("MB", "before", "after", "growth", "a restart"), rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints the table."""
    assert __doc__ is not None
    chosen = SpeedArguments("memory", __doc__.partition("\n")[0], arguments, default_repeats=REPEATS)
    print(f"{machine_line()}, 2 workers, {SERVERS} parameter servers, {chosen.repeats} restarts", flush=True)
    warm_up = QUICK_WARM_UP if chosen.is_quick else WARM_UP
    with tqdm(total=len(SIDES) * (warm_up + chosen.repeats + 1), file=sys.stderr, unit="restart") as progress:
        found = {name: sizes_of(side, chosen.repeats, warm_up, progress) for name, side in SIDES.items()}
    chosen.write(found)
    print(table(found))


if __name__ == "__main__":
    main()
