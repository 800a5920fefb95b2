"""A percentile of a sample."""

import statistics
from collections.abc import Sequence


def percentile(values: Sequence[float], percent: int) -> float:
    """The value that so many percent of all, from 1 to 99, do not exceed; of at least two values."""
    return statistics.quantiles(values, n=100, method="inclusive")[percent - 1]
