"""Tests of the classification of errors: of the function, of its worker, of a parameter server or of its input."""

import tensorflow as tf

from coordinator.errors import ClosureCancelledError, ClosureInputError, ParameterServerLost
from coordinator.ps_strategy.calls.tensorflow_runtime import TensorFlowRuntime, failure_of
from coordinator.ps_strategy.per_worker.dataset import EndOfDataError
from coordinator.runtime import FailureKind, FiniteInput
from tests.deadline import wait_until
from tests.ps_strategy.every_worker import unhealthy
from tests.ps_strategy.gate import Gate

TIMEOUT = 60.0

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
    (NOT_FOUND, True, False, FailureKind.PARAMETER_SERVER_LOST),
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
        (tf.errors.AbortedError, "", FailureKind.TRANSIENT),
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
        (tf.errors.InvalidArgumentError, TRANSPORT, FailureKind.USER),
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
