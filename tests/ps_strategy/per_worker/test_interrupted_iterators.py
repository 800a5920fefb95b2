"""Tests of iterators whose call is cancelled while it waits for an element: TensorFlow cancels them permanently."""

import functools

import pytest
import tensorflow as tf

import coordinator
from tests.deadline import wait_until

WORKER = 1
TIMEOUT = 60.0


@tf.function
def take(iterator):
    return next(iterator)


class Source:
    """Data of which one element is returned only once a door is open, which is a file that the worker polls for."""

    def __init__(self, strategy, folder):
        self._strategy = strategy
        self._door = folder / "open"
        # Written when a call waits for the door.
        self._awaited = folder / "awaited"

    def iterator(self, *, endless=True, prefetched=False):
        """Returns an iterator over 0 to 5; a call waits at the door for 0 if elements are prefetched, else for 2."""
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False
        passed = functools.partial(self._pass, 0 if prefetched else 2)

        def make(_):
            dataset = tf.data.Dataset.range(6)
            dataset = (dataset.repeat() if endless else dataset).map(passed)
            return (dataset.prefetch(1) if prefetched else dataset).with_options(options)

        return iter(self._strategy.experimental_distribute_datasets_from_function(make))

    def wait_awaited(self):
        wait_until(self._awaited.exists)

    def open(self):
        self._door.touch()

    def _pass(self, kept, number):
        if number == kept:
            tf.io.write_file(str(self._awaited), "")
            polls = tf.constant(0, tf.int64)
            # An expression that does not depend on the loop would be evaluated only once.
            while tf.size(tf.io.matching_files(self._door_or(polls))) == 0:
                polls += 1
            number += tf.minimum(polls, 0)
        return number

    def _door_or(self, number):
        return tf.strings.join([str(self._door), tf.strings.substr(tf.strings.as_string(number), 0, 0)])


def took(strategy, iterator):
    return int(strategy.schedule(take, (iterator,), worker=WORKER).result(TIMEOUT))


def wait_free(strategy):
    """Waits until the cancelled call has ended."""
    strategy.schedule(tf.function(lambda: tf.constant(0)), worker=WORKER).result(TIMEOUT)


@pytest.fixture
def source(strategy, tmp_path):
    return Source(strategy, tmp_path)


def interrupted(strategy, source, **options):
    """Returns an iterator of which a call waited for an element when it was cancelled."""
    iterator = source.iterator(**options)
    if not options.get("prefetched"):
        assert [took(strategy, iterator) for _ in range(2)] == [0, 1]
    future = strategy.schedule(take, (iterator,), worker=WORKER)
    source.wait_awaited()
    assert future.cancel()
    wait_free(strategy)
    source.open()
    return iterator


@pytest.mark.parametrize(("endless", "prefetched"), [(True, True), (False, False)])
def test_an_iterator_known_to_be_interrupted_is_created_again(strategy, source, caplog, endless, prefetched):  # row 36
    iterator = interrupted(strategy, source, endless=endless, prefetched=prefetched)
    assert [took(strategy, iterator) for _ in range(4)] == [0, 1, 2, 3]
    [warning] = [message for message in caplog.messages if "starts from the beginning" in message]
    assert warning.startswith(f"{iterator.name} on /job:worker/replica:0/task:{WORKER}/")


def test_an_iterator_that_may_have_ended_early_is_kept_and_logged(strategy, source, caplog):
    iterator = interrupted(strategy, source, endless=False, prefetched=True)
    for _ in range(2):
        with pytest.raises(tf.errors.OutOfRangeError):
            took(strategy, iterator)
    [warning] = [message for message in caplog.messages if "ended it too early" in message]
    assert warning.startswith(f"{iterator.name} on /job:worker")


def test_an_iterator_works_again_after_the_error_of_another_function(strategy, source):  # rows 35, 36
    iterator = source.iterator()
    assert [took(strategy, iterator) for _ in range(2)] == [0, 1]
    waiting = strategy.schedule(take, (iterator,), worker=WORKER)
    source.wait_awaited()

    @tf.function
    def fail(number):
        tf.debugging.assert_equal(number, 1, "an error elsewhere")

    strategy.schedule(fail, (tf.constant(0),), worker=0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="an error elsewhere"):
        strategy.join(TIMEOUT)
    with pytest.raises(coordinator.ClosureCancelledError):
        waiting.result(timeout=0)
    wait_free(strategy)
    source.open()
    assert [took(strategy, iterator) for _ in range(4)] == [0, 1, 2, 3]
