"""What the shards of an evaluation add up to, and the check that their metrics can be added up."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from coordinator.ps_strategy.keras.evaluation.shard_functions import initial_state

_State = list[Any]


class MetricTotals:
    """Adds up the states of metrics that shards have returned.

    A metric's state after all shards is its initial state and what each shard has added to it. A metric that is no such
    sum may have a method `merge(state, other)`: it takes two states, lists with the values of `metric.variables`, and
    returns the state that all batches of both would have led to.

    Args:
      metrics: those of `ShardFunctions.metrics`, whose variables exist.
    """

    def __init__(self, metrics: Iterable[Any]) -> None:
        self._metrics = list(metrics)
        self._variables = list({id(each): each for metric in self._metrics for each in metric.variables}.values())
        self._places = {id(each): place for place, each in enumerate(self._variables)}
        with tf.init_scope(), tf.device("/device:CPU:0"):
            self._initial = [np.asarray(each) for each in initial_state(self._metrics, self._variables)]
        self._state: _State = list(self._initial)
        self._is_empty = True

    def add(self, state: Sequence[Any]) -> None:
        """Adds the state that a shard has returned."""
        given = [np.asarray(each) for each in state]
        if self._is_empty:
            self._state, self._is_empty = given, False
            return
        added = [_sum(*each) for each in zip(self._state, self._initial, given, strict=True)]
        for metric in self._metrics:
            if hasattr(metric, "merge"):
                merged = metric.merge(self._of(metric, self._state), self._of(metric, given))
                for variable, value in zip(metric.variables, merged, strict=True):
                    added[self._places[id(variable)]] = value
        self._state = added

    def results(self, read: Callable[[], Any]) -> Any:
        """Returns what `read` returns while the metrics have the state of all shards.

        Args:
          read: reads the results of metrics. It is called without Keras' scope of a strategy, on the client.
        """
        with tf.device("/device:CPU:0"), keras.StatelessScope(self._values()):
            return tf.nest.map_structure(lambda value: tf.convert_to_tensor(value).numpy(), read())

    def state(self) -> list[Any]:
        """Returns the state of all shards: a tensor for each of the metrics' variables."""
        return [value for _, value in self._values()]

    def assign(self) -> None:
        """Assigns the state of all shards to the variables of the metrics."""
        for variable, value in self._values():
            variable.assign(value)

    def _values(self) -> list[tuple[Any, Any]]:
        return [
            (variable, tf.constant(np.asarray(value).astype(tf.as_dtype(variable.dtype).as_numpy_dtype)))
            for variable, value in zip(self._variables, self._state, strict=True)
        ]

    def _of(self, metric: Any, state: Sequence[Any]) -> _State:
        return [state[self._places[id(each)]] for each in metric.variables]

    def find_sums(self, first: Sequence[Any], second: Sequence[Any], both: Sequence[Any]) -> tuple[bool, list[str]]:
        """Compares the state after two batches with the sum of what each of them has added.

        Args:
          first: the state after one batch.
          second: that after another one.
          both: that after both, one after the other.

        Returns:
          Whether all metrics are known to be sums, which needs batches that change them; and the names of those that
          are none.
        """
        are_sums, others = True, []
        for metric in self._metrics:
            if hasattr(metric, "merge"):
                continue
            parts = [self._of(metric, each) for each in (self._initial, first, second, both)]
            if not all(map(_is_sum, *parts)):
                others.append(metric.name)
            are_sums &= all(any(map(_differ, parts[0], part)) for part in parts[1:3])
        return are_sums and not others, others


def _sum(state: Any, initial: Any, given: Any) -> Any:
    if initial.dtype.kind in "fV":
        # Once in float64, so that the order of the shards has no effect that could be seen.
        return np.asarray(state, np.float64) + (given.astype(np.float64) - initial.astype(np.float64))
    return state + (given - initial)


def _is_sum(initial: Any, first: Any, second: Any, both: Any) -> bool:
    given = [np.asarray(each) for each in (initial, first, second, both)]
    if given[0].dtype.kind not in "iufV":
        return False
    if given[0].dtype.kind in "iu":
        return bool((given[3] - given[0] == (given[1] - given[0]) + (given[2] - given[0])).all())
    # In units of the least difference, since each batch is rounded.
    tolerance = (
        1000 * float(np.finfo(tf.as_dtype(given[0].dtype).as_numpy_dtype).eps) if given[0].dtype.kind == "f" else 0.1
    )
    start, one, other, all_ = (each.astype(np.float64) for each in given)
    scale = np.maximum(np.abs(one - start), np.abs(other - start))
    with np.errstate(invalid="ignore"):
        close = np.abs((all_ - start) - (one - start) - (other - start)) <= tolerance * (scale + np.abs(start))
    return bool(np.isfinite(start).all() and (close | ~np.isfinite(all_)).all())


def _differ(one: Any, other: Any) -> bool:
    return bool((np.asarray(one) != np.asarray(other)).any())
