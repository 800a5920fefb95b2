"""Small functions per second: this library in three ways, TensorFlow's coordinator, and a bare loop.

    python -m benchmarks.dispatch [--repeats 5] [--quick] [--json FILE]

Many closures of one function are scheduled at once and joined; the rate is their number over the time from the first
`schedule` to the return of `join`. "runs" schedules them by one call: `schedule(function, steps=count)`; "loop" by a
loop in a `tf.function` of the client, and "other loop" by one that does more than schedule. The bare loop is one Python
thread per worker that calls the function on its device. Each contestant has a separate process and
cluster, and they take turns; the figures are medians.
"""

from collections.abc import Mapping, Sequence

from benchmarks.contest import Contest, Found, plain
from benchmarks.rate_table import rate_table
from benchmarks.speed_arguments import SpeedArguments, machine_line

FUNCTIONS = {"empty": "nothing", "scalar": "returns a scalar", "assign_add": "one assign_add"}
SIDES = ("ours", "runs", "loop", "other loop", "peer", "bare")
RATIOS = (("ours", "peer"), ("ours", "bare"), ("runs", "ours"), ("loop", "runs"), ("other loop", "peer"))
WORKERS = (1, 2, 4)
SECONDS, QUICK_SECONDS = 1.0, 0.3


def contest(workers: int) -> Contest:
    """Returns the contest of all functions on all sides, with one parameter server."""
    rows = {title: {side: (side, work) for side in SIDES} for work, title in FUNCTIONS.items()}
    return Contest("dispatch", rows, workers, ps=1)


def table(found: Mapping[int, Found]) -> str:
    """Returns a row for each function and number of workers; rates are closures per second."""
    rows = {
        f"{title}, {workers} worker{'s' * (workers > 1)}": columns
        for workers, by_title in found.items()
        for title, columns in by_title.items()
    }
    return rate_table("closures/s", SIDES, RATIOS, rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints the table."""
    assert __doc__ is not None
    chosen = SpeedArguments("dispatch", __doc__.partition("\n")[0], arguments)
    print(f"{machine_line()}, 1 parameter server, medians of {chosen.repeats}", flush=True)
    sizes = WORKERS[:1] if chosen.is_quick else WORKERS
    seconds = QUICK_SECONDS if chosen.is_quick else SECONDS
    found = {workers: contest(workers).measure(chosen.repeats, seconds) for workers in sizes}
    chosen.write({workers: plain(by_title) for workers, by_title in found.items()})
    print(table(found))


if __name__ == "__main__":
    main()
