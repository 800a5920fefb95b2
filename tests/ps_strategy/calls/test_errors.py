"""Tests of what the caller sees when a function or an input of it fails, and of the kinds of failures."""

import concurrent.futures

import pytest
import tensorflow as tf

import coordinator
from coordinator.errors import ClosureCancelledError, ClosureInputError, ParameterServerLost
from coordinator.ps_strategy.calls.tensorflow_runtime import TensorFlowRuntime, failure_of
from coordinator.ps_strategy.per_worker.dataset import EndOfDataError
from coordinator.runtime import FailureKind, FiniteInput
from tests.deadline import wait_until
from tests.ps_strategy.every_worker import unhealthy
from tests.ps_strategy.gate import Gate

TIMEOUT = 60.0


@tf.function
def check(x):
    doubled = x * 2
    tf.debugging.assert_equal(x, 0, "must be zero")
    return doubled


@tf.function
def take_next(iterator):
    return next(iterator)


def schedule_check(strategy, x):
    return strategy.schedule(check, args=(tf.constant(x),))


def test_join_raises_the_original_exception(strategy):  # rows 28 to 31, 41
    missing = tf.function(lambda: tf.io.read_file("/no/such/file"))
    for fn, args, kind, words in [
        (check, (tf.constant(1),), tf.errors.InvalidArgumentError, "must be zero"),
        (missing, (), tf.errors.NotFoundError, "/no/such/file"),
    ]:
        for verb in (strategy.join, strategy.done, lambda: schedule_check(strategy, 0)):
            concurrent.futures.wait([strategy.schedule(fn, args=args)], TIMEOUT)
            with pytest.raises(kind, match=words):
                verb()
            # Once; then the strategy is usable again.
            assert strategy.done()
            assert schedule_check(strategy, 0).result(TIMEOUT) == 0
            strategy.join(TIMEOUT)


def test_the_future_raises_the_error_at_each_call(strategy):  # row 32
    future = schedule_check(strategy, 1)
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
        schedule_check(strategy, 0)
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


UNAVAILABLE = tf.errors.UnavailableError(None, None, "Socket closed")
ABORTED = tf.errors.AbortedError(None, None, "context")
INVALID = tf.errors.InvalidArgumentError(None, None, "shapes")
NOT_FOUND = tf.errors.NotFoundError(None, None, "file")
END_OF_DATA = EndOfDataError("iterator of data", FiniteInput(KeyError))


def input_error(cause):
    error = ClosureInputError("iterator")
    error.__cause__ = cause
    return error


TABLE = [
    # error, is a parameter server lost, is the worker lost, kind
    (UNAVAILABLE, False, True, FailureKind.WORKER_LOST),
    (INVALID, False, True, FailureKind.WORKER_LOST),
    (input_error(UNAVAILABLE), False, True, FailureKind.WORKER_LOST),
    (UNAVAILABLE, True, False, FailureKind.PARAMETER_SERVER_LOST),
    (UNAVAILABLE, True, True, FailureKind.PARAMETER_SERVER_LOST),
    (input_error(ABORTED), True, False, FailureKind.PARAMETER_SERVER_LOST),
    (input_error(UNAVAILABLE), False, False, FailureKind.TRANSIENT),
    (input_error(NOT_FOUND), False, False, FailureKind.INPUT),
    (input_error(TypeError("arguments")), False, True, FailureKind.INPUT),
    (input_error(None), True, True, FailureKind.INPUT),
    (END_OF_DATA, False, False, FailureKind.END_OF_DATA),
    (END_OF_DATA, False, True, FailureKind.WORKER_LOST),
    (INVALID, False, False, FailureKind.USER),
    (TypeError("arguments"), True, True, FailureKind.USER),
    (ClosureCancelledError("withdrawn"), True, True, FailureKind.CANCELLED),
]
TRANSPORT = "RecvFromRemoteAsync is cancelled."
PASSED_ON = (
    "\nAdditional GRPC error information from remote target /job:chief/replica:0/task:0 while calling "
    "/tensorflow.WorkerService/RecvTensor:\n:UNKNOWN:Error received from peer"
)
OF_PYTHON = "ConnectionResetError: Connection reset by peer\nTraceback (most recent call last):"
# While all servers answer: an error is transient if a connection broke.
TABLE += [
    (kind(None, None, text), False, False, expected)
    for kind, text, expected in [
        (tf.errors.UnavailableError, "", FailureKind.TRANSIENT),
        (tf.errors.CancelledError, TRANSPORT, FailureKind.TRANSIENT),
        (tf.errors.DeadlineExceededError, "", FailureKind.TRANSIENT),
        (tf.errors.UnknownError, TRANSPORT, FailureKind.TRANSIENT),
        (tf.errors.UnknownError, "ValueError: of a generator", FailureKind.USER),
        (tf.errors.UnknownError, f"RuntimeError: of the user{PASSED_ON}", FailureKind.USER),
        (tf.errors.UnknownError, f"{OF_PYTHON}{PASSED_ON}", FailureKind.USER),
        (tf.errors.InternalError, f"Stream removed{PASSED_ON}", FailureKind.TRANSIENT),
        (tf.errors.InternalError, f"Cannot encode a Tensor{PASSED_ON}", FailureKind.USER),
        (tf.errors.InternalError, "Blas GEMM launch failed", FailureKind.USER),
        (tf.errors.DataLossError, TRANSPORT, FailureKind.USER),
    ]
]


def test_every_error_is_classified_as_one_kind_of_failure():  # row 78
    for error, is_server_lost, is_worker_lost, kind in TABLE:
        lost = ParameterServerLost("/job:ps/task:0", "gone") if is_server_lost else None
        failure = failure_of(error, lost, is_worker_lost)
        assert failure.kind is kind, (error, is_server_lost, is_worker_lost)
        assert failure.error is (lost if kind is FailureKind.PARAMETER_SERVER_LOST else error)


def test_a_call_whose_worker_was_killed_is_a_worker_failure_and_is_repeated(
    strategy, shared_cluster, monkeypatch, caplog
):  # row 78
    classify, classified = TensorFlowRuntime.classify, []

    def record(runtime, worker, error):
        failure = classify(runtime, worker, error)
        classified.append((worker, error, failure.kind))
        return failure

    monkeypatch.setattr(TensorFlowRuntime, "classify", record)
    gate = Gate(strategy)
    [future] = gate.occupy()
    victim = gate.worker
    shared_cluster.kill("worker", victim)
    try:
        wait_until(lambda: gate.worker != victim and classified)
        assert not strategy.cluster.workers[victim].healthy()
        # The loss is described after the call was requeued, by what the server does then.
        wait_until(lambda: f"task:{victim} was lost;" in caplog.text)
        gate.open()
        assert future.result(TIMEOUT) is not None
        strategy.join(TIMEOUT)
    finally:
        gate.open()
        shared_cluster.restart("worker", victim)
        wait_until(lambda: not unhealthy(strategy))
    worker, error, kind = classified[0]
    assert (worker, kind) == (victim, FailureKind.WORKER_LOST)
    assert f"/job:worker/replica:0/task:{victim}" in error.message
    assert f"({shared_cluster.spec['worker'][victim]} does not answer" in caplog.text
    assert error.message not in caplog.text, "TensorFlow's text is logged at DEBUG"
