"""The sum of the workers' latest models, on the parameter server that has the shared one.

    worker's row --> | row of worker 0 |
                     | row of worker 1 |  total --> mean of those present --> the shared variables, and the worker
                     | ...             |

It promises that the cost of an averaging does not depend on the number of workers, since the sum of all rows is stored;
and that a worker that has left does not count, even if an abandoned call of it still adds its model.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.membership.bounded_calls import UNREACHED
from coordinator.ps_strategy.membership.cluster_definition import MAX_WORKERS
from coordinator.ps_strategy.tensorflow_internals.server_mutex import ServerMutex, client_may_call, operations_added
from coordinator.updates.state.rule_state import zeros


class ModelSum:
    """The latest local model of each worker: its variables on one parameter server.

    It is in no checkpoint, and empty after its server was lost. It grows to the number of workers that have added a
    model. A model is stored as one row of float32, or of float64 if one of the variables is; the sum of all rows is
    float64, so that it does not drift as rows are replaced.

    Args:
      numbers: the positions of the variables in the model.
      variables: the shared variables; each averaging assigns the mean to them.
      lock: of their server; protects all of this.

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
            self._rows = tf.Variable(self._no_rows, dtype=tf.variant, shape=[], trainable=False, name="local_models")
            self.total = zeros([sum(self._sizes)], tf.float64, "total_of_models")
            self._is_present = zeros([MAX_WORKERS], tf.bool, "has_model")
            # The newest connection of each worker.
            self._fence = zeros([MAX_WORKERS], tf.int64, "fence")
            self._generation = zeros([], tf.int64, "generation")

    def exchange(self, values: Sequence[Any], worker: Any, connection: Any, generation: Any) -> tuple[list[Any], Any]:
        """Replaces a worker's row, and assigns the mean of all rows to the shared variables.

        Called in a scheduled function; all tensors are on this server.

        Args:
          values: of the variables.
          worker: its index, an int64 scalar.
          connection: the number of its connection, an int64 scalar.
          generation: of the model, an int64 scalar. The first model of a newer generation removes all rows.

        Returns:
          The mean, like `values`, and whether the model was accepted, a bool scalar. A model of an older generation or
          connection is not, and is returned as it is.
        """
        with tf.device(self.device):
            row = tf.concat([tf.reshape(tf.cast(value, self._dtype), [-1]) for value in values], 0)
        with self.lock.hold([row, worker, connection, generation]):
            current = self._generation.read_value()
            tf.cond(generation > current, lambda: self._reset(generation), tf.no_op)
            is_accepted = tf.logical_and(generation >= current, connection >= self._fence.sparse_read(worker))
            mean = tf.cond(is_accepted, lambda: self._put(row, worker, connection), lambda: row)
            return self._unpacked(mean), tf.identity(is_accepted)

    def remove(self, worker: int, *, is_lost: bool) -> None:
        """Removes a worker's model until it adds another one; called on the client.

        Args:
          worker: its index.
          is_lost: whether its connection is closed; later models of this connection are rejected.
        """
        # If the server is down, its rows are lost with it.
        with contextlib.suppress(*UNREACHED):
            self._remove(worker, is_lost)

    # A cancelled call may stop anywhere below. Its worker is idle then, and its removal recomputes the total. Until
    # then, a row counts only once it is stored.

    def _reset(self, generation: Any) -> Any:
        with operations_added() as operations:
            self._is_present.assign(tf.zeros([MAX_WORKERS], tf.bool), read_value=False)
            self.total.assign(tf.zeros([sum(self._sizes)], tf.float64), read_value=False)
            self._rows.assign(self._no_rows(), read_value=False)
        with tf.control_dependencies(operations):
            self._generation.assign(generation, read_value=False)
        return tf.no_op()

    def _put(self, row: Any, worker: Any, connection: Any) -> Any:
        """Replaces the worker's row, assigns the new mean to the shared variables, and returns it."""
        rows, index = self._rows.read_value(), tf.cast(worker, tf.int32)
        length = tf.maximum(tf.raw_ops.TensorListLength(input_handle=rows), index + 1)
        rows = tf.raw_ops.TensorListResize(input_handle=rows, size=length)
        former = tf.raw_ops.TensorListGetItem(
            input_handle=rows, index=index, element_shape=row.shape, element_dtype=row.dtype
        )
        former = tf.where(self._is_present.sparse_read(worker), former, tf.zeros([], row.dtype))
        rows = tf.raw_ops.TensorListSetItem(input_handle=rows, index=index, item=row)
        with tf.control_dependencies([former]):
            stored = self._rows.assign(rows, read_value=False)
        with tf.control_dependencies([stored]):
            self._is_present.scatter_nd_update([[worker]], [True])
            self._fence.scatter_nd_update([[worker]], [connection])
            self.total.assign_add(tf.cast(row, tf.float64) - tf.cast(former, tf.float64), read_value=False)
            return self._share_mean()

    def _share_mean(self) -> Any:
        count = tf.math.count_nonzero(self._is_present.read_value())
        mean = tf.cast(self.total.read_value() / tf.cast(count, tf.float64), self._dtype)
        for variable, value in zip(self._variables, self._unpacked(mean), strict=True):
            variable.assign(value, read_value=False)
        return mean

    def _no_rows(self) -> Any:
        return tf.raw_ops.EmptyTensorList(
            element_shape=[sum(self._sizes)], max_num_elements=-1, element_dtype=self._dtype
        )

    def _unpacked(self, row: Any) -> list[Any]:
        return [
            tf.cast(tf.reshape(part, variable.shape), variable.dtype)
            for part, variable in zip(tf.split(row, self._sizes), self._variables, strict=True)
        ]

    @client_may_call(tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.bool))
    def _remove(self, worker: Any, is_lost: Any) -> None:
        with self.lock.hold([worker, is_lost]):
            self._is_present.scatter_nd_update([[worker]], [False])
            # A later connection has a greater number.
            self._fence.scatter_nd_add([[worker]], [tf.cast(is_lost, tf.int64)])
            rows = tf.raw_ops.TensorListStack(
                input_handle=self._rows.read_value(), element_shape=[sum(self._sizes)], element_dtype=self._dtype
            )
            is_present = self._is_present.read_value()[: tf.shape(rows)[0], tf.newaxis]
            rest = tf.where(is_present, tf.cast(rows, tf.float64), tf.zeros([], tf.float64))
            self.total.assign(tf.reduce_sum(rest, 0), read_value=False)


def _size(variable: Any) -> int:
    size = variable.shape.num_elements()
    if size is None:
        raise ValueError(
            f"The variable {variable.name!r} has the shape {variable.shape}, and only variables of a known shape can "
            "be averaged. Create it with one, or pass it as one of the embeddings."
        )
    return int(size)
