"""Where the workers' models meet: the latest of each, on the parameter server that has the shared one.

    worker's row --> | row of worker 0 |
                     | row of worker 1 |  total --> mean of those present --> the shared variables, and the worker
                     | ...             |

It promises that an averaging costs the same however many workers there are, since the sum of all rows is kept; and that
a worker that has left counts no more, whatever a forgotten call of its still brings.
"""

import contextlib
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.failure_table import UNREACHED
from coordinator.updates.state.rule_state import MOST_WORKERS, zeros
from coordinator.updates.state.server_mutex import Exclusive, built


class AverageBoard:
    """The latest local model of each worker, as far as its variables are on one parameter server.

    It is in no checkpoint, and empty after its server was lost. It has room for as many workers as have brought a
    model. A model is kept as one row of float32, or of float64 if one of the variables is; the sum of all rows is
    float64, so that it does not drift as rows are replaced.

    Args:
      numbers: the positions of the variables in the model.
      variables: they themselves; they always get the mean.
      lock: of their server. It is held to look at all this and change it.

    Raises:
      ValueError: the shape of a variable is not known.
    """

    def __init__(self, numbers: Sequence[int], variables: Sequence[Any], lock: Exclusive) -> None:
        self.numbers = tuple(numbers)
        self.device = lock.device
        self._variables = list(variables)
        self._lock = lock
        self._sizes = [_size(variable) for variable in variables]
        self._dtype = tf.float64 if any(variable.dtype == tf.float64 for variable in variables) else tf.float32
        with tf.distribute.get_strategy().extended.colocate_vars_with(self._variables[0]):
            # A list of rows. A variable of an unknown number of rows would end the server that is told of its shape.
            self._rows = tf.Variable(self._no_rows, dtype=tf.variant, shape=[], trainable=False, name="local_models")
            self._total = zeros([sum(self._sizes)], tf.float64, "total_of_models")
            self._is_present = zeros([MOST_WORKERS], tf.bool, "has_model")
            # The newest connection that a worker was seen with.
            self._fence = zeros([MOST_WORKERS], tf.int64, "fence")
            self._generation = zeros([], tf.int64, "generation")
        signature = [tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.bool)]
        self._remove = tf.function(self._build_removal, input_signature=signature, autograph=False)

    def exchange(self, values: Sequence[Any], worker: Any, connection: Any, generation: Any) -> tuple[list[Any], Any]:
        """Puts a worker's model in its row, and the mean of all that are present into the shared variables.

        Built in a scheduled function; all tensors are on this server.

        Args:
          values: of the variables.
          worker: its index, an int64 scalar.
          connection: the number of its connection, an int64 scalar.
          generation: of the model, an int64 scalar. The first of a newer generation empties the board.

        Returns:
          The mean, like `values`, and whether the model was taken, a bool scalar. One of an older generation, or from
          a former connection, is not, and is returned as it came.
        """
        with tf.device(self.device):
            row = tf.concat([tf.reshape(tf.cast(value, self._dtype), [-1]) for value in values], 0)
        with self._lock.hold([row, worker, connection, generation]):
            present = self._generation.read_value()
            tf.cond(generation > present, lambda: self._begin_anew(generation), tf.no_op)
            is_taken = tf.logical_and(generation >= present, connection >= self._fence.sparse_read(worker))
            mean = tf.cond(is_taken, lambda: self._put(row, worker, connection), lambda: row)
            return self._unpacked(mean), tf.identity(is_taken)

    def remove(self, worker: int, *, is_lost: bool) -> None:
        """Takes a worker's model away until it brings another one; called on the client.

        Args:
          worker: its index.
          is_lost: its connection is no more; what still comes by it is not taken.
        """
        # If the server is away, what is on this board is gone when it returns.
        with contextlib.suppress(*UNREACHED):
            self._remove(tf.constant(worker, tf.int64), tf.constant(is_lost))

    # A call that is cancelled may stop anywhere below, and its worker rests then. So removing it makes good the total,
    # and until then a row counts no sooner than it is there.

    def _begin_anew(self, generation: Any) -> Any:
        with built() as operations:
            self._is_present.assign(tf.zeros([MOST_WORKERS], tf.bool), read_value=False)
            self._total.assign(tf.zeros([sum(self._sizes)], tf.float64), read_value=False)
            self._rows.assign(self._no_rows(), read_value=False)
        with tf.control_dependencies(operations):
            self._generation.assign(generation, read_value=False)
        return tf.no_op()

    def _put(self, row: Any, worker: Any, connection: Any) -> Any:
        """Replaces the worker's row, and returns the new mean after it was written to the shared variables."""
        rows, index = self._rows.read_value(), tf.cast(worker, tf.int32)
        length = tf.maximum(tf.raw_ops.TensorListLength(input_handle=rows), index + 1)
        rows = tf.raw_ops.TensorListResize(input_handle=rows, size=length)
        former = tf.raw_ops.TensorListGetItem(
            input_handle=rows, index=index, element_shape=row.shape, element_dtype=row.dtype
        )
        former = tf.where(self._is_present.sparse_read(worker), former, tf.zeros([], row.dtype))
        rows = tf.raw_ops.TensorListSetItem(input_handle=rows, index=index, item=row)
        with tf.control_dependencies([former]):
            is_there = self._rows.assign(rows, read_value=False)
        with tf.control_dependencies([is_there]):
            self._is_present.scatter_nd_update([[worker]], [True])
            self._fence.scatter_nd_update([[worker]], [connection])
            self._total.assign_add(tf.cast(row, tf.float64) - tf.cast(former, tf.float64), read_value=False)
            return self._share_mean()

    def _share_mean(self) -> Any:
        count = tf.math.count_nonzero(self._is_present.read_value())
        mean = tf.cast(self._total.read_value() / tf.cast(count, tf.float64), self._dtype)
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

    def _build_removal(self, worker: Any, is_lost: Any) -> None:
        with self._lock.hold([worker, is_lost]):
            self._is_present.scatter_nd_update([[worker]], [False])
            # A later connection has a greater number.
            self._fence.scatter_nd_add([[worker]], [tf.cast(is_lost, tf.int64)])
            rows = tf.raw_ops.TensorListStack(
                input_handle=self._rows.read_value(), element_shape=[sum(self._sizes)], element_dtype=self._dtype
            )
            is_present = self._is_present.read_value()[: tf.shape(rows)[0], tf.newaxis]
            rest = tf.where(is_present, tf.cast(rows, tf.float64), tf.zeros([], tf.float64))
            self._total.assign(tf.reduce_sum(rest, 0), read_value=False)

    def __repr__(self) -> str:
        return f"<AverageBoard: {len(self._variables)} variables on {self.device}>"


def _size(variable: Any) -> int:
    size = variable.shape.num_elements()
    if size is None:
        raise ValueError(
            f"The variable {variable.name!r} has the shape {variable.shape}, and only variables of a known shape can "
            "be averaged. Make it with one, or give it as one of the embeddings."
        )
    return int(size)
