"""Training of the same variables by pushes to a rule, and in this process with dense gradients."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

TIMEOUT = 240.0


def train_twice(
    strategy: Any,
    rule: Any,
    variables: Sequence[Any],
    new: Callable[[], tuple[Sequence[Any], Any]],
    gradients: Callable[[Sequence[Any]], Sequence[Any]],
    steps: int,
) -> Sequence[Any]:
    """Trains variables by one worker, step after step, and new ones here; the first gradient must be sparse.

    Args:
      strategy: has the worker.
      rule: of `variables`. `Delayed` is flushed after each step.
      variables: on the cluster.
      new: returns the same variables, and an optimizer, in this process.
      gradients: returns the gradients of variables.
      steps: how many.

    Returns:
      The variables of this process.
    """

    @tf.function
    def step() -> Any:
        with rule.pull() as version:
            found = gradients(variables)
        assert isinstance(found[0], tf.IndexedSlices)
        return rule.push(found, version)

    here, optimizer = new()
    for _ in range(steps):
        assert strategy.schedule(step, worker=0).result(TIMEOUT)
        if type(rule).__name__ == "Delayed":
            assert rule.flush() == 1
        optimizer.apply([tf.convert_to_tensor(each) for each in gradients(here)], here)
    return here
