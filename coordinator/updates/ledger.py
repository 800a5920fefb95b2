"""What a rule keeps on a parameter server: the model version, the workers' clocks, and counts of what happened.

All of it is on one server, the rule's *home*, so that a decision is made under one lock without asking another
machine. What a checkpoint needs is in variables that one holds; who is under way now is not among them, since after a
restart nobody is.
"""

import dataclasses
from typing import Any

import tensorflow as tf

from coordinator.updates.exclusive import Exclusive

# Task indices beyond this are refused.
MOST_WORKERS = 1024
# Staleness of this or more is counted as one.
LARGEST_STALENESS = 1024

COUNTS = ("updates", "pushes", "rejected", "pulls", "bytes_pulled", "bytes_pushed")
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


class Ledger(tf.Module):
    """The state of one rule. To be made in the strategy's scope.

    Attributes:
      version: the number of updates that were applied; an int64 scalar.
      counts: how often what of `COUNTS` happened; int64.
      histogram: how many gradients there were of each staleness; int64.
      clocks: how many steps each worker has finished; int64, by task index.
      seconds: when each worker was first and last seen, on the home's clock, and for how long it has waited; float64.
      lock: held to look at these and change them together.
      queued: what else the rule of the ledger keeps for a checkpoint; absent if it keeps nothing.
    """

    queued: tf.train.experimental.PythonState

    def __init__(self) -> None:
        super().__init__("ledger")
        self.version = zeros([], tf.int64, "version")
        with tf.distribute.get_strategy().extended.colocate_vars_with(self.version):
            self.counts = zeros([len(COUNTS)], tf.int64, "counts")
            self.histogram = zeros([LARGEST_STALENESS + 1], tf.int64, "staleness")
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

    def count(self, **happened: Any) -> None:
        """Adds to `counts`, atomically.

        Args:
          **happened: how often, by name; Python numbers or int64 scalars.
        """
        with tf.device(self.home):
            self.counts.assign_add(tf.stack([_number(happened.get(name, 0)) for name in COUNTS]), read_value=False)

    def slowest_clock(self, besides: Any) -> Any:
        """The least clock of the active workers but one; NOBODY if there is none. To be called under the lock."""
        others = tf.logical_and(self.present.is_active.read_value(), tf.range(MOST_WORKERS, dtype=tf.int64) != besides)
        return tf.reduce_min(tf.where(others, self.clocks.read_value(), tf.constant(NOBODY, tf.int64)))

    def note_staleness(self, staleness: Any, gradients: Any = 1) -> None:
        """Counts a gradient of this staleness, or so many, atomically; int64 scalars."""
        slot = tf.clip_by_value(staleness, _number(0), _number(LARGEST_STALENESS))
        _add_at(self.histogram, slot, gradients)

    def note_seen(self, worker: Any, waited: Any = None) -> None:
        """Notes that a worker is here now, and has waited for so many seconds. Never twice for it at the same time."""
        now = tf.timestamp()
        first, _, before = tf.unstack(self.seconds.sparse_read(worker))
        waited = before if waited is None else before + tf.cast(waited, tf.float64)
        row = tf.stack([tf.where(first > _constant(0, tf.float64), first, now), now, waited])
        self.seconds.scatter_update(tf.IndexedSlices(row, worker))

    def note_step(self, worker: Any, steps: Any = 1) -> None:
        """Notes that a worker has finished a step, or so many. Never twice for it at the same time."""
        _add_at(self.clocks, worker, steps)
        self.note_seen(worker)

    def __repr__(self) -> str:
        return f"<Ledger {self.number} on {self.home}>"


def zeros(shape: list[int], dtype: tf.DType, name: str) -> tf.Variable:
    """A variable of zeros that can be made again after its server was lost."""
    return tf.Variable(lambda: tf.zeros(shape, dtype), trainable=False, name=name)


def _add_at(vector: tf.Variable, position: Any, number: Any) -> None:
    """Adds to one element of an int64 variable, atomically, as a `scatter_add` is not."""
    vector.scatter_nd_add(
        tf.reshape(position, _constant([1, 1], tf.int32)), tf.reshape(_number(number), _constant([1], tf.int32))
    )


def _number(value: Any) -> Any:
    """An int64 scalar."""
    return tf.cast(value, tf.int64) if tf.is_tensor(value) else _constant(value, tf.int64)


def _constant(value: Any, dtype: tf.DType) -> Any:
    """A constant that waits for nothing, so that the steps of one call have it in common."""
    with tf.control_dependencies(None):
        return tf.constant(value, dtype)
