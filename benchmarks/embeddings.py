"""The time of an update of a large table by a gradient of 4,096 of its rows: this library, Keras, and the peer.

    python -m benchmarks.embeddings [--repeats 5] [--quick] [--json FILE]

One worker, and one parameter server with the table and the optimizer's slots. "ours" updates rows
(`Options(sparse_updates="rows")`), "dense" is this library with `"dense"`, so Keras' own update, and "peer" is
TensorFlow's coordinator, under which Keras does the same. Figures are milliseconds for an update: the medians of rounds
in which one call makes many, each with other rows. They include drawing the rows, summing those of the same index, and
sending the gradient to the parameter server.
"""

from collections.abc import Sequence

from benchmarks.contest import Contest, Found, plain
from benchmarks.rounds import ratio
from benchmarks.speed_arguments import SpeedArguments, machine_line
from coordinator.simulation.text_report import aligned

SIDES = ("ours", "dense", "peer")
# The optimizer, the rows and the width of the table, and who runs it: larger ones need too much memory otherwise.
CASES = {
    "SGD 1000000 64": SIDES,
    "Adagrad 1000000 64": SIDES,
    "Adam 1000000 64": SIDES,
    "RowwiseAdagrad 1000000 64": SIDES[:1],
    "Adam 4000000 64": SIDES[:1],
}
QUICK_CASES = {"Adam 50000 16": SIDES}
SECONDS, QUICK_SECONDS = 1.0, 0.3
_MS = 1e3


def contest(*, is_quick: bool = False) -> Contest:
    """Returns the contest of all cases on their sides."""
    cases = QUICK_CASES if is_quick else CASES
    rows = {case: {side: (side, case) for side in sides} for case, sides in cases.items()}
    return Contest("embeddings", rows, workers=1, ps=1)


def table(found: Found) -> str:
    """Returns a row for each case, in milliseconds; the ratios say how often ours is made in the time of one other."""
    rows = []
    for case, columns in found.items():
        name, count, width = case.split()
        figures = [columns[side].text("seconds", ",.1f", _MS) if side in columns else "-" for side in SIDES]
        others = [ratio(columns[side], columns["ours"], "seconds") if side in columns else "-" for side in SIDES[1:]]
        rows.append((f"{name}, {int(count):,} x {width}", *figures, *others))
    return aligned(("ms", *SIDES, *(f"{side} / ours" for side in SIDES[1:])), rows)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures and prints the table."""
    assert __doc__ is not None
    chosen = SpeedArguments("embeddings", __doc__.partition("\n")[0], arguments)
    print(f"{machine_line()}, 1 worker, 1 parameter server, medians of {chosen.repeats}", flush=True)
    found = contest(is_quick=chosen.is_quick).measure(chosen.repeats, QUICK_SECONDS if chosen.is_quick else SECONDS)
    chosen.write(plain(found))
    print(table(found))


if __name__ == "__main__":
    main()
