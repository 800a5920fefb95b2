"""Embeddings: updates of large tables, training with a table in parts or one that grows, and what that one is worth.

    python -m benchmarks.embeddings [--only updates|sharded|tables|auc] [--repeats 5] [--quick] [--json FILE]

    updates    the time of an update of a large table by a gradient of 4,096 of its rows
    sharded    training with a table in parts: this library, and TensorFlow's `ShardedVariable`
    tables     training with a table that grows, beside static variables and the peer: see `table_contest`
    auc        a row for each key, against keys hashed into fewer rows; as many seeds as repeats: see `table_auc`

In `updates` there is one worker, and one parameter server with the table and the optimizer's slots. "ours" updates rows
(`Options(sparse_updates="rows")`), "dense" is this library with `"dense"`, so Keras' own update, and "peer" is
TensorFlow's coordinator, under which Keras does the same. Figures are milliseconds for an update: the medians of rounds
in which one call makes many, each with other rows. They include drawing the rows, summing those of the same index, and
sending the gradient to the parameter server.

`sharded` has examples per second of the recommender of `benchmarks.recommender` with its table as one variable, in two
parts on two parameter servers, with two workers: "sharded" is this library, "peer sharded" TensorFlow's
`ShardedVariable`. Both look up and change rows of the parts alone, with plain SGD.
"""

from collections.abc import Sequence
from typing import Any

from benchmarks import table_auc, table_contest
from benchmarks.contest import Contest, Found, plain
from benchmarks.rate_table import rate_table
from benchmarks.rounds import ratio
from benchmarks.speed_arguments import SpeedArguments, machine_line
from coordinator.simulation.result import aligned

PARTS = ("updates", "sharded", "tables", "auc")
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
SHARDED_SIDES = ("sharded", "peer sharded")
BATCHES, QUICK_BATCHES = (256, 2048), (32,)
# As in `benchmarks.recommender`: meanwhile this library finds how many steps to fuse.
SHARDED_SECONDS, WARM_UP = 2.0, 15.0


def contest(*, is_quick: bool = False) -> Contest:
    """Returns the contest of all cases on their sides."""
    cases = QUICK_CASES if is_quick else CASES
    rows = {case: {side: (side, case) for side in sides} for case, sides in cases.items()}
    return Contest("embeddings", rows, workers=1, ps=1)


def sharded_contest(batches: Sequence[int]) -> Contest:
    """Returns the contest of steps with a table in parts, with two workers and two parameter servers."""
    rows = {f"batch {batch}": {side: (side, f"sharded {batch}") for side in SHARDED_SIDES} for batch in batches}
    return Contest("sharded", rows, workers=2, ps=2)


def sharded_table(found: Found) -> str:
    """Returns a row for each batch size; rates are examples per second."""
    return rate_table("examples/s", SHARDED_SIDES, [SHARDED_SIDES], found)


def table(found: Found) -> str:
    """Returns a row for each case, in milliseconds; the ratios say how often ours is made in the time of one other."""
    rows = []
    for case, columns in found.items():
        name, count, width = case.split()
        figures = [columns[side].text("seconds", ",.1f", _MS) if side in columns else "-" for side in SIDES]
        others = [ratio(columns[side], columns["ours"], "seconds") if side in columns else "-" for side in SIDES[1:]]
        rows.append((f"{name}, {int(count):,} x {width}", *figures, *others))
    return aligned(("ms", *SIDES, *(f"{side} / ours" for side in SIDES[1:])), rows)


def measure(part: str, repeats: int, *, is_quick: bool) -> tuple[Any, str]:
    """Measures a part, and returns what was found, in JSON types, and its table."""
    if part == "auc":
        aucs = table_auc.measure(range(repeats), table_auc.QUICK_STEPS if is_quick else table_auc.STEPS)
        return aucs, table_auc.table(aucs)
    if part == "tables":
        found = table_contest.measure(repeats, is_quick=is_quick)
        return plain(found), table_contest.table(found)
    if part == "sharded":
        batches, seconds, warm_up = (
            (QUICK_BATCHES, QUICK_SECONDS, 0.0) if is_quick else (BATCHES, SHARDED_SECONDS, WARM_UP)
        )
        found = sharded_contest(batches).measure(repeats, seconds, warm_up)
        return plain(found), sharded_table(found)
    found = contest(is_quick=is_quick).measure(repeats, QUICK_SECONDS if is_quick else SECONDS)
    return plain(found), table(found)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures the parts and prints their tables."""
    assert __doc__ is not None
    chosen = SpeedArguments("embeddings", __doc__.partition("\n")[0], arguments, PARTS)
    figures = {}
    for part in chosen.parts:
        print(f"{part}: {machine_line()}, {chosen.repeats} repeats", flush=True)
        figures[part], text = measure(part, chosen.repeats, is_quick=chosen.is_quick)
        print(text, flush=True)
    chosen.write(figures)


if __name__ == "__main__":
    main()
