"""The gate at which a worker waits until its rule lets it begin a step."""

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.membership.bounded_calls import UNREACHED
from coordinator.ps_strategy.parameter_server_strategy import ParameterServerStrategy
from coordinator.ps_strategy.tensorflow_internals.server_mutex import client_may_call
from coordinator.updates import decisions
from coordinator.updates.state.rule_state import NO_CLOCK, NO_STEP, RuleState

# Seconds that a waiting worker pauses before it asks again, times the number of waiting workers. So the home server is
# asked a thousand times a second, however many workers wait.
PAUSE = 1e-3


class Gate:
    """Lets workers begin a step one by one, each as soon as a decision allows it.

    A worker that may not begin asks again after a pause, on its own machine. So it needs no wake-up call, which could
    be lost with a worker that dies. Idle and lost workers are not waited for: the client reports them.

    Args:
      strategy: of the workers.
      state: has the workers' clocks and the steps in flight.
      may_begin: takes a worker's index and clock, on the home server and under the state's lock; returns whether it
        may begin, a bool scalar.
    """

    def __init__(
        self, strategy: ParameterServerStrategy, state: RuleState, may_begin: Callable[[Any, Any], Any]
    ) -> None:
        self._strategy = strategy
        self._state = state
        self._may_begin = may_begin
        strategy.extended.services.add_idle_callback(self.dismiss)

    def wait_open(self) -> Any:
        """Waits until the worker that runs this may begin, and records its step as in flight.

        Returns:
          The model version then, an int64 scalar.
        """
        services = self._strategy.extended.services
        worker, connection = services.worker_index(), services.connection_number()
        began = tf.timestamp()
        # Traced once, called in two places.
        ask = tf.function(self._ask, autograph=False)
        answer = ask(worker, connection, tf.constant(0.0, tf.float64))

        def ask_again(_: Any, waiting: Any, __: Any) -> Any:
            with tf.control_dependencies([pause(PAUSE * tf.cast(waiting, tf.float64))]):
                waited = tf.timestamp() - began
            return ask(worker, connection, waited)

        return tf.while_loop(lambda may, *_: tf.logical_not(may), ask_again, answer, parallel_iterations=1)[2]

    def dismiss(self, worker: int) -> None:
        """Records that a worker has no step in flight, so that no other waits for it; called on the client."""
        # If the home server is down, its record is lost with it.
        with contextlib.suppress(*UNREACHED):
            self._dismiss(worker)

    def _ask(self, worker: Any, connection: Any, waited: Any) -> tuple[Any, Any, Any]:
        """Returns whether the worker may begin, how many workers wait (itself included), and the version."""
        state, workers = self._state, self._state.workers
        with state.lock.hold([worker, connection, waited]):
            # An abandoned call on a closed connection must not count as the worker's own.
            is_own = tf.debugging.assert_greater_equal(
                connection, workers.fence.sparse_read(worker), "This call was abandoned; its worker has a newer one."
            )
            with tf.control_dependencies([is_own]):
                workers.fence.scatter_nd_update([[worker]], [connection])
                clock = self._join_in(worker)
                may = self._may_begin(worker, clock)
            version = state.version.read_value()
            in_flight = tf.where(may, version, tf.constant(NO_STEP, tf.int64))
            workers.pulled_version.scatter_nd_update([[worker]], [in_flight])
            workers.is_waiting.scatter_nd_update([[worker]], [tf.logical_not(may)])
            state.record_seen(worker, tf.where(may, waited, tf.zeros_like(waited)))
            waiting = tf.math.count_nonzero(workers.is_waiting.read_value())
        return may, waiting, version

    def _join_in(self, worker: Any) -> Any:
        """Returns the worker's clock; an inactive worker joins at the slowest active one, the first at the greatest."""
        clocks, workers = self._state.clocks, self._state.workers
        clock = clocks.sparse_read(worker)
        slowest = self._state.slowest_clock(besides=worker)
        slowest = tf.where(slowest == NO_CLOCK, tf.reduce_max(clocks.read_value()), slowest)
        rejoined = tf.function(decisions.rejoined_clock)(clock, slowest)
        clock = tf.where(workers.is_active.sparse_read(worker), clock, rejoined)
        clocks.scatter_nd_update([[worker]], [clock])
        workers.is_active.scatter_nd_update([[worker]], [True])
        return clock

    @client_may_call(tf.TensorSpec([], tf.int64))
    def _dismiss(self, worker: Any) -> None:
        workers = self._state.workers
        with self._state.lock.hold([worker]):
            workers.is_active.scatter_nd_update([[worker]], [False])
            workers.is_waiting.scatter_nd_update([[worker]], [False])
            workers.pulled_version.scatter_nd_update([[worker]], tf.constant([NO_STEP], tf.int64))


def pause(seconds: Any) -> Any:
    """Waits without using the processor, on the device that this is built for.

    Args:
      seconds: a float64 scalar.

    Returns:
      A tensor that is available afterwards.
    """
    once = tf.raw_ops.TensorDataset(components=[tf.constant(0)], output_shapes=[[]])
    types = {"output_types": [tf.int32], "output_shapes": [[]]}
    slept = tf.raw_ops.SleepDataset(input_dataset=once, sleep_microseconds=tf.cast(seconds * 1e6, tf.int64), **types)
    # DatasetToSingleElement asks for a second element, which would cost a second pause.
    first = tf.raw_ops.TakeDataset(input_dataset=slept, count=tf.constant(1, tf.int64), **types)
    return tf.raw_ops.DatasetToSingleElement(dataset=first, **types)[0]
