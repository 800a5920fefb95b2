"""Tests that a function takes its elements of datasets before it changes anything, however it is written.

The datasets end only when a test lets them; what a function could do without the element is done by then.
"""

import concurrent.futures
import threading

import keras
import pytest
import tensorflow as tf

from coordinator.ps_strategy.tensorflow_internals.datasets import data_before_effects
from tests.deadline import LIMIT


@pytest.fixture(autouse=True)
def in_order():
    BUSY.clear()
    with data_before_effects():
        yield


class Data:
    """A dataset of some elements, which ends when it is told."""

    def __init__(self, size=0):
        self._asked, self._may_end = threading.Event(), threading.Event()
        self._size = size
        self.iterator = iter(
            tf.data.Dataset.from_generator(self._elements, output_signature=tf.TensorSpec([], tf.int64))
        )

    def _elements(self):
        yield from range(self._size)
        self._asked.set()
        assert self._may_end.wait(LIMIT)

    def end_during(self, call):
        """Calls a function that takes elements until there are none; returns once it has failed."""
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            running = thread.submit(call)
            assert self._asked.wait(LIMIT)
            assert BUSY.wait(LIMIT)
            self._may_end.set()
            with pytest.raises(tf.errors.OutOfRangeError):
                running.result(LIMIT)


BUSY = threading.Event()


def busy():
    """Adds an operation without effects, which shows that the function runs what needs no element."""
    return tf.numpy_function(lambda: [BUSY.set(), 0][1], [], tf.int64, stateful=False)


def in_loops(change, take):
    tf.while_loop(lambda n: n < 1, lambda n: (take(), n + 1)[1], [0])
    tf.while_loop(lambda n: n < 1, lambda n: (change(), n + 1)[1], [0])


def in_branches(change, take):
    now = tf.timestamp() > 0.0
    tf.cond(now, take, lambda: tf.constant(0, tf.int64))
    tf.cond(now, lambda: (change(), 0)[1], lambda: 0)


FORMS = {
    "directly": lambda change, take: (take(), change()),
    "in called functions": lambda change, take: (tf.function(take)(), tf.function(change)()),
    "in a function that gets the element": lambda change, take: tf.function(lambda _: change())(take()),
    "in branches": in_branches,
    "in loops": in_loops,
}


@pytest.mark.parametrize("form", FORMS)
def test_what_does_not_need_an_element_is_not_done_if_there_is_none(form):
    data, count = Data(), tf.Variable(0)

    @tf.function(autograph=False)
    def step(iterator):
        FORMS[form](lambda: count.assign_add(1), lambda: next(iterator))
        return busy()

    data.end_during(lambda: step(data.iterator))
    assert count.numpy() == 0


def test_what_follows_two_elements_waits_for_both():
    first, second, count, optimizer = Data(1), Data(), tf.Variable(0), keras.optimizers.Adam()
    weight = keras.Variable(1.0)
    optimizer.build([weight])

    @tf.function
    def step(one, other):
        element = next(one)
        next(other)
        # They need the element that there is.
        count.assign_add(tf.cast(element, tf.int32) + 1)
        optimizer.apply([tf.cast(element, tf.float32)], [weight])
        return busy()

    second.end_during(lambda: step(first.iterator, second.iterator))
    assert (count.numpy(), int(optimizer.iterations)) == (0, 0)
