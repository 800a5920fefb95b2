"""The recommender benchmark runs on real servers; its data and its model are as documented."""

import json

import numpy as np
import pytest
import tensorflow as tf

from benchmarks.contestants.criteo_like import CATEGORIES, COUNTS, ROWS, criteo_like
from benchmarks.contestants.packed_recommender_model import PackedRecommenderModel
from benchmarks.contestants.recommender_model import TABLES, RecommenderModel, dense_values, descend
from benchmarks.contestants.recommender_steps import plain_step
from benchmarks.recommender import COLUMNS, contest, table
from benchmarks.rounds import Rounds

PROGRAM = """
    import sys

    from benchmarks.recommender import main

    main(sys.argv[1:])
"""


@pytest.mark.cluster
@pytest.mark.release
@pytest.mark.timeout(700)
def test_every_column_of_the_table_trains(run_program, tmp_path):
    path = tmp_path / "figures.json"
    run_program(PROGRAM, "--quick", "--json", path, timeout=680)
    (columns,) = json.loads(path.read_text())["found"].values()
    assert {column: rounds["error"] for column, rounds in columns.items()} == dict.fromkeys(COLUMNS)
    assert all(each["rate"] > 0 for rounds in columns.values() for each in rounds["figures"])


def test_the_data_are_shaped_like_criteos_and_the_same_each_time():
    (counts, rows, labels), (again, *_) = (next(iter(criteo_like(64))) for _ in range(2))
    assert counts.shape == (64, COUNTS)
    assert rows.shape == (64, CATEGORIES)
    assert labels.shape == (64, 1)
    assert np.array_equal(counts, again)
    assert rows.numpy().min() >= 0
    assert rows.numpy().max() < ROWS
    assert np.unique(rows).size > 500
    assert 0.05 < labels.numpy().mean() < 0.6


def test_steps_lower_the_loss_and_touch_the_rows_of_the_batch_alone():
    model = RecommenderModel()
    assert [tuple(variable.shape) for variable in model.tables] == [(ROWS // TABLES, 16)] * TABLES
    batch = next(iter(criteo_like(32)))
    before = model.tables[0].numpy()
    size_before = _length(model, batch)
    for _ in range(30):
        for variable, gradient in zip(model.variables, model.gradients(*batch), strict=True):
            assert isinstance(gradient, tf.IndexedSlices) == (variable.shape[0] == ROWS // TABLES)
            descend(variable, gradient, 0.1)
    assert _length(model, batch) < size_before
    changed = (model.tables[0].numpy() != before).any(axis=1).sum()
    assert 0 < changed <= 32 * CATEGORIES


def _length(model, batch):
    """Returns the norm of the last bias' gradient: the mean error of the network's predictions."""
    return abs(float(model.gradients(*batch)[-1][0]))


@pytest.mark.long
def test_the_hand_written_model_takes_the_same_steps():
    model, packed = RecommenderModel(), PackedRecommenderModel()
    for each in (model, packed):
        step, batches = plain_step(each), iter(criteo_like(32))
        for _ in range(3):
            step(batches)
    for one, other in zip(model.tables, packed.tables, strict=True):
        np.testing.assert_allclose(one, other, atol=1e-6)
    dense = np.concatenate([np.ravel(variable) for variable in model.dense])
    np.testing.assert_allclose(dense, np.concatenate([np.ravel(vector) for vector in packed.vectors]), atol=1e-6)
    assert not np.array_equal(dense, np.concatenate([np.ravel(value) for value in dense_values()]))


def test_the_table_has_a_row_for_each_batch_size():
    columns = {column: Rounds([{"rate": 1000.0 * number}]) for number, column in enumerate(COLUMNS, start=1)}
    rows = table({"batch 32": columns, "batch 256": columns}).splitlines()[2:]
    assert [row.split("  ")[0] for row in rows] == ["batch 32", "batch 256"]
    assert rows[0].split()[-5:] == ["0.25", "0.50", "0.60", "1.50", "0.14"]


def test_the_two_ways_of_this_library_share_a_process():
    assert contest((32, 256)).sides == ("ours", "alone", "peer", "bare", "hand", "single")
