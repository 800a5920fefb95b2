"""Training steps of the recommender with one table, in parts on all parameter servers."""

import tensorflow as tf

from benchmarks.contestants.criteo_like import criteo_like
from benchmarks.contestants.rate_meter import RateMeter
from benchmarks.contestants.recommender_model import RecommenderModel, dense_values, table_values
from benchmarks.contestants.recommender_steps import plain_step
from benchmarks.contestants.side import Side


class ShardedSteps:
    """A `Workload` of training steps with plain SGD: `sharded 32` is one of 32 examples.

    Args:
      side: runs them, with a partitioner.
    """

    def __init__(self, side: Side) -> None:
        self._side = side
        self._meters: dict[str, RateMeter] = {}
        with side.scope():
            self._model = ShardedRecommenderModel()

    def run(self, work: str, seconds: float) -> dict[str, float]:
        """See `Workload`: `rate`, in examples per second."""
        batch_size = int(work.split()[1])
        if work not in self._meters:
            iterator = self._side.iterator(lambda _: criteo_like(batch_size))
            step = tf.function(plain_step(self._model))
            self._meters[work] = RateMeter(lambda count: self._side.run(step, (iterator,), count))
        return {"rate": batch_size * self._meters[work].rate(seconds)}


class ShardedRecommenderModel(RecommenderModel):
    """A recommender whose table is one variable, [260,000, 16], which the strategy divides."""

    def __init__(self) -> None:
        table = tf.Variable(tf.concat(table_values(), axis=0))
        # TensorFlow's own is no variable: gradients are those of its parts, which it looks up in the same way.
        self.tables = [table] if isinstance(table, tf.Variable) else list(table.variables)
        if len(getattr(table, "variables", ())) < 2:
            raise RuntimeError("The table is not in parts: this side has no partitioner.")
        self.dense = [tf.Variable(value) for value in dense_values()]
