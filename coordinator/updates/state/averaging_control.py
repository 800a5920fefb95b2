"""Which changes of local models count, and whether models are averaged now: decided on one parameter server.

client --> generation, on or off --> read by each worker before each step
worker --> number of a change that all servers have stored --> counted, with the number of workers that train
"""

import concurrent.futures
import contextlib
import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.membership.bounded_calls import UNREACHED
from coordinator.ps_strategy.membership.cluster_definition import MAX_WORKERS
from coordinator.ps_strategy.parameter_server_strategy import ParameterServerStrategy
from coordinator.ps_strategy.tensorflow_internals.server_mutex import ServerMutex, client_may_call
from coordinator.updates.state.rule_state import zeros
from coordinator.workers.worker import WorkerState

# Seconds between two checks whether an awaited worker was lost.
CHECK_INTERVAL = 0.1
# How often each worker may have averaged, as a mean, since another one became idle, until that one counts no longer.
PATIENCE = 10

# The rows of what is known of each worker: its newest connection; the generation of its model, 0 for none; 1 + the
# number of changes that were counted when it became idle, 0 while it is not; its last counted change, and the divisor.
_FENCE, _MODEL, _IDLE, _NUMBER, _DIVISOR = range(5)


class AveragingControl:
    """Variables on a parameter server that say what workers average.

    Local models have a *generation*. A worker whose model is of another generation than this one takes the shared model
    first. So all workers restart from the shared model when the client says so, and after a parameter server was lost
    and its variables were restored.

    A change counts once, whatever becomes of the worker: in one write, its number is recorded with the number of the
    workers that train then, by which it is divided. A worker trains from when it has taken a model until it is lost, or
    is idle while the others average, `PATIENCE` times as often as there are models.

    Created in the strategy's scope. It is in no checkpoint.

    Args:
      near: a variable whose server this is on.
      lock_name: of the mutex that protects it.

    Attributes:
      device: of that server.
    """

    def __init__(self, near: tf.Variable, lock_name: str) -> None:
        # 0 is that of a worker without a model.
        self._generations = itertools.count(1)
        self._is_on = True
        self._generation = 0
        self.device: str = near.device
        self._lock = ServerMutex(lock_name, self.device)
        with tf.distribute.get_strategy().extended.colocate_vars_with(near):
            self._variable = tf.Variable(self._initial_value, trainable=False, name="averaging")
            self._workers = zeros([5, MAX_WORKERS], tf.int64, "averaging_workers")
            self._counted = zeros([], tf.int64, "counted_changes")

    def read(self, others: Sequence[tf.Variable] = ()) -> Any:
        """Returns the generation, 1 if models are averaged or else 0, and other values; int64, on the worker.

        Args:
          others: int64 scalars, whose values are read in one message with these.
        """
        with tf.device(self.device):
            found = tf.concat([self._variable.read_value(), *(other.read_value()[tf.newaxis] for other in others)], 0)
        return tf.identity(found)

    def count(self, ids: Any, are_stored: Sequence[Any]) -> tuple[Any, Any, Any]:
        """Counts a worker among those that train, and its last change if all servers have stored it.

        Called in a scheduled function; all tensors are on this server. A call of an older connection or generation
        counts nothing.

        Args:
          ids: int64, at least 4: the index of the worker, the number of its connection, the generation of its model,
            and the number of its change.
          are_stored: whether each server has stored it, bool scalars; none for no change.

        Returns:
          What is counted now, int64 [2, 1 + MAX_WORKERS]: the generation, then the number of each worker's last change;
          0, then what divides each of these changes. And int64 scalars: 1 if the change was counted by this call, and 1
          if it is counted now, otherwise 0.
        """
        with tf.device(self.device):
            worker, connection, generation, number = tf.unstack(ids[:4])
            is_stored = tf.reduce_all(are_stored) if are_stored else tf.constant(False)
        with self._lock.hold([ids, is_stored]):
            fences, models, idle, numbers, divisors = tf.unstack(self._workers.read_value())
            before = self._counted.read_value()
            is_it = tf.equal(tf.range(MAX_WORKERS, dtype=tf.int64), worker)
            is_own = is_it & (connection >= fences) & tf.equal(generation, self._variable.read_value()[0])
            is_new = is_own & is_stored & (number > numbers)
            models, idle = tf.where(is_own, generation, models), tf.where(is_own, tf.zeros_like(idle), idle)
            has_model = tf.equal(models, generation)
            most = PATIENCE * tf.math.count_nonzero(has_model)
            training = tf.math.count_nonzero(has_model & (tf.equal(idle, 0) | (before - idle < most)))
            numbers, divisors = tf.where(is_new, number, numbers), tf.where(is_new, training, divisors)
            rows = [tf.where(is_own, connection, fences), models, idle, numbers, divisors]
            self._workers.assign(tf.stack(rows), read_value=False)
            news = tf.math.count_nonzero(is_new)
            self._counted.assign_add(news, read_value=False)
            first = tf.stack([generation, tf.zeros_like(generation)])[:, tf.newaxis]
            counted = tf.concat([first, tf.stack([numbers, divisors])], 1)
            return counted, news, tf.math.count_nonzero(is_own & tf.equal(numbers, number))

    def remove(self, worker: int, *, is_lost: bool) -> None:
        """Records that a worker does not train for the moment; called on the client.

        Args:
          worker: its index.
          is_lost: whether its connection is closed; later calls of this connection count nothing.
        """
        # If the server is down, what it knows is lost with it.
        with contextlib.suppress(*UNREACHED):
            self._remove(worker, is_lost)

    def switch(self, *, is_on: bool) -> None:
        """Stops or resumes averaging."""
        self._is_on = is_on
        self._write()

    def gather(self, strategy: ParameterServerStrategy, add_change: Any) -> bool:
        """Has every live worker add the last change of its model; afterwards all restart from the shared model.

        Args:
          strategy: nothing is scheduled on it now.
          add_change: a `tf.function` that has the servers add what the worker has changed, and returns whether it had a
            model.

        Returns:
          Whether any worker had a model.

        Raises:
          Exception: what `strategy.join` raises.
        """
        workers = [worker for worker in strategy.cluster.workers if worker.state is WorkerState.LIVE]
        # Twice, since the first call of a worker may have to finish what an earlier one, which was cut off, has begun.
        twice = [*workers, *workers]
        futures = {strategy.schedule(add_change, worker=worker.index): worker for worker in twice}
        while concurrent.futures.wait(futures, timeout=CHECK_INTERVAL).not_done:
            for future, worker in futures.items():
                if worker.state is not WorkerState.LIVE:
                    # Its model is lost, also if it returns.
                    future.cancel()
        strategy.join()
        self._generation = next(self._generations)
        self._write()
        return any(strategy.local_results(list(futures)))

    @client_may_call(tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.bool))
    def _remove(self, worker: Any, is_lost: Any) -> None:
        with self._lock.hold([worker, is_lost]):
            # A later connection has a greater number.
            lost = tf.cast(is_lost, tf.int64)
            fence, model, *_ = tf.unstack(tf.gather(self._workers.read_value(), worker, axis=1))
            row = [fence + lost, model * (1 - lost), self._counted.read_value() + 1]
            self._workers.scatter_nd_update([[_FENCE, worker], [_MODEL, worker], [_IDLE, worker]], row)

    def _initial_value(self) -> Any:
        """Returns the value on a new or restored server."""
        self._generation = next(self._generations)
        return self._value()

    def _write(self) -> None:
        self._variable.assign(self._value(), read_value=False)

    def _value(self) -> Any:
        return tf.constant([self._generation, int(self._is_on)], tf.int64)
