"""A function that keeps its worker busy until the test releases it, so that a test controls what runs when."""

import tensorflow as tf

import coordinator
from coordinator.updates.rule_state import pause
from tests.deadline import wait_until


class Gate:
    """Functions that wait at a gate, each on another worker.

    Args:
      strategy: where they are scheduled.
      failure: the message of the error that they raise when the gate opens; None for no error.
    """

    def __init__(self, strategy: coordinator.ParameterServerStrategy, failure: str | None = None) -> None:
        self._strategy = strategy
        self._failure = failure
        with strategy.scope():
            self._arrived = tf.Variable(0)
            self._is_open = tf.Variable(False)
            self._worker = tf.Variable(-1, dtype=tf.int64)

    @property
    def worker(self) -> int:
        """The index of the worker that arrived at the gate last."""
        return int(self._worker.numpy())

    def occupy(self, workers: int = 1) -> list[coordinator.Future]:
        """Schedules this number of functions, and returns their futures when all of them wait at the gate."""
        expected = int(self._arrived.numpy()) + workers
        gate = self._arrived, self._is_open, self._worker, self._failure
        # Traced once for all gates of a strategy.
        function = vars(self._strategy).setdefault("gate", tf.function(_wait_at_gate))
        futures = [self._strategy.schedule(function, gate) for _ in range(workers)]
        wait_until(lambda: self._arrived.numpy() == expected)
        return futures

    def open(self) -> None:
        """Lets all functions pass, now and later."""
        self._is_open.assign(True)


def _wait_at_gate(arrived: tf.Variable, is_open: tf.Variable, worker: tf.Variable, failure: str | None) -> tf.Tensor:
    # Only updates of the same variable are ordered automatically.
    with tf.control_dependencies([worker.assign(coordinator.get_current_worker_index())]):
        arrived.assign_add(1)
    iterations = 0
    while not is_open:
        # Without a pause it would keep a processor busy on this worker and another on the parameter server.
        iterations += 1 + pause(tf.constant(1e-2, tf.float64))
    if failure is not None:
        tf.debugging.assert_equal(iterations, -1, failure)
    return iterations
