"""A recommender in plain TensorFlow: rows of embedding tables, beside counts, into a network of three layers.

Its shape is that of DLRM (Naumov et al., arXiv 1906.00091) without the products of embeddings.
"""

import itertools
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from benchmarks.contestants.criteo_like import CATEGORIES, COUNTS, ROWS

DEPTH = 16
TABLES = 2
WIDTHS = (COUNTS + CATEGORIES * DEPTH, 64, 32, 1)
LEARNING_RATE = 0.01


class RecommenderModel:
    """Variables in the caller's scope, in an order that places one table on each of two servers.

    Attributes:
      tables: the embedding in equal parts, each [130,000, 16].
      dense: the kernel and the bias of each layer.
    """

    def __init__(self) -> None:
        self.tables = [tf.Variable(value) for value in table_values()]
        self.dense = [tf.Variable(value) for value in dense_values()]

    @property
    def variables(self) -> list[tf.Variable]:
        """The tables, then the dense variables."""
        return [*self.tables, *self.dense]

    def gradients(self, counts: tf.Tensor, rows: tf.Tensor, labels: tf.Tensor) -> list[Any]:
        """Returns the gradients of the mean cross entropy of a batch: `tf.IndexedSlices`, then dense ones."""
        with tf.GradientTape() as tape:
            loss = mean_cross_entropy(self.tables, self.dense, counts, rows, labels)
        return tape.gradient(loss, self.variables)


def table_values() -> list[tf.Tensor]:
    """Returns the initial values of the tables."""
    return [_normal(ROWS // TABLES, DEPTH, number=number) for number in range(TABLES)]


def dense_values() -> list[tf.Tensor]:
    """Returns the initial values of the kernel and the bias of each layer."""
    values = []
    for number, (inputs, outputs) in enumerate(itertools.pairwise(WIDTHS)):
        values += [_normal(inputs, outputs, number=TABLES + number), tf.zeros([outputs])]
    return values


def mean_cross_entropy(
    tables: Sequence[Any], dense: Sequence[Any], counts: tf.Tensor, rows: tf.Tensor, labels: tf.Tensor
) -> tf.Tensor:
    """Returns the loss of a batch.

    Args:
      tables: the parts of the embedding.
      dense: the kernel and the bias of each layer.
      counts: float32 `[batch, COUNTS]`.
      rows: int64 `[batch, CATEGORIES]`.
      labels: float32 `[batch, 1]`.
    """
    return loss_of_embedded(tf.nn.embedding_lookup(tables, rows), dense, counts, labels)


def loss_of_embedded(embedded: tf.Tensor, dense: Sequence[Any], counts: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
    """Returns the loss of a batch from its rows of the embedding, `[batch, CATEGORIES, DEPTH]`."""
    hidden = tf.concat([counts, tf.reshape(embedded, [-1, CATEGORIES * DEPTH])], axis=1)
    for layer in range(len(WIDTHS) - 1):
        kernel, bias = dense[2 * layer : 2 * layer + 2]
        hidden = tf.matmul(hidden, kernel) + bias
        hidden = tf.nn.relu(hidden) if layer < len(WIDTHS) - 2 else hidden
    return tf.reduce_mean(tf.nn.sigmoid_cross_entropy_with_logits(labels, hidden))


def descend(variable: tf.Variable, gradient: Any, learning_rate: Any = LEARNING_RATE) -> None:
    """Applies a step of plain SGD; for a table, to the rows that have a gradient."""
    if isinstance(gradient, tf.IndexedSlices):
        variable.scatter_sub(tf.IndexedSlices(learning_rate * gradient.values, gradient.indices))
    else:
        variable.assign_sub(learning_rate * gradient)


def _normal(*shape: int, number: int) -> tf.Tensor:
    return tf.random.stateless_normal(shape, [1, number], stddev=shape[0] ** -0.5)
