"""Data of which every example counts once: the rate of steps, compared with endless iterators.

    python -m benchmarks.data [--repeats 5] [--quick] [--json FILE]

Steps of 32 examples that compute next to nothing, on two workers and a parameter server. `endless` takes the next batch
of an iterator of its worker, `epochs` and `shuffled` read the range that they are given. All have one cluster, and take
turns after rounds that are not counted; the figures are medians. In the second table, reading a range takes 40 ms and a
step 0 to 50 ms: `unread` steps have what they read at once, `fused` ones read the ranges of a call at the same time,
`alone` each before its step, and with `prefetch` ahead. The last line is the processor time of the client's thread for
a range: handing it out, following its future, and recording its end.
"""

import pathlib
import tempfile
from collections.abc import Sequence

from benchmarks.contest import Contest, Found, plain
from benchmarks.contestants.data_steps import write_records
from benchmarks.rate_table import rate_table
from benchmarks.speed_arguments import SpeedArguments, machine_line

WAYS = ("endless", "epochs", "shuffled")
RATIOS = (("epochs", "endless"), ("shuffled", "endless"))
SLOW_WAYS = ("unread", "fused", "alone", "prefetch 2", "prefetch 8")
SLOW_RATIOS = (("prefetch 2", "alone"), ("prefetch 8", "alone"))
STEPS = (0, 5, 50)
WORKERS = 2
SECONDS, QUICK_SECONDS = 2.0, 0.3
# Until the calls of several steps have most of their size.
WARM_UP, QUICK_WARM_UP = 20.0, 0.0
HANDED_OUT = "handed out"


def contest(folder: pathlib.Path) -> Contest:
    """Returns the contest of all ways, and what a range costs."""
    rows = {
        "in memory": {way: ("ours", f"arrays {way}") for way in WAYS},
        "TFRecord": {way: ("ours", f"records {way} {folder}") for way in WAYS},
        **{f"{step} ms": {way: ("ours", f"slow {step} {way}") for way in SLOW_WAYS} for step in STEPS},
        HANDED_OUT: {"ranges": ("ours", "ranges")},
    }
    return Contest("data", rows, WORKERS, ps=1)


def table(found: Found) -> str:
    """Returns the rates, those with slow reads, and a line about ranges."""
    rates = {row: columns for row, columns in found.items() if WAYS[0] in columns}
    slow = {row: columns for row, columns in found.items() if SLOW_WAYS[0] in columns}
    each = found[HANDED_OUT]["ranges"].text("us", ".1f")
    return "\n".join(
        (
            rate_table("batches/s", WAYS, RATIOS, rates),
            rate_table("slow reads", SLOW_WAYS, SLOW_RATIOS, slow),
            f"a range is handed out in {each} us",
        )
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints the table."""
    assert __doc__ is not None
    chosen = SpeedArguments("data", __doc__.partition("\n")[0], arguments)
    print(f"{machine_line()}, {WORKERS} workers, 1 parameter server, medians of {chosen.repeats}", flush=True)
    with tempfile.TemporaryDirectory(prefix="benchmark-data-") as folder:
        write_records(pathlib.Path(folder))
        seconds, warm_up = (QUICK_SECONDS, QUICK_WARM_UP) if chosen.is_quick else (SECONDS, WARM_UP)
        found = contest(pathlib.Path(folder)).measure(chosen.repeats, seconds, warm_up)
    chosen.write(plain(found))
    print(table(found))


if __name__ == "__main__":
    main()
