"""Tests that a program may change what it has scheduled, and of what a scheduled function may not return."""

import array

import numpy as np
import pytest
import tensorflow as tf

from coordinator.ps_strategy.calls.function_tracer import own_copy
from tests.ps_strategy.gate import Gate

COUNT = 8
TIMEOUT = 60.0


@tf.function
def total(x):
    return tf.reduce_sum(x)


def scheduled_from_a_buffer(strategy, buffer, **settings):
    """Fills a buffer anew for each of some functions, all of which run later; returns what each has summed up."""

    def fill(number):
        buffer[:] = type(buffer)([number] * 4) if isinstance(buffer, list) else number

    gate = Gate(strategy)
    gate.occupy(len(strategy.cluster.workers))
    futures = []
    for number in range(COUNT):
        fill(number)
        futures.append(strategy.schedule(total, args=(buffer,), **settings))
    fill(COUNT)
    gate.open()
    return [float(np.sum(future.result(TIMEOUT))) for future in futures]


def test_an_array_that_is_filled_again_is_copied(strategy):
    for settings in ({}, {"steps": 2}, {"fetch": False}):
        found = scheduled_from_a_buffer(strategy, np.zeros(4, np.float32), **settings)
        assert found == [4.0 * number * settings.get("steps", 1) for number in range(COUNT)], settings
    for buffer in ([0] * 4, np.zeros(2**17, np.float32)):
        assert scheduled_from_a_buffer(strategy, buffer) == [float(len(buffer) * number) for number in range(COUNT)]


class OfAnotherLibrary:
    """An array of another library, which NumPy understands."""

    def __array__(self, dtype=None, copy=None):
        return values


values = np.arange(3)


def test_whatever_holds_an_array_is_copied_and_everything_else_passed_as_it_is(strategy):
    for value in (values, np.ma.masked_array([1, 2], [True, False]), array.array("f", [1.0, 2.0]), OfAnotherLibrary()):
        copy = own_copy(value)
        assert isinstance(copy, np.ndarray), value
        np.testing.assert_array_equal(copy, np.asarray(value))
        assert not np.shares_memory(copy, np.asarray(value)), value
    assert own_copy(bytearray(b"ab")) == b"ab"
    with strategy.scope():
        variable = tf.Variable(1.0)
    constants = [1, 2.0, "text", b"bytes", None, True, np.float32(3)]
    for value in (*constants, variable, tf.constant([1.0]), tf.ragged.constant([[1], [2, 3]])):
        assert own_copy({"x": [value]})["x"][0] is value
    structure = {"x": [values]}
    assert own_copy(structure)["x"][0] is not values
    large = np.zeros(2**17, np.float32)
    with tf.device(strategy.cluster.workers[0].device):
        copy = own_copy(large)
    large[:] = 1
    assert isinstance(copy, tf.Tensor)
    assert "/job:chief" in copy.device
    assert not copy.numpy().any()


def test_a_function_that_returns_what_cannot_leave_its_worker_is_refused(strategy):
    with strategy.scope():
        variable = tf.Variable(1.0)
    for make in (
        lambda: {"all": [variable.handle]},
        lambda: iter(tf.data.Dataset.range(2)),
        lambda: tf.data.Dataset.range(2),
        lambda: tf.experimental.Optional.from_value(1),
        lambda: tf.raw_ops.EmptyTensorList(element_shape=-1, max_num_elements=5, element_dtype=tf.float32),
    ):
        for fetch in (True, False):
            with pytest.raises(TypeError, match="It cannot leave the worker"):
                strategy.schedule(tf.function(make, autograph=False), fetch=fetch)
        # A function that does the same inside is not.
        inside = tf.function(lambda made=make: (made(), 3)[1], autograph=False)
        assert strategy.schedule(inside).result(TIMEOUT) == 3
