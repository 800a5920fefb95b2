"""A function that keeps its worker busy until the test lets it go, so that a test knows what runs when."""

import tensorflow as tf

import coordinator
from coordinator.updates.state.gate import pause
from tests.deadline import wait_until


class Gate:
    """Functions that stand before a gate, each on a worker of its own.

    Args:
      strategy: where they are scheduled.
      failure: what they fail with once they have passed, if they do.
    """

    def __init__(self, strategy: coordinator.ParameterServerStrategy, failure: str | None = None) -> None:
        self._strategy = strategy
        self._failure = failure
        with strategy.scope():
            self._standing = tf.Variable(0)
            self._is_open = tf.Variable(False)
            self._worker = tf.Variable(-1, dtype=tf.int64)

    @property
    def worker(self) -> int:
        """The index of the worker that came to the gate last."""
        return int(self._worker.numpy())

    def occupy(self, workers: int = 1) -> list[coordinator.Future]:
        """Schedules as many functions, and returns their futures when all of them stand before the gate."""
        expected = int(self._standing.numpy()) + workers
        futures = [self._strategy.schedule(self._stand) for _ in range(workers)]
        wait_until(lambda: self._standing.numpy() == expected)
        return futures

    def open(self) -> None:
        """Lets all of them pass, now and later."""
        self._is_open.assign(True)

    @tf.function
    def _stand(self) -> tf.Tensor:
        # Only updates of one variable are made in order by themselves.
        with tf.control_dependencies([self._worker.assign(coordinator.get_current_worker_index())]):
            self._standing.assign_add(1)
        looks = 0
        while not self._is_open:
            # Without a pause it would keep a processor busy on this worker and another on the parameter server.
            looks += 1 + pause(tf.constant(1e-2, tf.float64))
        if self._failure is not None:
            tf.debugging.assert_equal(looks, -1, self._failure)
        return looks
