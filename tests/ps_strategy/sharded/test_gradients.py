"""Tests of gradients with respect to a sharded variable: rows with the indices of the whole, wherever they are read."""

import numpy as np
import pytest
import tensorflow as tf

from coordinator.ps_strategy.tensorflow_internals import unstored_variable

TIMEOUT = 120.0
ROWS, WIDTH = 10, 2
TABLE = np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)
IDS = [7, 1, 9, 1, 0, 4]


@pytest.fixture(scope="module")
def table(sharded):
    return sharded(TABLE, parts=3)


def gradient(table, loss):
    with tf.GradientTape() as tape:
        value = loss(table)
    return tape.gradient(value, table)


def squares(rows):
    return tf.reduce_sum(rows * rows)


@tf.autograph.experimental.do_not_convert
def looked_up_in_branch(table):
    # Not known while it is traced.
    is_larger = tf.reduce_sum(tf.gather(table, [0])) < 100.0
    return tf.cond(is_larger, lambda: squares(tf.gather(table, IDS)), lambda: tf.constant(0.0))


LOSSES = {
    "rows": lambda table: squares(tf.gather(table, IDS)),
    "rows, looked up": lambda table: squares(tf.nn.embedding_lookup(table, IDS, name="rows")),
    "elements": lambda table: squares(tf.gather_nd(table, [[7, 1], [0, 0], [7, 1]])),
    "a slice": lambda table: squares(table[2:8:2]),
    "a product": lambda table: squares(tf.matmul(table, tf.ones([WIDTH, 3]))),
    "rows and all": lambda table: squares(tf.gather(table, IDS)) + squares(table),
    "rows in a branch": looked_up_in_branch,
    "rows in a function": lambda table: tf.function(lambda: squares(tf.gather(table, IDS)))(),
}


def test_gradients_in_a_step_and_on_the_client_are_those_of_a_plain_variable(strategy, table):
    def step(table=table):
        return {name: tf.convert_to_tensor(gradient(table, loss)) for name, loss in LOSSES.items()}

    expected, in_a_step = step(tf.Variable(TABLE)), strategy.schedule(tf.function(step)).result(TIMEOUT)
    for name in LOSSES:
        np.testing.assert_allclose(in_a_step[name], expected[name], rtol=1e-6, err_msg=name)
    for name in ("rows", "a slice", "rows and all"):
        np.testing.assert_allclose(
            tf.convert_to_tensor(gradient(table, LOSSES[name])), expected[name], rtol=1e-6, err_msg=name
        )


def read_in_a_loop(table):
    total = tf.reduce_sum(tf.gather(table, [0]))
    for turn in tf.range(3):
        total += tf.cast(turn, tf.float32) * squares(tf.gather(table, [7, 1, 9, turn])) + squares(table * 2.0)
    return total


def test_a_gradient_through_a_loop_is_that_of_a_plain_variable(strategy, table):
    @tf.function
    def step():
        return tf.convert_to_tensor(gradient(table, read_in_a_loop))

    plain = tf.Variable(TABLE)
    expected = tf.function(lambda: gradient(plain, read_in_a_loop))()
    for found in (step(), strategy.schedule(step).result(TIMEOUT)):
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_a_gradient_through_a_loop_is_refused_for_a_large_variable_but_not_within(table, monkeypatch):
    monkeypatch.setattr(unstored_variable, "LARGEST_IN_LOOP", 4 * ROWS * WIDTH - 1)
    with pytest.raises(ValueError, match=r"of shape \[10, 2\] is read inside of the body of a loop"):
        tf.function(lambda: gradient(table, read_in_a_loop))()

    @tf.function
    def within():
        total = tf.zeros([ROWS, WIDTH])
        for _ in tf.range(2):
            total += tf.convert_to_tensor(gradient(table, looked_up_in_branch))
        return total

    expected = tf.convert_to_tensor(gradient(tf.Variable(TABLE), LOSSES["rows"]))
    np.testing.assert_allclose(within(), 2 * expected, rtol=1e-6)


def test_the_gradient_of_rows_has_the_rows_with_their_indices_in_the_whole(strategy, table):
    @tf.function
    def inner(ids):
        return squares(tf.gather(table, ids))

    @tf.function
    def step(ids):
        found = [
            gradient(table, lambda table: squares(tf.gather(table, ids))),
            gradient(table, lambda _: inner(ids)),
            gradient(table, lambda table: tf.cond(ids[0] > 0, lambda: squares(tf.gather(table, ids)), lambda: 0.0)),
        ]
        return [(each.values, each.indices, each.dense_shape) for each in found]

    for values, indices, shape in strategy.schedule(step, args=(np.array(IDS),)).result(TIMEOUT):
        assert (indices.tolist(), shape.tolist()) == (IDS, [ROWS, WIDTH])
        np.testing.assert_array_equal(values, 2 * TABLE[IDS])
    rows_alone = tf.function(lambda: gradient(table, LOSSES["rows"]).values).get_concrete_function()
    assert "ReadVariableOp" not in {operation.type for operation in rows_alone.graph.get_operations()}


def test_the_tape_watches_it_as_any_variable(sharded, table):
    with tf.GradientTape() as tape:
        tf.gather(table, IDS)
    assert [each is table for each in tape.watched_variables()] == [True]
    fixed = sharded(TABLE, parts=3, trainable=False)
    assert gradient(fixed, LOSSES["rows"]) is None
    with tf.GradientTape(watch_accessed_variables=False) as tape:
        tape.watch(fixed)
        value = squares(tf.gather(fixed, IDS)) + squares(tf.gather(table, IDS))
    watched, unwatched = tape.gradient(value, [fixed, table])
    assert unwatched is None
    np.testing.assert_array_equal(watched.values, 2 * TABLE[IDS])


def test_gradients_of_gradients_are_those_of_a_plain_variable(table):
    def second(table):
        def of_first(table):
            return squares(
                tf.convert_to_tensor(gradient(table, lambda table: tf.reduce_sum(tf.gather(table, IDS) ** 3)))
            )

        return tf.convert_to_tensor(gradient(table, of_first))

    np.testing.assert_allclose(tf.function(second)(table), second(tf.Variable(TABLE)), rtol=1e-5)
