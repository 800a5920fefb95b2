"""Training steps of the recommender, many of them queued at once."""

from collections.abc import Callable
from typing import Any

import tensorflow as tf

from benchmarks.contestants.criteo_like import criteo_like
from benchmarks.contestants.packed_recommender_model import PackedRecommenderModel
from benchmarks.contestants.rate_meter import RateMeter
from benchmarks.contestants.recommender_model import LEARNING_RATE, RecommenderModel, descend
from benchmarks.contestants.side import Side
from coordinator import updates

# Values from 8 to 32 are about equally fast.
_STEPS_BY_HAND = 16
_WORKERS = 2


class RecommenderSteps:
    """A `Workload` of training steps: `plain 32` is a step with its own SGD, `rule 32` one that pulls and pushes.

    `hand 32` is several steps of a `PackedRecommenderModel` as one function, with a call for each of two workers.

    Args:
      side: runs them.
    """

    def __init__(self, side: Side) -> None:
        self._side = side
        self._meters: dict[str, RateMeter] = {}
        with side.scope():
            self._model = RecommenderModel()
            self._rule = None
            if side.may_have_rules:
                # `descend` changes a variable by one addition, which needs no lock.
                self._rule = updates.Asynchronous(
                    descend,
                    self._model.variables,
                    use_locking=False,
                    embeddings=self._model.tables,
                    learning_rate=LEARNING_RATE,
                    allow_duplicate_indices=True,
                )

    def run(self, work: str, seconds: float) -> dict[str, float]:
        """See `Workload`: `rate`, in examples per second."""
        kind, batch = work.split()
        batch_size = int(batch)
        if work not in self._meters:
            iterator = self._side.iterator(lambda _: criteo_like(batch_size))
            self._meters[work] = self._by_hand(iterator) if kind == "hand" else self._step_by_step(kind, iterator)
        steps = _STEPS_BY_HAND * _WORKERS if kind == "hand" else 1
        return {"rate": steps * batch_size * self._meters[work].rate(seconds)}

    def _step_by_step(self, kind: str, iterator: Any) -> RateMeter:
        step = tf.function(plain_step(self._model) if kind == "plain" else _rule_step(self._model, self._rule))
        return RateMeter(lambda count: self._side.run(step, (iterator,), count))

    def _by_hand(self, iterator: Any) -> RateMeter:
        with self._side.scope():
            model = PackedRecommenderModel()
        steps = tf.function(_repeated(plain_step(model), _STEPS_BY_HAND))
        # A call for each worker, so that none is idle at the end.
        return RateMeter(lambda count: self._side.run(steps, (iterator,), count * _WORKERS), first_count=1)


def plain_step(model: RecommenderModel | PackedRecommenderModel) -> Callable[[Any], None]:
    """Returns a step with the next batch and the model's own SGD."""

    def step(batches: Any) -> None:
        gradients = model.gradients(*next(batches))
        for variable, gradient in zip(model.variables, gradients, strict=True):
            descend(variable, gradient)

    return step


def _repeated(step: Callable[[Any], None], count: int) -> Callable[[Any], None]:
    def steps(batches: Any) -> None:
        for _ in range(count):
            step(batches)

    return steps


def _rule_step(model: RecommenderModel, rule: Any) -> Any:
    def step(batches: Any) -> None:
        batch = next(batches)
        with rule.pull() as version:
            gradients = model.gradients(*batch)
        rule.push(gradients, version)

    return step
