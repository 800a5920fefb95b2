"""Which local models count, and whether they are averaged now: decided by the client, read by the workers."""

import concurrent.futures
import itertools
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.parameter_server_strategy import ParameterServerStrategy
from coordinator.workers.worker import WorkerState

# Seconds between two checks whether an awaited worker was lost.
CHECK_INTERVAL = 0.1


class AveragingControl:
    """A variable on a parameter server that the client writes and workers read before each step.

    Local models have a *generation*. A worker whose model is of another generation than this one takes the shared model
    first. So all workers restart from the shared model when the client says so, and after a parameter server was lost
    and its variables were restored. It is in no checkpoint.

    Created in the strategy's scope.

    Args:
      near: a variable whose server this is on.
    """

    def __init__(self, near: tf.Variable) -> None:
        # 0 is that of a worker without a model.
        self._generations = itertools.count(1)
        self._is_on = True
        self._generation = 0
        with tf.distribute.get_strategy().extended.colocate_vars_with(near):
            self._variable = tf.Variable(self._initial_value, trainable=False, name="averaging")

    def read(self) -> tuple[Any, Any]:
        """Returns the generation, an int64 scalar, and whether models are averaged, a bool scalar; for workers."""
        with tf.device(self._variable.device):
            value = self._variable.read_value()
        generation, is_on = tf.unstack(value)
        return generation, is_on > 0

    def switch(self, *, is_on: bool) -> None:
        """Stops or resumes averaging."""
        self._is_on = is_on
        self._write()

    def gather(self, strategy: ParameterServerStrategy, add_model: Any) -> bool:
        """Has every live worker add its model to the mean; afterwards all restart from the shared model.

        Args:
          strategy: nothing is scheduled on it now.
          add_model: a `tf.function` that takes an int64 scalar, adds the worker's model as one of that generation, and
            returns whether there was one.

        Returns:
          Whether any worker had a model.

        Raises:
          Exception: what `strategy.join` raises.
        """
        generation = tf.constant(next(self._generations), tf.int64)
        try:
            workers = [worker for worker in strategy.cluster.workers if worker.state is WorkerState.LIVE]
            futures = {strategy.schedule(add_model, (generation,), worker=worker.index): worker for worker in workers}
            while concurrent.futures.wait(futures, timeout=CHECK_INTERVAL).not_done:
                for future, worker in futures.items():
                    if worker.state is not WorkerState.LIVE:
                        # Its model is lost, also if it returns.
                        future.cancel()
            strategy.join()
            return any(strategy.local_results(list(futures)))
        finally:
            # Also after a failure: the models that were added are of a generation that no worker has.
            self._generation = next(self._generations)
            self._write()

    def _initial_value(self) -> Any:
        """Returns the value on a new or restored server."""
        self._generation = next(self._generations)
        return self._value()

    def _write(self) -> None:
        self._variable.assign(self._value(), read_value=False)

    def _value(self) -> Any:
        return tf.constant([self._generation, int(self._is_on)], tf.int64)
