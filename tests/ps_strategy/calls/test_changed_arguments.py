"""Tests that a program may change what it has scheduled, and of what a scheduled function may not return."""

import array

import numpy as np
import pytest
import tensorflow as tf

from coordinator.ps_strategy.calls.function_tracer import own_copy
from tests.ps_strategy.gate import Gate

COUNT = 20
TIMEOUT = 60.0


@tf.function
def total(x):
    return tf.reduce_sum(x)


def scheduled_from_a_buffer(strategy, buffer, fill, *, wrapped=lambda buffer: (buffer,), **settings):
    """Fills a buffer anew for each of some functions, all of which run later; returns what each has summed up."""
    gate = Gate(strategy)
    gate.occupy(len(strategy.cluster.workers))
    futures = []
    for number in range(COUNT):
        fill(buffer, number)
        futures.append(strategy.schedule(total, args=wrapped(buffer), **settings))
    fill(buffer, COUNT)
    gate.open()
    return [float(np.sum(future.result(TIMEOUT))) for future in futures]


def fill(buffer, number):
    buffer[:] = type(buffer)([number] * 4) if isinstance(buffer, list) else number


@pytest.mark.parametrize(
    "settings", [{}, {"steps": 2}, {"worker": 1}, {"fetch": False}], ids=["", "steps", "worker", "left there"]
)
def test_an_array_that_is_filled_again_is_copied(strategy, settings):
    found = scheduled_from_a_buffer(strategy, np.zeros(4, np.float32), fill, **settings)
    assert found == [4.0 * number * settings.get("steps", 1) for number in range(COUNT)]


def test_a_large_array_is_copied_once_into_a_tensor(strategy):
    buffer = np.zeros(2**17, np.float32)
    with tf.device(strategy.cluster.workers[0].device):
        copy = own_copy({"x": [buffer]})["x"][0]
    assert isinstance(copy, tf.Tensor)
    assert "/job:chief" in copy.device
    buffer[:] = 1
    assert not copy.numpy().any()
    found = scheduled_from_a_buffer(strategy, buffer, fill)
    assert found == [2.0**17 * number for number in range(COUNT)]


@pytest.mark.parametrize("buffer", [[0] * 4, np.zeros([4]).view(np.recarray)], ids=["a list", "of a subclass"])
def test_a_list_and_an_array_of_a_subclass_are_copied_too(strategy, buffer):
    assert scheduled_from_a_buffer(strategy, buffer, fill) == [4.0 * number for number in range(COUNT)]


def test_arrays_inside_of_structures_and_keyword_arguments_are_copied(strategy):
    @tf.function
    def added(given, *, more):
        return tf.reduce_sum(given["x"][0]) + tf.reduce_sum(more)

    x, more = np.zeros(2), np.zeros(3)
    structure = {"x": [x]}
    gate = Gate(strategy)
    gate.occupy(len(strategy.cluster.workers))
    futures = []
    for number in range(COUNT):
        x[:] = more[:] = number
        futures.append(strategy.schedule(added, (structure,), {"more": more}))
    structure["x"] = None
    gate.open()
    assert [float(future.result(TIMEOUT)) for future in futures] == [5.0 * number for number in range(COUNT)]


def test_the_argument_of_map_may_be_one_buffer(strategy):
    buffer = np.zeros(4)

    def filled():
        for number in range(COUNT):
            buffer[:] = number
            yield (buffer,)

    futures = strategy.map(total, filled())
    assert [float(future.result(TIMEOUT)) for future in futures] == [4.0 * number for number in range(COUNT)]


class OfAnotherLibrary:
    """An array of another library, which NumPy understands."""

    def __init__(self, values):
        self.values = values

    def __array__(self, dtype=None, copy=None):
        return np.asarray(self.values, dtype)


@pytest.mark.parametrize(
    "value",
    [
        np.arange(3),
        np.ma.masked_array([1, 2], [True, False]),
        np.array(["a", "b"], object),
        array.array("f", [1.0, 2.0]),
        memoryview(np.arange(3)),
        OfAnotherLibrary(np.arange(3)),
    ],
    ids=lambda value: type(value).__name__,
)
def test_whatever_holds_an_array_is_copied(value):
    copy = own_copy(value)
    assert isinstance(copy, np.ndarray)
    np.testing.assert_array_equal(copy, np.asarray(value))
    assert not np.shares_memory(copy, np.asarray(value))


@pytest.mark.parametrize("value", [1, 2.0, "text", b"bytes", None, True, np.float32(3)], ids=repr)
def test_what_cannot_change_is_passed_as_it_is(value):
    assert own_copy(value) is value


def test_tensors_and_variables_are_passed_as_themselves(strategy):
    with strategy.scope():
        variable = tf.Variable(1.0)
    tensor = tf.constant([1.0])
    ragged = tf.ragged.constant([[1], [2, 3]])
    copies = own_copy({"variable": variable, "more": [tensor, ragged]})
    assert copies["variable"] is variable
    assert copies["more"][0] is tensor
    assert copies["more"][1] is ragged
    assert own_copy(bytearray(b"ab")) == b"ab"


def of_a_variable(variable):
    return {"all": [variable.handle]}


def of_an_iterator(_):
    return iter(tf.data.Dataset.range(2))


def a_dataset(_):
    return tf.data.Dataset.range(2)


def an_optional(_):
    return tf.experimental.Optional.from_value(1)


def a_list_of_tensors(_):
    return tf.raw_ops.EmptyTensorList(element_shape=-1, max_num_elements=5, element_dtype=tf.float32)


@pytest.mark.parametrize("fetch", [True, False])
@pytest.mark.parametrize("make", [of_a_variable, of_an_iterator, a_dataset, an_optional, a_list_of_tensors])
def test_a_function_that_returns_what_cannot_leave_its_worker_is_refused(strategy, make, fetch):
    with strategy.scope():
        variable = tf.Variable(1.0)
    with pytest.raises(TypeError, match="It cannot leave the worker"):
        strategy.schedule(tf.function(lambda: make(variable), autograph=False), fetch=fetch)
    # A function that does the same inside is not.
    assert strategy.schedule(tf.function(lambda: (make(variable), 3)[1], autograph=False)).result(TIMEOUT) == 3
