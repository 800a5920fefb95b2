"""The benchmarks of embeddings run on real servers, on all sides; the truth of the clicks is known."""

import json

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from benchmarks import table_auc, table_contest
from benchmarks.embeddings import CASES, PARTS, QUICK_BATCHES, QUICK_CASES, SHARDED_SIDES, SIDES, contest, table
from benchmarks.rounds import Rounds

PROGRAM = """
    import sys

    from benchmarks.embeddings import main

    main(sys.argv[1:])
"""


@pytest.mark.cluster
@pytest.mark.release
@pytest.mark.timeout(700)
def test_every_side_of_every_part_runs(run_program, tmp_path):
    path = tmp_path / "figures.json"
    run_program(PROGRAM, "--quick", "--json", path, timeout=680)
    parts = json.loads(path.read_text())["found"]
    assert tuple(parts) == PARTS
    aucs = parts.pop("auc")
    assert all(0.4 < auc < 1 for found in aucs.values() for auc in found)
    small = dict.fromkeys(QUICK_CASES, SIDES)
    small |= {f"batch {size}": (*SHARDED_SIDES, *table_contest.COLUMNS) for size in QUICK_BATCHES}
    found = {case: {} for case in small}
    for part in parts.values():
        for case, columns in part.items():
            found[case].update(columns)
    for case, columns in found.items():
        assert {side: rounds["error"] for side, rounds in columns.items()} == dict.fromkeys(small[case])
        for rounds in columns.values():
            assert all(value > 0 for figures in rounds["figures"] for value in figures.values())


def test_the_table_has_milliseconds_and_how_often_ours_is_as_fast():
    slow, fast = Rounds([{"seconds": 0.5}]), Rounds([{"seconds": 0.01}])
    found = {"Adam 1000000 64": {"ours": fast, "dense": slow, "peer": slow}, "Adam 4000000 64": {"ours": fast}}
    whole, alone = (row.split() for row in table(found).splitlines()[2:])
    assert whole == ["Adam,", "1,000,000", "x", "64", "10.0", "500.0", "500.0", "50.00", "50.00"]
    assert alone[-5:] == ["10.0", *"----"]


def test_this_library_runs_every_case():
    assert [set(columns) >= {"ours"} for columns in contest().rows.values()] == [True] * len(CASES)


def test_the_table_of_tables_has_rates_and_processor_times():
    figures = [{"rate": 100.0 * number, "processor": 1e-6 * number} for number in (1, 2, 3)]
    rounds = {column: Rounds([each]) for column, each in zip(table_contest.COLUMNS, figures, strict=True)}
    row = table_contest.table({"batch 256": rounds}).splitlines()[2].split()
    assert row == ["batch", "256", "100", "200", "300", "3.00", "1.0", "2.0", "3.0", "1.50"]


def test_clicks_follow_the_chances_which_are_a_function_of_the_keys():
    keys, chances, clicks = (each.numpy() for each in table_auc.examples(20_000, 3, 1))
    again = table_auc.examples(20_000, 3, 2)
    assert keys.min() >= 0
    assert not np.array_equal(keys, again[0])
    assert abs(clicks.mean() - chances.mean()) < 0.02
    auc = table_auc.auc(chances, clicks)
    assert 0.65 < auc < 0.95
    assert auc == pytest.approx(roc_auc_score(clicks, chances), abs=1e-6)
