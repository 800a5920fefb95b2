"""The state of a rule on a parameter server: the model version, the workers' clocks, counters, committed ranges.

The whole state is on one server, the rule's *home*, so that a decision needs one mutex and no other machine. The
module's variables are saved in checkpoints. Steps in flight are not saved, since no step survives a restart.

    number of a range    ... 65535  65536  65537 ...      a vector of WINDOW slots on the home server:
    its slot             ... 65535      0      1 ...      each holds 1 + the number of the last range committed there

`Epochs` gives a function no range that is WINDOW or more above the first range that is not done. So if a range's slot
holds the number of a later range, the earlier range is done, and no range is committed twice.

The critical section that logs a push reads and changes the vector. Its operations are all on the home server, and
finish once begun, even if the calling worker dies: a push is committed together with its range, or not at all.

A checkpoint has the committed ranges, except ranges whose gradients still wait for an update. No checkpoint has waiting
gradients, and `Epochs` saves their ranges as not done.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator.data.epochs import Epochs
from coordinator.data.ledger import WINDOW
from coordinator.ps_strategy.membership.cluster_definition import MAX_WORKERS
from coordinator.ps_strategy.parameter_server_strategy import ParameterServerStrategy
from coordinator.ps_strategy.tensorflow_internals.shared_variable import ServerMutex, client_may_call, graph_around
from coordinator.updates import decisions

# The position of the range's number in the vector that `Epochs.on` yields, and the size of the vector.
_NUMBER = 3
_POSITIONS_SIZE = 5


class CommittedRanges(tf.train.experimental.PythonState):
    """The ranges of `Epochs` that a rule has committed. Created in the strategy's scope, on the server of `near`.

    The rule sets `read_waiting`, which returns the numbers of the ranges whose gradients wait for an update.
    """

    def __init__(self, strategy: ParameterServerStrategy, epochs: Epochs, near: tf.Variable, lock: ServerMutex) -> None:
        self.epochs = epochs
        self.read_waiting: Callable[[], Any] = lambda: tf.zeros([0], tf.int64)
        self._lock = lock
        with strategy.extended.colocate_vars_with(near):
            self._slots = tf.Variable(lambda: tf.zeros([WINDOW], tf.int64), trainable=False, name="committed_ranges")
        self._is_restored = False
        self._restorations = epochs.restorations
        strategy.extended.services.variables.add_recovered(self)
        epochs.add_record(self)

    def is_committed(self, number: Any) -> Any:
        """Returns whether a range is committed or done, a bool scalar. Runs on the home server, under the lock."""
        return self._slots.sparse_read(number % WINDOW) > number

    def commit(self, number: Any, is_accepted: Any) -> None:
        """Records that a range is committed if its push is accepted. Runs on the home server, under the lock."""
        self._slots.scatter_nd_max([[number % WINDOW]], [tf.where(is_accepted, number + 1, tf.zeros_like(number))])

    def waiting(self) -> list[int]:
        """See `Epochs.add_record`."""
        return [int(number) for number in self.read_waiting().numpy()]

    def recover(self) -> None:
        """See `Epochs.add_record`."""
        # If only the epochs or only this record was restored, ranges that run again would be refused as duplicates.
        if self._is_restored != (self.epochs.restorations != self._restorations):
            self._assign(np.zeros([WINDOW], np.int64))
        self._is_restored, self._restorations = False, self.epochs.restorations

    def serialize(self) -> bytes:
        """Returns the ranges as a string: the first number, and a bit for each of the next `WINDOW` numbers."""
        slots = self._read().numpy()
        numbers = np.setdiff1d(slots[slots > 0] - 1, self.waiting())
        first = max(0, int(numbers.max(initial=0)) + 1 - WINDOW)
        bits = np.zeros([WINDOW], np.bool_)
        bits[numbers[numbers >= first] - first] = True
        return np.array(first, "<i8").tobytes() + np.packbits(bits).tobytes()

    def deserialize(self, string_value: bytes) -> None:
        """Replaces the ranges. TensorFlow calls this method to restore a checkpoint."""
        first = int(np.frombuffer(string_value[:8], "<i8")[0])
        numbers = first + np.flatnonzero(np.unpackbits(np.frombuffer(string_value[8:], np.uint8)))
        slots = np.zeros([WINDOW], np.int64)
        slots[numbers % WINDOW] = numbers + 1
        self._assign(slots)
        self._is_restored = True

    @client_may_call()
    def _read(self) -> Any:
        with self._lock.hold():
            return self._slots.read_value()

    @client_may_call(tf.TensorSpec([WINDOW], tf.int64))
    def _assign(self, slots: Any) -> None:
        with self._lock.hold([slots]):
            self._slots.assign(slots, read_value=False)


def range_number(positions: Any, once: Epochs | None, key: str) -> Any:
    """Returns the number of the range of a push, an int64 scalar; None for a rule without `once`.

    `key` names the rule's collection, in which a graph stores the ranges that it pushes. Raises ValueError if the range
    is missing, not wanted, or already pushed by the function; TypeError if `positions` is not a vector of `Epochs.on`.
    """
    if once is None:
        if positions is not None:
            raise ValueError("push takes positions only of a rule that was created with once=epochs.")
        return None
    if positions is None:
        raise ValueError(
            "The rule was created with once=epochs: push needs the range that the function was given, as in "
            "rule.push(gradients, version, positions=positions)."
        )
    # If the client reads the data, the range is in a tuple with the examples.
    vector = tf.convert_to_tensor(positions[0] if isinstance(positions, tuple) else positions)
    if vector.dtype != tf.int64 or not vector.shape.is_compatible_with([_POSITIONS_SIZE]):
        raise TypeError(
            f"positions must be the vector that epochs.on(strategy) yields, int64 [{_POSITIONS_SIZE}], as the function "
            f"was given it; got {positions!r}."
        )
    graph = tf.compat.v1.get_default_graph()
    pushed = graph.get_collection_ref(f"{key}/ranges")
    if any(other is vector for other in pushed) or _is_in_loop(graph, vector):
        raise ValueError(
            "The function pushes several times for one range, of which a rule with once=epochs would refuse all but "
            "the first. Push once for all examples of the range, or use batches_per_range=1."
        )
    pushed.append(vector)
    return vector[_NUMBER]


def _is_in_loop(graph: Any, tensor: Any) -> bool:
    """Returns whether a graph is in a loop, and the tensor is outside of the loop."""
    while graph is not None and graph is not tensor.graph:
        if graph.name.startswith("while_body"):
            return True
        graph = graph_around(graph)
    return False


# The largest staleness in the histogram. Larger staleness counts as this value.
MAX_STALENESS = 1024

COUNTS = ("updates", "pushes", "rejected", "pulls", "bytes_pulled", "bytes_pushed", "not_finite")
# Positions in `counts`: the beginning of the histogram of staleness, and the beginning of the workers' steps.
HISTOGRAM = len(COUNTS)
STEPS = HISTOGRAM + MAX_STALENESS + 1
FIRST_SEEN, LAST_SEEN, WAITED = range(3)
# The pulled version of a worker without a step in flight.
NO_STEP = -1
# The slowest clock if no worker is active.
NO_CLOCK = 2**62


@dataclasses.dataclass(frozen=True)
class _WorkerStatus:
    """The steps in flight, by task index. No checkpoint has them: TensorFlow does not track a dataclass's attributes.

    `fence`, int64, is the worker's newest connection. An active worker has steps to do, and others may have to wait for
    it. A waiting worker waits to begin a step. `pulled_version`, int64, is the version that the gradient in flight is
    computed on, or NO_STEP.
    """

    fence: tf.Variable
    is_active: tf.Variable
    is_waiting: tf.Variable
    pulled_version: tf.Variable


class RuleState(tf.Module):
    """The state of one rule. Created in the strategy's scope. `once` are the epochs whose ranges the rule commits.

    Attributes:
      version: the number of updates applied; an int64 scalar.
      counts: the counters of `COUNTS`, then the number of gradients of each staleness, then the number of steps that
        each worker has finished; int64. `counts` is one variable, so that all counters of a push change together.
      clocks: the steps that each worker has finished, plus its head start if it joined late; int64, by task index.
      seconds: when each worker was first and last seen, on the home's clock, and how long it has waited; float64.
      workers: the steps in flight.
      home: the device of the home server.
      number: the number of this state; no other rule has the same number.
      lock: protects all variables of the state.
      queued: further state of the rule for a checkpoint; absent if there is none.
      committed: the ranges that the rule has committed; absent without `once`.
    """

    queued: tf.train.experimental.PythonState
    committed: CommittedRanges

    def __init__(self, once: Epochs | None = None) -> None:
        super().__init__("rule_state")
        strategy = tf.distribute.get_strategy()
        self.version = zeros([], tf.int64, "version")
        with strategy.extended.colocate_vars_with(self.version):
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
        # A restarted client uses the same names, which is safe because a mutex has no state to keep.
        self.number = next(strategy.extended.services.unique_numbers)
        self.lock = ServerMutex(f"coordinator/updates/{self.number}/state", self.home)
        if once is not None:
            self.committed = CommittedRanges(strategy, once, self.version, self.lock)

    def count(
        self, *, staleness: Any = None, gradients: Any = 1, worker: Any = None, steps: Any = 1, **happened: Any
    ) -> None:
        """Adds to `counts`, in one operation.

        `staleness`, an int64 scalar, is counted for `gradients` gradients, and `steps` for the worker with the index
        `worker`; None counts nothing. `happened` has increments by name of the counter, Python numbers or scalars.
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
        """Returns the least clock of active workers except `besides`; NO_CLOCK if there are none. The lock is held."""
        others = tf.logical_and(self.workers.is_active.read_value(), tf.range(MAX_WORKERS, dtype=tf.int64) != besides)
        return tf.reduce_min(tf.where(others, self.clocks.read_value(), tf.constant(NO_CLOCK, tf.int64)))

    def record_seen(self, worker: Any, waited: Any = None) -> None:
        """Records that a worker runs and has waited for some seconds. Calls for one worker must not be concurrent."""
        now = tf.timestamp()
        first, _, before = tf.unstack(self.seconds.sparse_read(worker))
        waited = before if waited is None else before + tf.cast(waited, tf.float64)
        row = tf.stack([tf.where(first > _constant(0, tf.float64), first, now), now, waited])
        self.seconds.scatter_update(tf.IndexedSlices(row, worker))

    def advance_clock(self, worker: Any, steps: Any = 1) -> None:
        """Advances a worker's clock. Calls for one worker must not be concurrent."""
        self.clocks.scatter_nd_add(
            tf.reshape(worker, _constant([1, 1], tf.int32)), tf.reshape(_number(steps), _constant([1], tf.int32))
        )
        self.record_seen(worker)

    @client_may_call()
    def read(self) -> tuple[Any, Any]:
        """Returns `counts` and `seconds`, both read at the same time."""
        # The lock is needed, because a rule holds it while it has changed only some of its counters.
        with self.lock.hold():
            return self.counts.read_value(), self.seconds.read_value()

    def __repr__(self) -> str:
        return f"<RuleState {self.number} on {self.home}>"


