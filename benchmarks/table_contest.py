"""The recommender's training with its embedding in a dynamic table, in static variables, and in the peer's sharded one.

"dynamic" and "static" are this library, "peer" is TensorFlow's coordinator with a `ShardedVariable` in two parts. The
data repeat, so that after the uncounted rounds there are no new keys. Figures are examples per second, and microseconds
of processor time for an example, of the client and all servers together.
"""

from benchmarks.contest import Contest, Found
from benchmarks.rounds import ratio
from coordinator.simulation.result import aligned

COLUMNS = {"peer": ("peer sharded", "sharded"), "static": ("ours", "plain"), "dynamic": ("ours", "dynamic")}
BATCHES, QUICK_BATCHES = (256, 2048), (32,)
SECONDS, QUICK_SECONDS = 2.0, 0.3
# Meanwhile this library finds how many steps to fuse.
WARM_UP = 15.0


def contest(*, is_quick: bool = False) -> Contest:
    """Returns the contest of all columns at all batch sizes, with two workers and two parameter servers."""
    rows = {
        f"batch {batch}": {column: (side, f"{kind} {batch}") for column, (side, kind) in COLUMNS.items()}
        for batch in (QUICK_BATCHES if is_quick else BATCHES)
    }
    return Contest("tables", rows, workers=2, ps=2)


def measure(repeats: int, *, is_quick: bool) -> Found:
    """Runs the contest."""
    seconds, warm_up = (QUICK_SECONDS, 0.0) if is_quick else (SECONDS, WARM_UP)
    return contest(is_quick=is_quick).measure(repeats, seconds, warm_up)


def table(found: Found) -> str:
    """Returns a row for each batch size: rates, their ratio, processor times, their ratio."""
    rows = [
        (
            row,
            *(rounds[column].text("rate", ",.0f") for column in COLUMNS),
            ratio(rounds["dynamic"], rounds["peer"], "rate"),
            *(rounds[column].text("processor", ",.1f", 1e6) for column in COLUMNS),
            ratio(rounds["dynamic"], rounds["static"], "processor"),
        )
        for row, rounds in found.items()
    ]
    names = tuple(COLUMNS)
    return aligned(
        ("examples/s", *names, "dynamic / peer", *(f"us, {name}" for name in names), "dynamic / static"), rows
    )
