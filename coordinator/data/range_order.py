"""The order in which the ranges of an epoch come, for sources whose ranges have consecutive examples."""

import tensorflow as tf

# How many places are computed at a time; it takes less than a millisecond.
_CHUNK = 1024


class RangeOrder:
    """A permutation of the ranges for each epoch, computed as far as it is needed.

    Args:
      count: the number of ranges of an epoch.
      shuffles: whether they are shuffled.
      seed: of the permutations.
    """

    def __init__(self, count: int, *, shuffles: bool, seed: int) -> None:
        self._count = count
        self._shuffles = shuffles
        self._seed = seed
        # Two, since those given back may be of the epoch before.
        self._chunks: dict[tuple[int, int], list[int]] = {}

    def range_at(self, epoch: int, place: int) -> int:
        """Returns which range comes at a place of an epoch."""
        if not self._shuffles:
            return place
        chunk, offset = divmod(place, _CHUNK)
        found = self._chunks.get((epoch, chunk))
        if found is None:
            found = self._permuted(epoch, chunk * _CHUNK)
            if len(self._chunks) >= 4:
                self._chunks.clear()
            self._chunks[epoch, chunk] = found
        return found[offset]

    def _permuted(self, epoch: int, begin: int) -> list[int]:
        with tf.init_scope(), tf.device("/device:CPU:0"):
            places = tf.range(begin, min(begin + _CHUNK, self._count), dtype=tf.int64)
            seed = tf.constant([self._seed, epoch], tf.int64)
            found = tf.random.experimental.index_shuffle(places, seed, tf.constant(self._count - 1, tf.int64))
            return [int(each) for each in found.numpy()]


def fingerprint(seed: int) -> tuple[int, ...]:
    """Returns some values of the permutation of a seed, by which a change of the algorithm is noticed."""
    with tf.init_scope(), tf.device("/device:CPU:0"):
        indices = tf.range(8, dtype=tf.int64)
        found = tf.random.experimental.index_shuffle(
            indices, tf.constant([seed, 0], tf.int64), tf.constant(999, tf.int64)
        )
        return tuple(int(each) for each in found.numpy())
