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
# How many steps' times are kept.
_KEPT = 100_000


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
            self._ended = tf.Variable(tf.zeros([_KEPT], tf.float64))

    def run(self, work: str, seconds: float) -> dict[str, float]:
        """See `Workload`, once: `pause`, the longest time without a finished step, in seconds; `steps` a second."""
        iterator = self._side.iterator(lambda _: criteo_like(int(work)))
        train = plain_step(self._model)

        @tf.function
        def step(batches: tf.data.Iterator) -> None:
            train(batches)
            # By the clock of the worker: the client may be too busy to look.
            self._ended.scatter_nd_update([[self._count.assign_add(1) % _KEPT]], [tf.timestamp()])

        self._side.run(step, (iterator,), 1)
        # Still runs when the process ends.
        steps = threading.Thread(target=self._side.run, args=(step, (iterator,), _MANY), daemon=True)
        began = time.time()
        steps.start()
        time.sleep(seconds)
        times = self._ended.numpy()
        ended = sorted(float(each) for each in times if began <= each <= began + seconds)
        pauses = [after - before for before, after in zip([began, *ended], [*ended, began + seconds], strict=True)]
        return {"pause": max(pauses), "steps": len(ended) / seconds}
