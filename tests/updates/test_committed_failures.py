"""Tests of ranges that count once although their functions fail, take too long, or lose their worker after the push."""

import contextlib
import itertools

import numpy as np
import pytest
import tensorflow as tf

from coordinator.data import Epochs, arrays
from coordinator.ps_strategy.fusing.repeated_function import may_be_fused
from coordinator.updates import Asynchronous
from coordinator.updates.rule_state import pause
from tests.deadline import wait_until
from tests.ps_strategy.every_worker import concrete_function

pytestmark = pytest.mark.long

SIZE = 400
JOIN_TIMEOUT = 240


class Counting:
    """Steps that count each example of their range on two servers, with something that happens after the push.

    Args:
      strategy: of the shared cluster.
      then: called with the number of the range and a function that is true once, builds what happens.
    """

    def __init__(self, strategy, then):
        self.epochs = Epochs(arrays(np.arange(SIZE)), 2)
        with strategy.scope():
            self._counts = [tf.Variable(lambda: tf.zeros([SIZE])) for _ in range(2)]
            self.rule = Asynchronous(self._add, self._counts, learning_rate=1.0, once=self.epochs)
            happened = tf.Variable(lambda: tf.zeros([], tf.int64), trainable=False)

        @tf.function
        def step(positions):
            ids = positions[1] + tf.range(positions[2])
            with self.rule.pull() as version:
                gradient = tf.IndexedSlices(tf.ones_like(ids, tf.float32), ids)
            with tf.control_dependencies([self.rule.push([gradient, gradient], version, positions=positions)]):
                then(positions[3], lambda: happened.assign_add(1) == 1)

        self.step = step

    @staticmethod
    def _add(variable, gradient, _):
        variable.scatter_nd_add(gradient.indices[:, None], gradient.values)

    def is_exact(self):
        """Returns whether the model has seen each example once."""
        return all((count.numpy() == 1).all() for count in self._counts)


def test_a_range_whose_function_fails_after_its_push_counts_once(strategy):
    def fail_at_first(number, is_first):
        if number == 30 and is_first():
            tf.debugging.assert_equal(number, tf.constant(0, tf.int64), "after the push")

    counting = Counting(strategy, fail_at_first)
    errors = 0
    while not counting.epochs.done:
        with contextlib.suppress(tf.errors.InvalidArgumentError):
            errors += 1
            for positions in counting.epochs.on(strategy):
                strategy.schedule(counting.step, (positions,))
            errors -= 1
    assert errors == 1
    assert counting.is_exact()
    assert counting.rule.statistics().rejected >= 1


def test_a_range_that_is_run_on_two_workers_counts_once(strategy):
    def wait_at_first(number, is_first):
        if number == 30 and is_first():
            with tf.control_dependencies([pause(tf.constant(8.0, tf.float64))]):
                tf.no_op()

    counting = Counting(strategy, wait_at_first)
    for positions in counting.epochs.on(strategy):
        timeout = 1.0 if positions[3] == 30 else None
        strategy.schedule(counting.step, (positions,), timeout=timeout)
    strategy.join(JOIN_TIMEOUT)
    assert counting.is_exact()
    assert counting.rule.statistics().rejected >= 1


def test_ranges_in_fused_calls_of_a_killed_worker_count_once(strategy, shared_cluster):
    counting = Counting(strategy, lambda *_: None)
    finished = []
    ranges = counting.epochs.on(strategy)
    for positions in itertools.islice(ranges, 150):
        if not finished:
            assert may_be_fused(concrete_function(strategy, counting.step, positions))
        strategy.schedule(counting.step, (positions,)).add_done_callback(finished.append)
    wait_until(lambda: len(finished) > 10)
    shared_cluster.kill("worker", 1)
    shared_cluster.restart("worker", 1)
    for positions in ranges:
        strategy.schedule(counting.step, (positions,))
    strategy.join(JOIN_TIMEOUT)
    assert counting.is_exact()
    assert int(counting.rule.version) == SIZE // 2