def zeros(shape: Any, dtype: tf.DType, name: str) -> tf.Variable:
    """Creates a variable of zeros that can be initialized again after the loss of its server."""
    return tf.Variable(lambda: tf.zeros(shape, dtype), trainable=False, name=name)


def _number(value: Any) -> Any:
    return tf.cast(value, tf.int64) if tf.is_tensor(value) else _constant(value, tf.int64)


def _constant(value: Any, dtype: tf.DType) -> Any:
    """Returns a constant without control dependencies, so that the steps of one fused call share the constant."""
    with tf.control_dependencies(None):
        return tf.constant(value, dtype)


# The most values in the histogram of a summary.
_MOST_VALUES = 100_000


@dataclasses.dataclass(frozen=True)
class Staleness:
    """The staleness of the pushed gradients, in updates.

    Attributes:
      histogram: the number of gradients of each staleness, from 0 on; the last number also counts all larger staleness.
    """

    histogram: tuple[int, ...]

    @property
    def count(self) -> int:
        """The number of gradients."""
        return sum(self.histogram)

    @property
    def mean(self) -> float:
        """The mean; 0 without gradients."""
        return sum(staleness * count for staleness, count in enumerate(self.histogram)) / max(self.count, 1)

    @property
    def median(self) -> int:
        """The median; the lower of the two middle values if the number of gradients is even."""
        return self.percentile(50)

    @property
    def p99(self) -> int:
        """The 99th percentile."""
        return self.percentile(99)

    @property
    def max(self) -> int:
        """The maximum; 0 without gradients."""
        return max((staleness for staleness, count in enumerate(self.histogram) if count), default=0)

    def percentile(self, percent: float) -> int:
        """Returns the least staleness that `percent` of the gradients do not exceed; 0 without gradients."""
        # This is exact. `numpy.percentile` with weights rounds, and differed for 1 of 57,000 random histograms.
        cumulative = np.cumsum(self.histogram)
        return int(np.searchsorted(cumulative, percent / 100 * cumulative[-1])) if self.count else 0

    def __str__(self) -> str:
        return f"staleness mean {self.mean:.2f}, median {self.median}, p99 {self.p99}, max {self.max}"


