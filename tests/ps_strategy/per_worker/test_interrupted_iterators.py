"""Tests of iterators whose call is cancelled while it waits for an element: TensorFlow cancels them permanently."""

import functools
import logging

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
    """Data of which one element is returned only once a door is open, which is a file that the worker polls for.

    Args:
      strategy: on whose workers it is.
      folder: for the file, and another one that is written when a call waits for the door.
    """

    def __init__(self, strategy, folder):
        self._strategy = strategy
        self._door = folder / "open"
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
        """Waits until a call waits for the element behind the door."""
        wait_until(self._awaited.exists)

    def open(self):
        """Opens the door permanently."""
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


@pytest.mark.parametrize(
    ("endless", "prefetched"),
    [
        pytest.param(True, True, id="prefetched"),
        pytest.param(False, False, id="finite"),
    ],
)
def test_an_iterator_known_to_be_interrupted_is_created_again(strategy, source, caplog, endless, prefetched):  # row 36
    iterator = interrupted(strategy, source, endless=endless, prefetched=prefetched)
    with caplog.at_level(logging.WARNING):
        assert [took(strategy, iterator) for _ in range(4)] == [0, 1, 2, 3]
    assert [record.getMessage() for record in caplog.records if "starts from the beginning" in record.getMessage()] == [
        f"{iterator.name} on /job:worker/replica:0/task:{WORKER}/device:CPU:0 starts from the beginning: a call that "
        "waited for an element was cancelled."
    ]


def test_an_iterator_that_may_have_ended_early_is_kept_and_logged(strategy, source, caplog):
    iterator = interrupted(strategy, source, endless=False, prefetched=True)
    for _ in range(2):
        with pytest.raises(tf.errors.OutOfRangeError):
            took(strategy, iterator)
    warnings = [record.getMessage() for record in caplog.records if "ended it too early" in record.getMessage()]
    assert len(warnings) == 1
    assert warnings[0].startswith(f"{iterator.name} on /job:worker")


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
