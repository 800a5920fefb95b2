"""Tests that a sharded variable is one variable of the full shape in a SavedModel, whoever loads and calls that."""

from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from tests.ps_strategy.every_worker import on_every_worker

TIMEOUT = 120.0
VALUE = np.arange(20, dtype=np.float32).reshape(10, 2)
IDS = [7, 1, 9, 1]


class Lookups(tf.Module):
    """A table, and functions that read and change it."""

    def __init__(self, table):
        super().__init__()
        self.table = table
        self.bias = tf.Variable([1.0, 2.0], name="bias")

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def look_up(self, ids):
        return tf.nn.embedding_lookup(self.table, ids, name="rows") + self.bias

    @tf.function(input_signature=[])
    def total(self):
        return tf.reduce_sum(self.table, axis=0)

    @tf.function(input_signature=[tf.TensorSpec([None], tf.int64)])
    def add(self, ids):
        self.table.scatter_add(tf.IndexedSlices(tf.ones([tf.size(ids), 2]), ids))
        return tf.gather(self.table, ids)


def check(loaded, value=VALUE):
    ids = tf.constant(IDS, tf.int64)
    np.testing.assert_array_equal(loaded.look_up(ids), value[IDS] + [1, 2])
    np.testing.assert_array_equal(loaded.total(), value.sum(axis=0))
    np.testing.assert_array_equal(loaded.table, value)
    assert loaded.table.shape == (10, 2)


@pytest.fixture(scope="module")
def module(strategy, sharded):
    table = sharded(VALUE, parts=3, name="table")
    with strategy.scope():
        return Lookups(table)


@pytest.fixture(scope="module")
def saved(module, tmp_path_factory):
    path = str(tmp_path_factory.mktemp("saved"))
    tf.saved_model.save(module, path, signatures=module.look_up)
    return path


def test_it_has_one_variable_of_the_full_shape_and_names_no_server(saved):
    shapes = [shape for _, shape in tf.train.list_variables(saved + "/variables/variables")]
    assert [10, 2] in shapes
    assert [4, 2] not in shapes
    content = Path(saved, "saved_model.pb").read_bytes()
    assert b"/job:" not in content
    assert b"part_1" not in content
    # It is called outside of the scope.
    loaded = tf.saved_model.load(saved)
    check(loaded)
    np.testing.assert_array_equal(loaded.add(tf.constant([9, 0], tf.int64)), VALUE[[9, 0]] + 1)


def test_it_is_loaded_in_a_scope_with_a_partitioner_and_called_on_every_worker(strategy, sharded_scope, saved):
    with sharded_scope(tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)):
        loaded = tf.saved_model.load(saved)
    check(loaded)
    ids = tf.constant(IDS, tf.int64)
    [served] = loaded.signatures["serving_default"](ids).values()
    for rows in (served, *on_every_worker(strategy, loaded.look_up, ids)):
        np.testing.assert_array_equal(rows, VALUE[IDS] + [1, 2])


def test_one_alone_is_saved_and_loaded_with_any_number_of_parts(sharded, sharded_scope, tmp_path):
    tf.saved_model.save(sharded(VALUE, parts=2), str(tmp_path))
    for parts in (1, 3):
        with sharded_scope(tf.distribute.experimental.partitioners.FixedShardsPartitioner(parts)):
            np.testing.assert_array_equal(tf.saved_model.load(str(tmp_path)), VALUE)
    np.testing.assert_array_equal(tf.saved_model.load(str(tmp_path)), VALUE)


def test_training_goes_on_after_it_was_saved(strategy, module, saved):
    def train(ids):
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(module.look_up(ids))
        module.table.scatter_sub(tape.gradient(loss, module.table))

    before = module.table.numpy()
    strategy.schedule(tf.function(train), args=(np.array(IDS),)).result(TIMEOUT)
    expected = before.copy()
    np.subtract.at(expected, IDS, 1.0)
    np.testing.assert_array_equal(module.table, expected)
    np.testing.assert_array_equal(module.add(tf.constant([0], tf.int64)), expected[[0]] + 1)
    module.table.assign(VALUE)
    check(tf.saved_model.load(saved))