@dataclasses.dataclass(frozen=True)
class RuleStatistics:
    """The counters of a rule at one point in time, since the beginning of training, including restored checkpoints.

    The counters contain all counts of a push or none, even while functions run. `staleness.count` is equal to
    `pushes`, or with `Delayed` to `updates`.

    Attributes:
      updates: the number of updates, which is the model's version.
      pushes: the number of pushes, including rejected pushes.
      rejected: the number of rejected pushes.
      pulls: the number of times that a worker pulled the model.
      bytes_pulled: the size of the pulls, including rows that were looked up.
      bytes_pushed: the size of the pushes.
      not_finite: the number of pushes with an infinite value or NaN, including rejected pushes.
      staleness: the staleness of the pushed gradients, including rejected gradients.
      clocks: by task index, the number of steps that each worker has finished, one for each accepted push; only workers
        that have run a step. The clock that a rule compares may be larger, by the head start of a late worker.
      idle_shares: by task index, the share of the time, from 0 to 1, in which each worker has waited for the rule.
    """

    updates: int
    pushes: int
    rejected: int
    pulls: int
    bytes_pulled: int
    bytes_pushed: int
    not_finite: int
    staleness: Staleness
    clocks: dict[int, int]
    idle_shares: dict[int, float]

    @classmethod
    def of(cls, state: RuleState) -> "RuleStatistics":
        """Reads the state of a rule.

        Raises:
          tf.errors.OpError: the home server does not answer.
        """
        counts, seconds = (tensor.numpy() for tensor in state.read())
        named, histogram, steps = np.split(counts, [HISTOGRAM, STEPS])
        seen = np.flatnonzero((seconds[:, FIRST_SEEN] > 0) | (steps > 0))
        lengths = np.maximum(seconds[:, LAST_SEEN] - seconds[:, FIRST_SEEN], 1e-9)
        return cls(
            **dict(zip(COUNTS, map(int, named), strict=True)),
            staleness=Staleness(tuple(map(int, histogram[: int(histogram.nonzero()[0].max(initial=0)) + 1]))),
            clocks={int(worker): int(steps[worker]) for worker in seen},
            idle_shares={int(worker): float(min(seconds[worker, WAITED] / lengths[worker], 1.0)) for worker in seen},
        )

    def write_summaries(self, step: Any, prefix: str = "updates") -> None:
        """Writes TensorBoard summaries to the default `tf.summary` writer.

        Args:
          step: an integer.
          prefix: the prefix of the summaries' names.
        """
        for name in COUNTS:
            tf.summary.scalar(f"{prefix}/{name}", getattr(self, name), step=step)
        for name in ("mean", "median", "p99", "max"):
            tf.summary.scalar(f"{prefix}/staleness/{name}", float(getattr(self.staleness, name)), step=step)
        counts = np.array(self.staleness.histogram)
        # The histogram is scaled down: a value for each gradient of a long training would take gigabytes.
        shown = np.ceil(counts * min(1.0, _MOST_VALUES / max(1, counts.sum()))).astype(np.int64)
        tf.summary.histogram(f"{prefix}/staleness", np.repeat(np.arange(len(counts)), shown), step=step)
        for worker, share in self.idle_shares.items():
            tf.summary.scalar(f"{prefix}/idle_share/worker_{worker}", share, step=step)

    def __str__(self) -> str:
        idle = ", ".join(f"{share:.0%}" for share in self.idle_shares.values())
        not_finite = f"{self.not_finite} NOT FINITE, " if self.not_finite else ""
        return (
            f"{self.updates} updates, {self.rejected} of {self.pushes} gradients rejected, {not_finite}"
            f"{self.staleness}; "
            f"{self.pulls} pulls; {self.bytes_pulled / 1e6:.1f} MB pulled, {self.bytes_pushed / 1e6:.1f} MB pushed; "
            f"workers idle {idle or 'never'}"
        )


