"""Which local models count, and whether they are averaged now: what the client decides, and workers look up."""

import concurrent.futures
import itertools
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.parameter_server_strategy import ParameterServerStrategy
from coordinator.workers.worker import WorkerState

# How often it is looked whether a worker that is waited for was lost, in seconds.
LOOK_INTERVAL = 0.1


class Averaging:
    """A word from the client to all workers, on a parameter server; they read it before each step.

    Local models have a *generation*. A worker whose own is of another one than this says takes the shared model first;
    so all begin anew when the client says so, and after a parameter server was lost, when everything that is there was
    restored. It is in no checkpoint.

    To be made in the strategy's scope.

    Args:
      near: a variable; this is on the same server.
    """

    def __init__(self, near: tf.Variable) -> None:
        # 0 is that of a worker that has no model.
        self._generations = itertools.count(1)
        self._is_on = True
        self._generation = 0
        with tf.distribute.get_strategy().extended.colocate_vars_with(near):
            self._word = tf.Variable(self._new_word, trainable=False, name="averaging")

    def read(self) -> tuple[Any, Any]:
        """The generation, an int64 scalar, and whether models are averaged, a bool scalar; in a scheduled function."""
        with tf.device(self._word.device):
            word = self._word.read_value()
        generation, is_on = tf.unstack(word)
        return generation, is_on > 0

    def stop(self) -> None:
        """From now on, nobody averages."""
        self._is_on = False
        self._write()

    def go_on(self) -> None:
        """From now on, models are averaged."""
        self._is_on = True
        self._write()

    def gather(self, strategy: ParameterServerStrategy, bring: Any) -> bool:
        """Has every worker that is there bring its model; afterwards all begin anew.

        Args:
          strategy: of which nothing is scheduled now.
          bring: a `tf.function` that takes an int64 scalar, brings the worker's model as one of that generation, and
            returns whether there was one.

        Returns:
          Whether a worker has brought one.

        Raises:
          Exception: what `strategy.join` raises.
        """
        generation = tf.constant(next(self._generations), tf.int64)
        try:
            workers = [worker for worker in strategy.cluster.workers if worker.state is WorkerState.LIVE]
            futures = {strategy.schedule(bring, (generation,), worker=worker.index): worker for worker in workers}
            while concurrent.futures.wait(futures, timeout=LOOK_INTERVAL).not_done:
                for future, worker in futures.items():
                    if worker.state is not WorkerState.LIVE:
                        # What it had is lost, and will not be there when it returns.
                        future.cancel()
            strategy.join()
            return any(strategy.local_results(list(futures)))
        finally:
            # Also if not all of them could: what they have brought is of a generation that nobody else is of.
            self._generation = next(self._generations)
            self._write()

    def _new_word(self) -> Any:
        """What is there when the server is new, or was restored."""
        self._generation = next(self._generations)
        return self._value()

    def _write(self) -> None:
        self._word.assign(self._value(), read_value=False)

    def _value(self) -> Any:
        return tf.constant([self._generation, int(self._is_on)], tf.int64)

    def __repr__(self) -> str:
        return f"<Averaging: {'on' if self._is_on else 'off'}, generation {self._generation}>"
