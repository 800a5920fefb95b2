"""The recommender with the optimizations for training across servers written by hand.

All dense variables of a parameter server are one variable, so that they are read and updated at once; several steps are
one function. Its speed is what a library can hope for that is given the plain model.
"""

from typing import Any

import tensorflow as tf

from benchmarks.contestants.recommender_model import dense_values, mean_cross_entropy, table_values

# Which of the dense variables each server has.
_DENSE_OF_SERVERS = ((0, 1), (2, 3, 4, 5))


class PackedRecommenderModel:
    """Variables in the caller's scope: a table and a vector for each of two servers.

    Attributes:
      tables: as those of `RecommenderModel`.
      vectors: the dense variables of each server, concatenated.
    """

    def __init__(self) -> None:
        self.tables = [tf.Variable(value) for value in table_values()]
        values = dense_values()
        self._shapes = [value.shape for value in values]
        self.vectors = [
            tf.Variable(tf.concat([tf.reshape(values[number], [-1]) for number in numbers], 0))
            for numbers in _DENSE_OF_SERVERS
        ]

    @property
    def variables(self) -> list[tf.Variable]:
        """The tables, then the vectors."""
        return [*self.tables, *self.vectors]

    def gradients(self, counts: tf.Tensor, rows: tf.Tensor, labels: tf.Tensor) -> list[Any]:
        """See `RecommenderModel.gradients`."""
        with tf.GradientTape() as tape:
            loss = mean_cross_entropy(self.tables, self._dense(), counts, rows, labels)
        return tape.gradient(loss, self.variables)

    def _dense(self) -> list[tf.Tensor]:
        dense = {}
        for numbers, vector in zip(_DENSE_OF_SERVERS, self.vectors, strict=True):
            parts = tf.split(vector.read_value(), [self._shapes[number].num_elements() for number in numbers])
            for number, part in zip(numbers, parts, strict=True):
                dense[number] = tf.reshape(part, self._shapes[number])
        return [dense[number] for number in sorted(dense)]