# Before a waiting worker asks again, it pauses for this number of seconds times the number of waiting workers. So all
# waiting workers together ask the home server a thousand times a second.
PAUSE = 1e-3


class Gate:
    """Lets workers begin a step one by one, each as soon as a decision allows it.

    A worker that may not begin asks again after a pause, on its own machine. A wake-up call from another worker could
    be lost if that worker dies. Idle and lost workers hold up nobody, because the client dismisses them.

    `may_begin` is called with a worker's index and clock, on the home server and under the state's lock. It returns
    whether the worker may begin, a bool scalar.
    """

    def __init__(
        self, strategy: ParameterServerStrategy, state: RuleState, may_begin: Callable[[Any, Any], Any]
    ) -> None:
        self._strategy = strategy
        self._state = state
        self._may_begin = may_begin
        strategy.extended.services.add_idle_callback(self.dismiss)

    def wait_open(self) -> Any:
        """Waits until the calling worker may begin; records its step as in flight, and returns the version."""
        services = self._strategy.extended.services
        worker, connection = services.worker_index(), services.connection_number()
        began = tf.timestamp()
        # `_ask` is traced once, and called in two places.
        ask = tf.function(self._ask, autograph=False)
        answer = ask(worker, connection, tf.constant(0.0, tf.float64))

        def ask_again(_: Any, waiting: Any, __: Any) -> Any:
            with tf.control_dependencies([pause(PAUSE * tf.cast(waiting, tf.float64))]):
                waited = tf.timestamp() - began
            return ask(worker, connection, waited)

        return tf.while_loop(lambda may, *_: tf.logical_not(may), ask_again, answer, parallel_iterations=1)[2]

    def _ask(self, worker: Any, connection: Any, waited: Any) -> tuple[Any, Any, Any]:
        """Returns whether the worker may begin, the number of waiting workers (itself included), and the version."""
        state, workers = self._state, self._state.workers
        with state.lock.hold([worker, connection, waited]):
            # An abandoned call on a closed connection must not count as a call of the worker.
            is_own = tf.debugging.assert_greater_equal(
                connection, workers.fence.sparse_read(worker), "This call was abandoned; its worker has a newer one."
            )
            with tf.control_dependencies([is_own]):
                workers.fence.scatter_nd_update([[worker]], [connection])
                # An inactive worker joins at the slowest active clock, or at the greatest clock if no worker is active.
                clock, slowest = state.clocks.sparse_read(worker), state.slowest_clock(besides=worker)
                slowest = tf.where(slowest == NO_CLOCK, tf.reduce_max(state.clocks.read_value()), slowest)
                rejoined = tf.function(decisions.rejoined_clock)(clock, slowest)
                clock = tf.where(workers.is_active.sparse_read(worker), clock, rejoined)
                state.clocks.scatter_nd_update([[worker]], [clock])
                workers.is_active.scatter_nd_update([[worker]], [True])
                may = self._may_begin(worker, clock)
            version = state.version.read_value()
            in_flight = tf.where(may, version, tf.constant(NO_STEP, tf.int64))
            workers.pulled_version.scatter_nd_update([[worker]], [in_flight])
            workers.is_waiting.scatter_nd_update([[worker]], [tf.logical_not(may)])
            state.record_seen(worker, tf.where(may, waited, tf.zeros_like(waited)))
            waiting = tf.math.count_nonzero(workers.is_waiting.read_value())
        return may, waiting, version

    @client_may_call(tf.TensorSpec([], tf.int64))
    def dismiss(self, worker: Any) -> None:
        """Records, on the client, that a worker has no step in flight, so that no other worker waits for it.

        If the home server is down, its record of the worker is lost, too.
        """
        workers = self._state.workers
        with self._state.lock.hold([worker]):
            workers.is_active.scatter_nd_update([[worker]], [False])
            workers.is_waiting.scatter_nd_update([[worker]], [False])
            workers.pulled_version.scatter_nd_update([[worker]], tf.constant([NO_STEP], tf.int64))


def pause(seconds: Any) -> Any:
    """Returns a tensor that is available after `seconds`, a float64 scalar, without using the processor."""
    once = tf.raw_ops.TensorDataset(components=[tf.constant(0)], output_shapes=[[]])
    types = {"output_types": [tf.int32], "output_shapes": [[]]}
    slept = tf.raw_ops.SleepDataset(input_dataset=once, sleep_microseconds=tf.cast(seconds * 1e6, tf.int64), **types)
    # DatasetToSingleElement asks for a second element, which would cost a second pause.
    first = tf.raw_ops.TakeDataset(input_dataset=slept, count=tf.constant(1, tf.int64), **types)
    return tf.raw_ops.DatasetToSingleElement(dataset=first, **types)[0]
