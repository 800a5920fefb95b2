"""The longest time without a finished step, while a training has just begun."""

import threading
import time

import tensorflow as tf

from benchmarks.contestants.criteo_like import criteo_like
from benchmarks.contestants.recommender_model import RecommenderModel
from benchmarks.contestants.recommender_steps import plain_step
from benchmarks.contestants.side import Side

# More than can be run: a join would wait for the slowest call, in which a larger one is built.
_MANY = 10_000_000
_INTERVAL = 0.005


class FirstSeconds:
    """A `Workload` of the recommender's steps at one batch size, such as `32`, from the end of the first step on.

    Args:
      side: runs them.
    """

    def __init__(self, side: Side) -> None:
        self._side = side
        with side.scope():
            self._model = RecommenderModel()
            self._count = tf.Variable(0, dtype=tf.int64)

    def run(self, work: str, seconds: float) -> dict[str, float]:
        """See `Workload`, once: `pause`, the longest time without a finished step, in seconds; `steps` a second."""
        iterator = self._side.iterator(lambda _: criteo_like(int(work)))
        train = plain_step(self._model)

        @tf.function
        def step(batches: tf.data.Iterator) -> None:
            train(batches)
            self._count.assign_add(1)

        self._side.run(step, (iterator,), 1)
        # Still runs when the process ends.
        steps = threading.Thread(target=self._side.run, args=(step, (iterator,), _MANY), daemon=True)
        first = self._count.numpy()
        began = time.perf_counter()
        steps.start()
        pause = self._longest_pause(began + seconds)
        rate = (self._count.numpy() - first) / (time.perf_counter() - began)
        return {"pause": pause, "steps": float(rate)}

    def _longest_pause(self, end: float) -> float:
        """Reads the number of finished steps again and again until a time of the `time.perf_counter` clock."""
        longest, last, changed = 0.0, self._count.numpy(), time.perf_counter()
        while (now := time.perf_counter()) < end:
            if (count := self._count.numpy()) != last:
                last, changed = count, now
            longest = max(longest, now - changed)
            time.sleep(_INTERVAL)
        return longest
