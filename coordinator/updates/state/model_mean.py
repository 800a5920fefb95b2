"""The mean of the workers' models, on the parameter server that has the shared one: it moves by what workers change.

    store      worker's change --> | changes of worker 0 |  2 rows, by the parity of the change's number
                                   | changes of worker 1 |
    advance    changes that are counted by now (see `AveragingControl`) --> mean --> the shared variables, the worker

A change is stored on all servers, then counted, and then added by each server when any worker asks it for the mean. So
a worker that dies leaves no change on a part of the servers, and a change that is stored again is added once.

It promises a worker the mean of one moment on all servers: of the changes that were counted when it asked. Where the
mean has moved on since, the server subtracts the latest changes again.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.membership.cluster_definition import MAX_WORKERS
from coordinator.ps_strategy.tensorflow_internals.server_mutex import ServerMutex, operations_added
from coordinator.updates.state.rule_state import zeros

# What a server knows of each worker: the numbers of the changes in the rows for even and odd numbers; of the changes
# that are in the mean, the number of the latest, that of the one before, and what the latest was divided by.
_EVEN, _ODD, _ADDED, _BEFORE, _DIVISOR = range(5)


class ModelMean:
    """The mean of the workers' models on one parameter server, and the latest changes of each worker.

    It is in no checkpoint. The first request of a newer generation replaces the mean by the shared variables. The mean
    is float64, so that it does not drift; a change is one row of float32, or of float64 if one of the variables is.

    Args:
      numbers: the positions of the variables in the model.
      variables: the shared variables; the mean is assigned to them when it moves.
      lock: of their server; protects all of this. What runs under it needs no other machine, and finishes once begun.

    Raises:
      ValueError: the shape of a variable is unknown.
    """

    def __init__(self, numbers: Sequence[int], variables: Sequence[Any], lock: ServerMutex) -> None:
        self.numbers = tuple(numbers)
        self.device = lock.device
        self._variables = list(variables)
        self.lock = lock
        self._sizes = [_size(variable) for variable in variables]
        self._dtype = tf.float64 if any(variable.dtype == tf.float64 for variable in variables) else tf.float32
        with tf.distribute.get_strategy().extended.colocate_vars_with(self._variables[0]):
            # A TensorList: a variable with an unknown number of rows would crash the server.
            self._rows = tf.Variable(self._no_rows, dtype=tf.variant, shape=[], trainable=False, name="changes")
            self._mean = zeros([sum(self._sizes)], tf.float64, "mean_of_models")
            self._known = zeros([5, MAX_WORKERS], tf.int64, "known_changes")
            self._generation = zeros([], tf.int64, "generation")

    def store(self, change: Sequence[Any], ids: Any) -> Any:
        """Stores a change of a worker's model; called in a scheduled function, with tensors on this server.

        Args:
          change: of the variables.
          ids: see `AveragingControl.count`.

        Returns:
          Whether it is stored, a bool scalar: not if it is of an older generation, or a later one is stored.
        """
        with tf.device(self.device):
            row = tf.concat([tf.reshape(tf.cast(part, self._dtype), [-1]) for part in change], 0)
            worker, _, generation, number = tf.unstack(ids[:4])
        with self.lock.hold([row, worker, number, generation]):
            is_current = self._begin(generation)
            stored = tf.gather(self._known.read_value(), worker, axis=1)[: _ODD + 1]
            is_stored = is_current & tf.reduce_all(number >= stored)
            tf.cond(is_stored, lambda: self._put(row, worker, number), tf.no_op)
            return tf.identity(is_stored)

    def advance(self, counted: Any) -> tuple[list[Any], Any]:
        """Adds all changes that are counted to the mean; called in a scheduled function.

        Args:
          counted: what `AveragingControl.count` has returned, on this server.

        Returns:
          The mean, like the variables, and 1 if it is of the moment of `counted`, otherwise 0, an int64 scalar. It is
          not if the latest two changes of a worker were added since, or models of a newer generation are known.
        """
        with self.lock.hold([counted]):
            (generation, numbers), (_, divisors) = (tf.split(row, [1, MAX_WORKERS]) for row in tf.unstack(counted))
            is_current = self._begin(generation[0])
            known = tf.unstack(self._known.read_value())
            is_new = is_current & (_in_row(known, numbers) == numbers) & (numbers > known[_ADDED])
            mean = tf.cond(tf.reduce_any(is_new), lambda: self._add(is_new, numbers, divisors, known), self._read)
            is_later = known[_ADDED] > numbers
            mean, is_of_moment = tf.cond(
                tf.reduce_any(is_later), lambda: self._without(is_later, numbers, known), lambda: (mean, is_current)
            )
            return self._unpacked(mean), tf.cast(is_current & is_of_moment, tf.int64)

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Opens a scope in which the mean changes as much as the shared variables do; under the lock."""
        before = self._shared()
        with operations_added() as changes:
            yield
        with tf.control_dependencies(changes):
            self._mean.assign_add(self._shared() - before, read_value=False)

    def _begin(self, generation: Any) -> Any:
        """Begins a newer generation; returns whether the given one is the newest, a bool scalar."""
        current = self._generation.read_value()

        def begin() -> Any:
            with operations_added() as operations:
                self._mean.assign(self._shared(), read_value=False)
                self._known.assign(tf.zeros([5, MAX_WORKERS], tf.int64), read_value=False)
                self._rows.assign(self._no_rows(), read_value=False)
            with tf.control_dependencies(operations):
                self._generation.assign(generation, read_value=False)
            return tf.no_op()

        with tf.control_dependencies([tf.cond(generation > current, begin, tf.no_op)]):
            return generation >= current

    def _put(self, row: Any, worker: Any, number: Any) -> Any:
        rows, index = self._rows.read_value(), _place(worker, number)
        length = tf.maximum(tf.raw_ops.TensorListLength(input_handle=rows), index + 1)
        rows = tf.raw_ops.TensorListResize(input_handle=rows, size=length)
        rows = tf.raw_ops.TensorListSetItem(input_handle=rows, index=index, item=row)
        with tf.control_dependencies([self._rows.assign(rows, read_value=False)]):
            self._known.scatter_nd_update([[number % 2, worker]], [number])
        return tf.no_op()

    def _add(self, is_new: Any, numbers: Any, divisors: Any, known: Sequence[Any]) -> Any:
        """Adds the counted changes of some workers to the mean, and returns it."""
        even, odd, added, before, divisor = known
        moved = self._moved(is_new, numbers, divisors)
        with tf.control_dependencies([self._mean.assign(moved, read_value=False)]):
            rows = [
                tf.where(is_new, numbers, added),
                tf.where(is_new, added, before),
                tf.where(is_new, divisors, divisor),
            ]
            self._known.assign(tf.stack([even, odd, *rows]), read_value=False)
        mean = tf.cast(moved, self._dtype)
        for variable, value in zip(self._variables, self._unpacked(mean), strict=True):
            variable.assign(value, read_value=False)
        return mean

    def _without(self, is_later: Any, numbers: Any, known: Sequence[Any]) -> tuple[Any, Any]:
        """Returns the mean without the latest change of some workers, and whether those before have these numbers."""
        _, _, added, before, divisor = known
        are_kept = (_in_row(known, added) == added) & (before == numbers)
        return tf.cast(self._moved(is_later, added, -divisor), self._dtype), tf.reduce_all(are_kept | ~is_later)

    def _moved(self, are_chosen: Any, numbers: Any, divisors: Any) -> Any:
        """Returns the mean plus a change of some workers, each divided by a number; float64."""
        rows, workers = self._rows.read_value(), tf.where(are_chosen)[:, 0]

        def add(count: Any, mean: Any) -> tuple[Any, Any]:
            worker = workers[count]
            row = tf.raw_ops.TensorListGetItem(
                input_handle=rows,
                index=_place(worker, numbers[worker]),
                element_shape=[sum(self._sizes)],
                element_dtype=self._dtype,
            )
            return count + 1, mean + tf.cast(row, tf.float64) / tf.cast(divisors[worker], tf.float64)

        # One by one, since there is one as a rule: a sum of several rows at once takes several times as long.
        state = tf.constant(0), self._mean.read_value()
        return tf.while_loop(lambda count, _: count < tf.size(workers), add, state, parallel_iterations=1)[1]

    def _read(self) -> Any:
        return tf.cast(self._mean.read_value(), self._dtype)

    def _shared(self) -> Any:
        return tf.concat(
            [tf.reshape(tf.cast(variable.read_value(), tf.float64), [-1]) for variable in self._variables], 0
        )

    def _no_rows(self) -> Any:
        return tf.raw_ops.EmptyTensorList(
            element_shape=[sum(self._sizes)], max_num_elements=-1, element_dtype=self._dtype
        )

    def _unpacked(self, row: Any) -> list[Any]:
        return [
            tf.cast(tf.reshape(part, variable.shape), variable.dtype)
            for part, variable in zip(tf.split(row, self._sizes), self._variables, strict=True)
        ]


def _in_row(known: Sequence[Any], numbers: Any) -> Any:
    """Returns the number of the change that is in the row for each of some numbers, one for each worker."""
    return tf.where(numbers % 2 == 0, known[_EVEN], known[_ODD])


def _place(worker: Any, number: Any) -> Any:
    """Returns where the change of a number is among the rows."""
    return tf.cast(2 * worker + number % 2, tf.int32)


def _size(variable: Any) -> int:
    size = variable.shape.num_elements()
    if size is None:
        raise ValueError(
            f"The variable {variable.name!r} has the shape {variable.shape}, and only variables of a known shape can "
            "be averaged. Create it with one, or pass it as one of the embeddings."
        )
    return int(size)
