"""What a rule keeps on a parameter server: the model version, the workers' clocks, and counts of what happened.

All of it is on one server, the rule's *home*, so that a decision is made under one lock without asking another
machine. What a checkpoint needs is in variables that one holds; who is under way now is not among them, since after a
restart nobody is.
"""

import dataclasses
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator.updates.state.server_mutex import Exclusive

# Task indices beyond this are refused.
MOST_WORKERS = 1024
# Staleness of this or more is counted as one.
LARGEST_STALENESS = 1024

COUNTS = ("updates", "pushes", "rejected", "pulls", "bytes_pulled", "bytes_pushed")
# Where the histogram of staleness and the workers' steps begin among the counts.
_HISTOGRAM = len(COUNTS)
_STEPS = _HISTOGRAM + LARGEST_STALENESS + 1
FIRST_SEEN, LAST_SEEN, WAITED = range(3)
# Stands for the version that a worker's gradient is computed on, where none is under way.
NOT_UNDER_WAY = -1
# The slowest clock where no worker has steps to do.
NOBODY = 2**62


@dataclasses.dataclass(frozen=True)
class _Present:
    """Who is under way. Not in checkpoints: TensorFlow does not look into an object of this kind.

    Attributes, each by task index:
      fence: the newest connection that a worker was seen with; int64.
      is_active: whether it has steps to do, so that others may have to wait for it.
      is_waiting: whether it waits to begin one.
      pulled_version: the version that the gradient is computed on that it has under way, or NOT_UNDER_WAY; int64.
    """

    fence: tf.Variable
    is_active: tf.Variable
    is_waiting: tf.Variable
    pulled_version: tf.Variable


@dataclasses.dataclass(frozen=True)
class LedgerSnapshot:
    """What a ledger had counted at one moment.

    Attributes:
      counts: how often what of `COUNTS` had happened, by name.
      histogram: how many gradients there were of each staleness; int64.
      steps: how many steps each worker had finished; int64, by task index.
      seconds: as the ledger has them.
    """

    counts: dict[str, int]
    histogram: np.ndarray
    steps: np.ndarray
    seconds: np.ndarray


