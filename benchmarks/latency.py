"""The time of one function from `schedule` to its result, with nothing else in flight.

    python -m benchmarks.latency [--repeats 5] [--quick] [--json FILE]

The function returns when it began and ended; client and servers are on one machine and have one clock. "start" is from
before `schedule` to its beginning, "result" from its end until the client has its value, "whole" both and what is
between. "schedule" is how long that call itself took. All are milliseconds: the medians over rounds of each round's
50th and 99th percentile. The bare loop makes the call when its result is requested, on the requesting thread.
"""

from collections.abc import Sequence

from benchmarks.contest import Contest, Found, plain
from benchmarks.rounds import ratio
from benchmarks.speed_arguments import SpeedArguments, machine_line
from coordinator.simulation.result import aligned

FUNCTIONS = {"scalar": "returns scalars", "assign_add": "one assign_add"}
SIDES = ("ours", "peer", "bare")
SPANS = ("schedule", "start", "result", "whole")
SECONDS, QUICK_SECONDS = 2.0, 0.3
_MS = 1e3


def contest() -> Contest:
    """Returns the contest of all functions on all sides, with two workers and one parameter server."""
    rows = {title: {side: (side, work) for side in SIDES} for work, title in FUNCTIONS.items()}
    return Contest("latency", rows, workers=2, ps=1)


def table(found: Found) -> str:
    """Returns a row for each function, span and percentile."""
    rows = [
        (
            f"{title}: {span} p{percent}",
            *(columns[side].text(f"{span}_p{percent}", ".2f", _MS) for side in SIDES),
            ratio(columns["ours"], columns["peer"], f"{span}_p{percent}"),
        )
        for title, columns in found.items()
        for span in SPANS
        for percent in (50, 99)
    ]
    return aligned(("one in flight, ms", *SIDES, "ours / peer"), rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints the table."""
    assert __doc__ is not None
    chosen = SpeedArguments("latency", __doc__.partition("\n")[0], arguments)
    print(f"{machine_line()}, 2 workers, 1 parameter server, medians of {chosen.repeats}", flush=True)
    found = contest().measure(chosen.repeats, QUICK_SECONDS if chosen.is_quick else SECONDS)
    chosen.write(plain(found))
    print(table(found))


if __name__ == "__main__":
    main()
