"""The metrics that an evaluation gave, as plain numbers."""

from collections.abc import Mapping
from typing import Any

from coordinator.errors import EvaluationError


def flat_metrics(metrics: Any) -> dict[str, float]:
    """Names to numbers.

    Args:
      metrics: a mapping of names to numbers, scalar tensors or arrays, or mappings of such; the metrics of a mapping
        within are named `outer/inner`.

    Raises:
      EvaluationError: it is not such a mapping.
    """
    if not isinstance(metrics, Mapping):
        raise EvaluationError(f"`evaluate` must return a dict of metric names to numbers, got {metrics!r}.")
    flat: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            flat.update({f"{name}/{inner}": number for inner, number in flat_metrics(value).items()})
            continue
        try:
            flat[str(name)] = float(value)
        except (TypeError, ValueError) as error:
            raise EvaluationError(f"The metric {name!r} is not one number: {value!r}.") from error
    return flat
