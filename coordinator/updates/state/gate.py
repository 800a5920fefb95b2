"""Where a worker waits until its rule lets it begin a step."""

import contextlib
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.failure_table import UNREACHED
from coordinator.ps_strategy.parameter_server_strategy import ParameterServerStrategy
from coordinator.updates import decisions
from coordinator.updates.state.rule_state import NOBODY, NOT_UNDER_WAY, Ledger

# How long a worker that waits pauses before it asks again, in seconds, for each of the workers that wait. So all of
# them together ask the home server a thousand times a second, however many they are.
PAUSE = 1e-3


class Gate:
    """Lets workers begin a step one by one, each as soon as a decision allows it.

    A worker that may not begin asks again after a pause, which it spends on its own machine. So nobody has to wake it,
    and no death can lose the call that would. Workers that have no step to do are not waited for: the client says so,
    also of those that died.

    Args:
      strategy: whose workers they are.
      ledger: has their clocks, and who is under way.
      may_begin: takes a worker's index and clock, on the home server and under the ledger's lock; returns whether it
        may begin, a bool scalar.
    """

    def __init__(self, strategy: ParameterServerStrategy, ledger: Ledger, may_begin: Callable[[Any, Any], Any]) -> None:
        self._strategy = strategy
        self._ledger = ledger
        self._may_begin = may_begin
        self._dismiss = tf.function(
            self._build_dismissal, input_signature=[tf.TensorSpec([], tf.int64)], autograph=False
        )
        strategy.cluster.when_worker_rests(self.dismiss)

    def wait_open(self) -> tuple[Any, Any]:
        """Waits until the worker that runs this may begin, and notes that it does.

        Returns:
          The model version then, an int64 scalar, and the seconds that it has waited, a float64 scalar.
        """
        worker, connection = self._strategy.worker_index(), self._strategy.connection_number()
        began = tf.timestamp()
        # Traced once, called in two places.
        ask = tf.function(self._ask, autograph=False)
        answer = ask(worker, connection, tf.constant(0.0, tf.float64))

        def ask_again(_: Any, waiting: Any, __: Any) -> Any:
            with tf.control_dependencies([pause(PAUSE * tf.cast(waiting, tf.float64))]):
                waited = tf.timestamp() - began
            return ask(worker, connection, waited)

        _, _, version = tf.while_loop(lambda may, *_: tf.logical_not(may), ask_again, answer, parallel_iterations=1)
        with tf.control_dependencies([version]):
            return version, tf.timestamp() - began

    def dismiss(self, worker: int) -> None:
        """Notes that a worker is not under way, so that nobody waits for it; called on the client."""
        # If the home server is away, what it noted is gone when it returns, and so is this.
        with contextlib.suppress(*UNREACHED):
            self._dismiss(tf.constant(worker, tf.int64))

    def _ask(self, worker: Any, connection: Any, waited: Any) -> tuple[Any, Any, Any]:
        """One question: whether the worker may begin, how many wait (it included), and the version."""
        ledger, present = self._ledger, self._ledger.present
        with ledger.lock.hold([worker, connection, waited]):
            # A call that was given up, on a connection that is no more, must not count as the worker's own.
            is_own = tf.debugging.assert_greater_equal(
                connection, present.fence.sparse_read(worker), "This call was given up; its worker has a newer one."
            )
            with tf.control_dependencies([is_own]):
                present.fence.scatter_nd_update([[worker]], [connection])
                clock = self._join_in(worker)
                may = self._may_begin(worker, clock)
            version = ledger.version.read_value()
            under_way = tf.where(may, version, tf.constant(NOT_UNDER_WAY, tf.int64))
            present.pulled_version.scatter_nd_update([[worker]], [under_way])
            present.is_waiting.scatter_nd_update([[worker]], [tf.logical_not(may)])
            ledger.note_seen(worker, tf.where(may, waited, tf.zeros_like(waited)))
            waiting = tf.math.count_nonzero(present.is_waiting.read_value())
        return may, waiting, version

    def _join_in(self, worker: Any) -> Any:
        """The worker's clock; if it was not there, it comes in at the slowest clock of those that are."""
        clocks, present = self._ledger.clocks, self._ledger.present
        clock = clocks.sparse_read(worker)
        slowest = self._ledger.slowest_clock(besides=worker)
        rejoined = tf.function(decisions.rejoined_clock)(clock, tf.where(slowest == NOBODY, clock, slowest))
        clock = tf.where(present.is_active.sparse_read(worker), clock, rejoined)
        clocks.scatter_nd_update([[worker]], [clock])
        present.is_active.scatter_nd_update([[worker]], [True])
        return clock

    def _build_dismissal(self, worker: Any) -> None:
        present = self._ledger.present
        with self._ledger.lock.hold([worker]):
            present.is_active.scatter_nd_update([[worker]], [False])
            present.is_waiting.scatter_nd_update([[worker]], [False])
            present.pulled_version.scatter_nd_update([[worker]], tf.constant([NOT_UNDER_WAY], tf.int64))


def pause(seconds: Any) -> Any:
    """Waits on the device that this is built for, without working.

    Args:
      seconds: a float64 scalar.

    Returns:
      A tensor that is there afterwards.
    """
    once = tf.raw_ops.TensorDataset(components=[tf.constant(0)], output_shapes=[[]])
    types = {"output_types": [tf.int32], "output_shapes": [[]]}
    slept = tf.raw_ops.SleepDataset(input_dataset=once, sleep_microseconds=tf.cast(seconds * 1e6, tf.int64), **types)
    # Whoever wants a single element asks for a second one, for which a pause would be made again.
    first = tf.raw_ops.TakeDataset(input_dataset=slept, count=tf.constant(1, tf.int64), **types)
    return tf.raw_ops.DatasetToSingleElement(dataset=first, **types)[0]
