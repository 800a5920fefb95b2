"""The state of a rule on a parameter server: the model version, the workers' clocks, and counters.

All of it is on one server, the rule's *home*, so that a decision is made under one mutex without asking another
machine. What a checkpoint needs is in variables of the module; the steps in flight are not, since none survives a
restart.
"""

import dataclasses
from typing import Any

import tensorflow as tf

from coordinator.data.epochs import Epochs
from coordinator.ps_strategy.membership.cluster_definition import MAX_WORKERS
from coordinator.ps_strategy.tensorflow_internals.server_mutex import ServerMutex, client_may_call
from coordinator.updates.state.committed_ranges import CommittedRanges

# Larger staleness counts as this.
MAX_STALENESS = 1024

COUNTS = ("updates", "pushes", "rejected", "pulls", "bytes_pulled", "bytes_pushed", "not_finite")
# Where the histogram of staleness and the workers' steps begin in `counts`.
HISTOGRAM = len(COUNTS)
STEPS = HISTOGRAM + MAX_STALENESS + 1
FIRST_SEEN, LAST_SEEN, WAITED = range(3)
# The pulled version of a worker without a step in flight.
NO_STEP = -1
# The slowest clock if no worker is active.
NO_CLOCK = 2**62


@dataclasses.dataclass(frozen=True)
class _WorkerStatus:
    """The steps in flight. Not in checkpoints: TensorFlow does not track the attributes of a dataclass.

    Attributes, each by task index:
      fence: the newest connection of the worker; int64.
      is_active: whether it has steps to do, so that others may have to wait for it.
      is_waiting: whether it waits to begin a step.
      pulled_version: the version that its gradient in flight is computed on, or NO_STEP; int64.
    """

    fence: tf.Variable
    is_active: tf.Variable
    is_waiting: tf.Variable
    pulled_version: tf.Variable


class RuleState(tf.Module):
    """The state of one rule. Created in the strategy's scope.

    Attributes:
      version: the number of updates applied; an int64 scalar.
      counts: the counters of `COUNTS`, then the number of gradients of each staleness, then the number of steps that
        each worker has finished; int64. One variable, so that all counters of a push change at once.
      clocks: the steps that each worker has finished, plus its head start if it joined late; int64, by task index.
      seconds: when each worker was first and last seen, on the home's clock, and how long it has waited; float64.
      workers: the steps in flight.
      lock: protects all of these.
      queued: further state of the rule for a checkpoint; absent if there is none.
      committed: the ranges that the rule has committed; absent without `once`.

    Args:
      once: the epochs of which each range is to be committed once; None for none.
    """

    queued: tf.train.experimental.PythonState
    committed: CommittedRanges

    def __init__(self, once: Epochs | None = None) -> None:
        super().__init__("rule_state")
        self.version = zeros([], tf.int64, "version")
        with tf.distribute.get_strategy().extended.colocate_vars_with(self.version):
            self.counts = zeros([STEPS + MAX_WORKERS], tf.int64, "counts")
            self.clocks = zeros([MAX_WORKERS], tf.int64, "clocks")
            self.seconds = zeros([MAX_WORKERS, 3], tf.float64, "seconds")
            workers = _WorkerStatus(
                fence=zeros([MAX_WORKERS], tf.int64, "fence"),
                is_active=zeros([MAX_WORKERS], tf.bool, "is_active"),
                is_waiting=zeros([MAX_WORKERS], tf.bool, "is_waiting"),
                pulled_version=tf.Variable(
                    lambda: tf.fill([MAX_WORKERS], tf.constant(NO_STEP, tf.int64)),
                    trainable=False,
                    name="pulled_version",
                ),
            )
        self.workers = workers
        self.home: str = self.version.device
        # A restarted client uses the same names; a mutex has no state to keep.
        self.number = next(tf.distribute.get_strategy().extended.services.unique_numbers)
        self.lock = ServerMutex(f"coordinator/updates/{self.number}/state", self.home)
        if once is not None:
            self.committed = CommittedRanges(tf.distribute.get_strategy(), once, self.version, self.lock)

    def count(
        self, *, staleness: Any = None, gradients: Any = 1, worker: Any = None, steps: Any = 1, **happened: Any
    ) -> None:
        """Adds to `counts`, all at once.

        Args:
          staleness: of a gradient, an int64 scalar; None to count none.
          gradients: the number of gradients of that staleness.
          worker: the index of the worker that has finished steps, an int64 scalar; None for no worker.
          steps: the number of steps.
          **happened: increments by name of the counter; Python numbers or scalars.
        """
        counted = [(COUNTS.index(name), times) for name, times in happened.items()]
        with tf.device(self.home):
            if staleness is not None:
                slot = tf.clip_by_value(staleness, _number(0), _number(MAX_STALENESS))
                counted.append((slot + HISTOGRAM, gradients))
            if worker is not None:
                counted.append((_number(worker) + STEPS, steps))
            places, times = (tf.stack([_number(value) for value in values]) for values in zip(*counted, strict=True))
            self.counts.scatter_nd_add(places[:, tf.newaxis], times)

    def slowest_clock(self, besides: Any) -> Any:
        """Returns the least clock of the other active workers, NO_CLOCK if there is none. Called under the lock."""
        others = tf.logical_and(self.workers.is_active.read_value(), tf.range(MAX_WORKERS, dtype=tf.int64) != besides)
        return tf.reduce_min(tf.where(others, self.clocks.read_value(), tf.constant(NO_CLOCK, tf.int64)))

    def record_seen(self, worker: Any, waited: Any = None) -> None:
        """Records that a worker is running and has waited for some seconds. Not concurrently for one worker."""
        now = tf.timestamp()
        first, _, before = tf.unstack(self.seconds.sparse_read(worker))
        waited = before if waited is None else before + tf.cast(waited, tf.float64)
        row = tf.stack([tf.where(first > _constant(0, tf.float64), first, now), now, waited])
        self.seconds.scatter_update(tf.IndexedSlices(row, worker))

    def advance_clock(self, worker: Any, steps: Any = 1) -> None:
        """Advances a worker's clock by some steps. Not concurrently for one worker."""
        self.clocks.scatter_nd_add(
            tf.reshape(worker, _constant([1, 1], tf.int32)), tf.reshape(_number(steps), _constant([1], tf.int32))
        )
        self.record_seen(worker)

    @client_may_call()
    def read(self) -> tuple[Any, Any]:
        """Returns `counts` and `seconds` of one moment."""
        # A rule may be between two of its counts while it holds the lock.
        with self.lock.hold():
            return self.counts.read_value(), self.seconds.read_value()

    def __repr__(self) -> str:
        return f"<RuleState {self.number} on {self.home}>"


def zeros(shape: list[int], dtype: tf.DType, name: str) -> tf.Variable:
    """Creates a variable of zeros that can be initialized again after its server was lost."""
    return tf.Variable(lambda: tf.zeros(shape, dtype), trainable=False, name=name)


def _number(value: Any) -> Any:
    return tf.cast(value, tf.int64) if tf.is_tensor(value) else _constant(value, tf.int64)


def _constant(value: Any, dtype: tf.DType) -> Any:
    """Returns a constant without control dependencies, so that the steps of one fused call share it."""
    with tf.control_dependencies(None):
        return tf.constant(value, dtype)
