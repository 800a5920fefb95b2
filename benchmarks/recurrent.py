"""Training of recurrent models: this library, TensorFlow's own coordinator, and one process.

    python -m benchmarks.recurrent [--repeats 5] [--quick] [--json FILE]

An LSTM and a GRU layer of Keras 3 with 32 units over 30 time steps, 32 sequences a step, Adam, with one worker and one
parameter server; in a loop of scheduled steps, and by `fit`, which TensorFlow's coordinator does not run. "single" is
one process with all variables in its own memory. Figures are examples per second: the medians of rounds of many steps.
Each side runs for a while before rounds count, as in `benchmarks.recommender`.
"""

from collections.abc import Sequence

from benchmarks.contest import Contest, Found, plain
from benchmarks.rate_table import rate_table
from benchmarks.speed_arguments import SpeedArguments, machine_line

SIDES = ("ours", "peer", "single")
RATIOS = (("ours", "peer"), ("ours", "single"))
ROWS = ("LSTM", "GRU", "LSTM fit", "GRU fit")
SECONDS, QUICK_SECONDS = 2.0, 0.3
WARM_UP = 15.0


def contest() -> Contest:
    """Returns the contest of all models on all sides."""
    rows = {row: {side: (side, row) for side in SIDES} for row in ROWS}
    return Contest("recurrent", rows, workers=1, ps=1)


def table(found: Found) -> str:
    """Returns a row for each model; rates are examples per second."""
    return rate_table("examples/s", SIDES, RATIOS, found)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints the table."""
    assert __doc__ is not None
    chosen = SpeedArguments("recurrent", __doc__.partition("\n")[0], arguments)
    print(f"{machine_line()}, 1 worker, 1 parameter server, medians of {chosen.repeats}", flush=True)
    seconds, warm_up = (QUICK_SECONDS, 0.0) if chosen.is_quick else (SECONDS, WARM_UP)
    found = contest().measure(chosen.repeats, seconds, warm_up)
    chosen.write(plain(found))
    print(table(found))
    for row, columns in found.items():
        for side, rounds in columns.items():
            if rounds.error is not None:
                print(f"{row}, {side}: {rounds.error}")


if __name__ == "__main__":
    main()