class Ledger(tf.Module):
    """The state of one rule. To be made in the strategy's scope.

    Attributes:
      version: the number of updates that were applied; an int64 scalar.
      counts: how often what of `COUNTS` happened, then how many gradients there were of each staleness, then how many
        steps each worker has finished; int64. One variable, so that all that a push counts is there at the same time.
      clocks: how many steps each worker has finished, or was put ahead by when it joined in; int64, by task index.
      seconds: when each worker was first and last seen, on the home's clock, and for how long it has waited; float64.
      lock: held to look at these and change them together.
      queued: what else the rule of the ledger keeps for a checkpoint; absent if it keeps nothing.
    """

    queued: tf.train.experimental.PythonState

    def __init__(self) -> None:
        super().__init__("ledger")
        self.version = zeros([], tf.int64, "version")
        with tf.distribute.get_strategy().extended.colocate_vars_with(self.version):
            self.counts = zeros([_STEPS + MOST_WORKERS], tf.int64, "counts")
            self.clocks = zeros([MOST_WORKERS], tf.int64, "clocks")
            self.seconds = zeros([MOST_WORKERS, 3], tf.float64, "seconds")
            present = _Present(
                fence=zeros([MOST_WORKERS], tf.int64, "fence"),
                is_active=zeros([MOST_WORKERS], tf.bool, "is_active"),
                is_waiting=zeros([MOST_WORKERS], tf.bool, "is_waiting"),
                pulled_version=tf.Variable(
                    lambda: tf.fill([MOST_WORKERS], tf.constant(NOT_UNDER_WAY, tf.int64)),
                    trainable=False,
                    name="pulled_version",
                ),
            )
        self.present = present
        self.home: str = self.version.device
        # The same names are used by a client that is started again; a lock has nothing to remember.
        self.number = next(tf.distribute.get_strategy().numbers)
        self.lock = Exclusive(f"coordinator/updates/{self.number}/ledger", self.home)
        self._read = tf.function(self._build_read, input_signature=[], autograph=False)

    def count(
        self, *, staleness: Any = None, gradients: Any = 1, worker: Any = None, steps: Any = 1, **happened: Any
    ) -> None:
        """Adds to `counts`, all at the same time.

        Args:
          staleness: of a gradient, an int64 scalar; None if there is none to be counted.
          gradients: how many there are of that staleness.
          worker: the index of one that has finished steps, an int64 scalar; None if none has.
          steps: how many.
          **happened: how often, by name; Python numbers or scalars.
        """
        counted = [(COUNTS.index(name), times) for name, times in happened.items()]
        with tf.device(self.home):
            if staleness is not None:
                slot = tf.clip_by_value(staleness, _number(0), _number(LARGEST_STALENESS))
                counted.append((slot + _HISTOGRAM, gradients))
            if worker is not None:
                counted.append((_number(worker) + _STEPS, steps))
            places, times = (tf.stack([_number(value) for value in values]) for values in zip(*counted, strict=True))
            self.counts.scatter_nd_add(places[:, tf.newaxis], times)

    def snapshot(self) -> LedgerSnapshot:
        """What was counted until now; called on the client.

        Raises:
          tf.errors.OpError: its server does not answer.
        """
        counts, seconds = (tensor.numpy() for tensor in self._read())
        named, histogram, steps = np.split(counts, [_HISTOGRAM, _STEPS])
        return LedgerSnapshot(dict(zip(COUNTS, map(int, named), strict=True)), histogram, steps, seconds)

    def slowest_clock(self, besides: Any) -> Any:
        """The least clock of the active workers but one; NOBODY if there is none. To be called under the lock."""
        others = tf.logical_and(self.present.is_active.read_value(), tf.range(MOST_WORKERS, dtype=tf.int64) != besides)
        return tf.reduce_min(tf.where(others, self.clocks.read_value(), tf.constant(NOBODY, tf.int64)))

    def note_seen(self, worker: Any, waited: Any = None) -> None:
        """Notes that a worker is here now, and has waited for so many seconds. Never twice for it at the same time."""
        now = tf.timestamp()
        first, _, before = tf.unstack(self.seconds.sparse_read(worker))
        waited = before if waited is None else before + tf.cast(waited, tf.float64)
        row = tf.stack([tf.where(first > _constant(0, tf.float64), first, now), now, waited])
        self.seconds.scatter_update(tf.IndexedSlices(row, worker))

    def note_step(self, worker: Any, steps: Any = 1) -> None:
        """Puts a worker's clock forward by a step, or several. Never twice for one worker at the same time."""
        self.clocks.scatter_nd_add(
            tf.reshape(worker, _constant([1, 1], tf.int32)), tf.reshape(_number(steps), _constant([1], tf.int32))
        )
        self.note_seen(worker)

    def _build_read(self) -> tuple[Any, Any]:
        # A rule that holds the lock may be between two of its counts.
        with self.lock.hold():
            return self.counts.read_value(), self.seconds.read_value()

    def __repr__(self) -> str:
        return f"<Ledger {self.number} on {self.home}>"


def zeros(shape: list[int], dtype: tf.DType, name: str) -> tf.Variable:
    """A variable of zeros that can be made again after its server was lost."""
    return tf.Variable(lambda: tf.zeros(shape, dtype), trainable=False, name=name)


def _number(value: Any) -> Any:
    """An int64 scalar."""
    return tf.cast(value, tf.int64) if tf.is_tensor(value) else _constant(value, tf.int64)


def _constant(value: Any, dtype: tf.DType) -> Any:
    """A constant that waits for nothing, so that the steps of one call have it in common."""
    with tf.control_dependencies(None):
        return tf.constant(value, dtype)
