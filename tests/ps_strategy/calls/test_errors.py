"""Tests of what the caller sees when a scheduled function, or an input of it, fails."""

import concurrent.futures

import pytest
import tensorflow as tf

import coordinator

TIMEOUT = 60.0


@tf.function
def check(x):
    doubled = x * 2
    tf.debugging.assert_equal(x, 0, "must be zero")
    return doubled


@tf.function
def take_next(iterator):
    return next(iterator)


ZERO, ONE = 0, 1


def schedule_check(strategy, x):
    return strategy.schedule(check, args=(tf.constant(x),))


def test_join_raises_the_original_exception(strategy):  # rows 28 to 31, 41
    missing = tf.function(lambda: tf.io.read_file("/no/such/file"))
    for fn, args, kind, words in [
        (check, (tf.constant(1),), tf.errors.InvalidArgumentError, "must be zero"),
        (missing, (), tf.errors.NotFoundError, "/no/such/file"),
    ]:
        for verb in (strategy.join, strategy.done, lambda: schedule_check(strategy, ZERO)):
            concurrent.futures.wait([strategy.schedule(fn, args=args)], TIMEOUT)
            with pytest.raises(kind, match=words):
                verb()
            # Once; then the strategy is usable again.
            assert strategy.done()
            assert schedule_check(strategy, ZERO).result(TIMEOUT) == 0
            strategy.join(TIMEOUT)


def test_the_future_raises_the_error_at_each_call(strategy):  # row 32
    future = schedule_check(strategy, ONE)
    for _ in range(2):
        with pytest.raises(tf.errors.InvalidArgumentError, match="must be zero") as caught:
            future.result(TIMEOUT)
    # It says which function failed, where and when, and names the line in the user's code.
    [note] = caught.value.__notes__
    assert "(check) failed on /job:worker/replica:0/task:" in note
    assert "attempt 1" in note
    assert f'File "{__file__}", line {check.python_function.__code__.co_firstlineno + 3}, in check' in str(caught.value)
    with pytest.raises(tf.errors.InvalidArgumentError):
        strategy.join(TIMEOUT)
    assert isinstance(future.exception(TIMEOUT), tf.errors.InvalidArgumentError)
    assert strategy.local_results({"failed": [future], "plain": 7}) == {"failed": [None], "plain": 7}


def test_an_error_while_tracing_is_raised_at_once_and_nothing_is_scheduled(strategy):
    @tf.function
    def broken():
        raise ValueError("while tracing")

    with pytest.raises(ValueError, match="while tracing"):
        strategy.schedule(broken)
    strategy.join(timeout=0)


@pytest.fixture
def unreadable(strategy):
    """Iterators of a dataset that no worker can create."""

    def from_missing_file(_):
        return tf.data.Dataset.from_tensors(tf.io.read_file("/no/such/file"))

    return iter(strategy.experimental_distribute_datasets_from_function(from_missing_file))


def test_an_input_that_cannot_be_created_fails_the_functions_that_use_it(strategy, unreadable):  # row 33
    future = strategy.schedule(take_next, args=(unreadable,))
    with pytest.raises(coordinator.ClosureInputError, match="iterator of from_missing_file could not") as caught:
        future.result(TIMEOUT)
    assert isinstance(caught.value.__cause__, tf.errors.NotFoundError)
    with pytest.raises(coordinator.ClosureInputError, match="/no/such/file"):
        strategy.join(TIMEOUT)


def test_an_input_that_cannot_be_created_does_not_affect_other_functions(strategy, unreadable):  # row 34
    for _ in range(6):
        schedule_check(strategy, ZERO)
    strategy.join(TIMEOUT)
    del unreadable
    assert strategy.done()


def test_a_dataset_begun_on_the_client_is_a_clear_input_error(strategy):  # row 42
    begun = tf.data.Dataset.range(10)
    finished = strategy.experimental_distribute_datasets_from_function(lambda _: begun.batch(2))
    strategy.schedule(take_next, args=(iter(finished),))
    with pytest.raises(coordinator.ClosureInputError, match="made outside of it, on the client"):
        strategy.join(TIMEOUT)


def test_errors_that_tensorflow_words_badly_say_what_to_do(strategy):
    former = "/job:localhost/replica:0/task:0/device:CPU:0 unknown device."
    assert str(tf.errors.InvalidArgumentError(None, None, former)).startswith("It uses what was made before the str")
    text = "Cannot encode a Tensor that exceeds the 2GB protobuf limit."
    assert str(tf.errors.InternalError(None, None, text)).startswith("A tensor of more than 2 GB cannot be sent")
    assert str(tf.errors.InternalError(None, None, "another")) == "another"
    refused = "failed to connect to all addresses; last error: UNKNOWN: ipv4:10.0.0.1:2222: tcp handshaker shutdown"
    for task, words in (("chief", "A server cannot call this program back, which runs a part of"), ("worker", refused)):
        passed_on = f"{refused}\nAdditional GRPC error information from remote target /job:{task}/repl"
        assert str(tf.errors.UnavailableError(None, None, passed_on)).startswith(words)
