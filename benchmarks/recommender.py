"""A recommender's training: this library, TensorFlow's own coordinator, a loop without any, and one process.

    python -m benchmarks.recommender [--repeats 5] [--quick] [--json FILE]

26 categories are looked up in a table of 260,000 x 16 that is split over two parameter servers; with 13 counts they go
through a network of three layers; plain SGD. "ours" and "pull/push" are the same step, with its own SGD and with the
update rule `coordinator.updates.Asynchronous`, set for plain SGD, which needs no locks and no sums of rows; "alone" is
the first with each step in a separate call. "by hand" is the bare loop with a function that was written to be fast: 16
steps in one, and the dense variables of a server as one. "single" is one process with all variables in its own memory.
Figures are examples per second: the medians of rounds in which many steps are scheduled at once and joined. Each column
runs for a while before rounds count: meanwhile this library finds how many steps to fuse, and traces them.
"""

from collections.abc import Sequence

from benchmarks.contest import Contest, Found, plain
from benchmarks.rate_table import rate_table
from benchmarks.speed_arguments import SpeedArguments, machine_line

BATCHES = (32, 256, 2048)
COLUMNS = {
    "ours": ("ours", "plain"),
    "pull/push": ("ours", "rule"),
    "alone": ("alone", "plain"),
    "peer": ("peer", "plain"),
    "bare": ("bare", "plain"),
    "by hand": ("hand", "hand"),
    "single": ("single", "plain"),
}
RATIOS = (("ours", "peer"), ("pull/push", "peer"), ("alone", "bare"), ("by hand", "peer"), ("ours", "single"))
SECONDS, QUICK_SECONDS = 2.0, 0.3
WARM_UP = 15.0


def contest(batches: Sequence[int]) -> Contest:
    """Returns the contest of all columns at these batch sizes, with two workers and two parameter servers."""
    rows = {
        f"batch {batch}": {column: (side, f"{kind} {batch}") for column, (side, kind) in COLUMNS.items()}
        for batch in batches
    }
    return Contest("recommender", rows, workers=2, ps=2)


def table(found: Found) -> str:
    """Returns a row for each batch size; rates are examples per second."""
    return rate_table("examples/s", tuple(COLUMNS), RATIOS, found)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints the table."""
    assert __doc__ is not None
    chosen = SpeedArguments("recommender", __doc__.partition("\n")[0], arguments)
    print(f"{machine_line()}, 2 workers, 2 parameter servers, medians of {chosen.repeats}", flush=True)
    batches, seconds, warm_up = (BATCHES[:1], QUICK_SECONDS, 0.0) if chosen.is_quick else (BATCHES, SECONDS, WARM_UP)
    found = contest(batches).measure(chosen.repeats, seconds, warm_up)
    chosen.write(plain(found))
    print(table(found))


if __name__ == "__main__":
    main()
