"""The gate at which a worker waits until its rule lets it begin a step.

Which ranges of examples a rule has committed, so that none is committed twice.

    number of a range    ... 65535  65536  65537 ...      a vector of WINDOW slots on the rule's home server:
    its slot             ... 65535      0      1 ...      each holds 1 + the number of the last range committed there

`Epochs` hands out no range that is WINDOW or more above the first one that is not done. So when a slot holds a larger
number than that of a range, that range is done.

The vector is read and changed in the critical section in which the push is logged. Its operations are all on the home
server, and once begun they finish, even if the worker that began them dies: so a push is committed and its range
recorded, or neither.

A checkpoint has the ranges that are committed, except those of which gradients still wait for an update: they are in
no checkpoint, and `Epochs` saves them as not done.

The state of a rule on a parameter server: the model version, the workers' clocks, and counters.

All of it is on one server, the rule's *home*, so that a decision is made under one mutex without asking another
machine. What a checkpoint needs is in variables of the module; the steps in flight are not, since none survives a
restart.
"""

import contextlib
import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator.data.epochs import Epochs
from coordinator.data.ledger import WINDOW
from coordinator.ps_strategy.membership.bounded_calls import UNREACHED
from coordinator.ps_strategy.membership.cluster_definition import MAX_WORKERS
from coordinator.ps_strategy.parameter_server_strategy import ParameterServerStrategy
from coordinator.ps_strategy.tensorflow_internals.shared_variable import ServerMutex, client_may_call, graph_around
from coordinator.updates import decisions

# Where the number of a range is in the vector that `Epochs.on` yields.
_NUMBER = 3
_POSITIONS_SIZE = 5


class CommittedRanges(tf.train.experimental.PythonState):
    """The ranges of `Epochs` that a rule has committed. Created in the strategy's scope.

    Args:
      strategy: of the rule.
      epochs: hand out the ranges.
      beside: a variable on the rule's home server.
      lock: protects this record.

    Attributes:
      read_waiting: returns the numbers of the ranges whose gradients wait for an update; set by the rule.
    """

    def __init__(
        self, strategy: ParameterServerStrategy, epochs: Epochs, beside: tf.Variable, lock: ServerMutex
    ) -> None:
        self.epochs = epochs
        self.read_waiting: Callable[[], Any] = lambda: tf.zeros([0], tf.int64)
        self._lock = lock
        with strategy.extended.colocate_vars_with(beside):
            self._slots = tf.Variable(lambda: tf.zeros([WINDOW], tf.int64), trainable=False, name="committed_ranges")
        self._is_restored = False
        self._restorations = epochs.restorations
        strategy.extended.services.variables.add_recovered(self)
        epochs.add_record(self)

    def is_committed(self, number: Any) -> Any:
        """Returns whether a range is committed or done, a bool scalar; on the home server, under the state's lock."""
        return self._slots.sparse_read(number % WINDOW) > number

    def commit(self, number: Any, is_accepted: Any) -> None:
        """Records that a range is committed if its push is accepted; on the home server, under the state's lock."""
        self._slots.scatter_nd_max([[number % WINDOW]], [tf.where(is_accepted, number + 1, tf.zeros_like(number))])

    def waiting(self) -> list[int]:
        """See `Epochs.add_record`."""
        return [int(number) for number in self.read_waiting().numpy()]

    def recover(self) -> None:
        """See `Epochs.add_record`."""
        # Else a range that the epochs hand out again would be refused.
        if self._is_restored != (self.epochs.restorations != self._restorations):
            self._assign(np.zeros([WINDOW], np.int64))
        self._is_restored, self._restorations = False, self.epochs.restorations

    def serialize(self) -> bytes:
        """Returns the ranges as a string: the first one, and a bit for each of `WINDOW` from there on.

        Raises:
          tf.errors.OpError: the home server does not answer.
        """
        slots = self._read().numpy()
        numbers = np.setdiff1d(slots[slots > 0] - 1, self.waiting())
        first = max(0, int(numbers.max(initial=0)) + 1 - WINDOW)
        bits = np.zeros([WINDOW], np.bool_)
        bits[numbers[numbers >= first] - first] = True
        return np.array(first, "<i8").tobytes() + np.packbits(bits).tobytes()

    def deserialize(self, string_value: bytes) -> None:
        """Replaces the ranges; TensorFlow calls it to restore a checkpoint.

        Raises:
          tf.errors.OpError: the home server does not answer.
        """
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

    Args:
      positions: the range, as `push` was given it; None for none.
      once: the epochs of the rule.
      key: of the rule; of the collection in which a graph stores the ranges that it pushes.

    Raises:
      ValueError: it is missing or not wanted, or pushed by the function already.
      TypeError: it is not the vector that `Epochs.on` yields.
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
    # Of data that the client reads, the range comes with the examples.
    vector = tf.convert_to_tensor(positions[0] if isinstance(positions, tuple) else positions)
    if vector.dtype != tf.int64 or not vector.shape.is_compatible_with([_POSITIONS_SIZE]):
        raise TypeError(
            f"positions must be the vector that epochs.on(strategy) yields, int64 [{_POSITIONS_SIZE}], as the function "
            f"was given it; got {positions!r}."
        )
    graph = tf.compat.v1.get_default_graph()
    pushed = graph.get_collection_ref(f"{key}/ranges")
    if any(each is vector for each in pushed) or _is_in_loop(graph, vector):
        raise ValueError(
            "The function pushes several times for one range, of which a rule with once=epochs would refuse all but "
            "the first. Push once for all examples of the range, or use batches_per_range=1."
        )
    pushed.append(vector)
    return vector[_NUMBER]


def _is_in_loop(graph: Any, tensor: Any) -> bool:
    """Returns whether a graph is in a loop, and the tensor outside of it."""
    while graph is not None and graph is not tensor.graph:
        if graph.name.startswith("while_body"):
            return True
        graph = graph_around(graph)
    return False


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
