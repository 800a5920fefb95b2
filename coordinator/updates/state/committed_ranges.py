"""Which ranges of examples a rule has committed, so that none is committed twice.

    number of a range    ... 65535  65536  65537 ...      a vector of WINDOW slots on the rule's home server:
    its slot             ... 65535      0      1 ...      each holds 1 + the number of the last range committed there

`Epochs` hands out no range that is WINDOW or more above the first one that is not done. So when a slot holds a larger
number than that of a range, that range is done.

The vector is read and changed in the critical section in which the push is logged. Its operations are all on the home
server, and once begun they finish, even if the worker that began them dies: so a push is committed and its range
recorded, or neither.

A checkpoint has the ranges that are committed, except those of which gradients still wait for an update: they are in
no checkpoint, and `Epochs` saves them as not done.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator.data.epochs import Epochs
from coordinator.data.ledger import WINDOW
from coordinator.ps_strategy.parameter_server_strategy import ParameterServerStrategy
from coordinator.ps_strategy.tensorflow_internals.reads import graph_around
from coordinator.ps_strategy.tensorflow_internals.server_mutex import ServerMutex, client_may_call

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
        """See `CommitRecord`."""
        return [int(number) for number in self.read_waiting().numpy()]

    def recover(self) -> None:
        """See `CommitRecord`."""
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
