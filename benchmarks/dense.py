"""A dense network's training: this library, TensorFlow's own coordinator, a loop without any, and one process.

    python -m benchmarks.dense [--repeats 5] [--quick] [--json FILE]

A small convolutional network of Keras 3 learns scikit-learn's handwritten digits with Adam, 32 images a step, with two
workers and two parameter servers. "single" is one process with all variables in its own memory. Figures are examples
per second: the medians of rounds in which many steps are scheduled at once and joined. Without this library Keras 3
loses updates when workers race: "peer" and "bare" count steps whose updates were lost. Each side runs for a while
before rounds count, as in `benchmarks.recommender`.
"""

from collections.abc import Sequence

from benchmarks.contest import Contest, Found, plain
from benchmarks.rate_table import rate_table
from benchmarks.speed_arguments import SpeedArguments, machine_line

SIDES = ("ours", "peer", "bare", "single")
RATIOS = (("ours", "peer"), ("ours", "bare"), ("ours", "single"))
SECONDS, QUICK_SECONDS = 2.0, 0.3
WARM_UP = 15.0


def contest() -> Contest:
    """Returns the contest of the step on all sides."""
    return Contest("dense", {"digits, batch 32": {side: (side, "32") for side in SIDES}}, workers=2, ps=2)


def table(found: Found) -> str:
    """Returns one row; rates are examples per second."""
    return rate_table("examples/s", SIDES, RATIOS, found)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints the table."""
    assert __doc__ is not None
    chosen = SpeedArguments("dense", __doc__.partition("\n")[0], arguments)
    print(f"{machine_line()}, 2 workers, 2 parameter servers, medians of {chosen.repeats}", flush=True)
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
