"""The longest pause of a recommender's training in its first seconds, in which larger calls are built.

    python -m benchmarks.pauses [--repeats 5] [--quick] [--json FILE]

From the end of the first step on, steps are scheduled without an end for 10 seconds; each writes when it ended, by its
worker's clock, to a variable. Each round is a fresh client and cluster. Medians over rounds.
"""

import functools
import sys
from collections.abc import Sequence
from typing import Any

from tqdm import tqdm

from benchmarks.alternated import alternated
from benchmarks.contest import Found, fresh_contestant, plain
from benchmarks.rounds import ratio
from benchmarks.speed_arguments import SpeedArguments, machine_line
from coordinator.simulation.result import aligned

SIDES = ("ours", "peer")
BATCH = "32"
SECONDS, QUICK_SECONDS = 10.0, 1.0


def first_seconds(side: str, seconds: float) -> dict[str, Any]:
    """Runs a side's first seconds on a fresh cluster, and returns its answer."""
    with fresh_contestant("pauses", side, workers=2, ps=2) as (_, process):
        return process.run(BATCH, seconds)


def measure(repeats: int, seconds: float) -> Found:
    """Measures all sides in turns."""
    with tqdm(total=len(SIDES) * (repeats + 1), file=sys.stderr, unit="start") as progress:

        def show(name: str) -> None:
            progress.set_description(name)
            progress.update()

        runners = {side: functools.partial(first_seconds, side, seconds) for side in SIDES}
        return {f"batch {BATCH}": alternated(runners, repeats, show)}


def table(found: Found) -> str:
    """Returns a row for the longest pause, in seconds, and one for the steps a second."""
    rows = [
        (
            f"{title}, {label}",
            *(columns[side].text(figure, form) for side in SIDES),
            ratio(columns["ours"], columns["peer"], figure),
        )
        for title, columns in found.items()
        for figure, label, form in (("pause", "longest pause, s", ".3f"), ("steps", "steps/s", ".0f"))
    ]
    return aligned(("first 10 seconds", *SIDES, "ours / peer"), rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints the table."""
    assert __doc__ is not None
    chosen = SpeedArguments("pauses", __doc__.partition("\n")[0], arguments)
    print(f"{machine_line()}, 2 workers, 2 parameter servers, medians of {chosen.repeats}", flush=True)
    found = measure(chosen.repeats, QUICK_SECONDS if chosen.is_quick else SECONDS)
    chosen.write(plain(found))
    print(table(found))


if __name__ == "__main__":
    main()
