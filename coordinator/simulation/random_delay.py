"""Delays of gradients that are drawn from distributions, for the rule `Delayed`, and their form as text.

"lognormal(0.1s,1.0)"         a delay for each push
"0s/lognormal(0.1s,1.0)"      worker 0 has no delay, all others have the second
"""

import dataclasses
import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from coordinator.errors import SettingError
from coordinator.simulation.distribution import Constant, Distribution, distribution_of
from coordinator.simulation.quantity import parse_seconds

# The number of draws from which the quantiles are computed.
_DRAWS = 100_000


@dataclasses.dataclass(frozen=True)
class RandomDelay:
    """The delay of a push: a function of its worker, its time, and a seed.

    Attributes:
      each: the distributions of the first workers' delays; all further workers have the last one.
      text: how it is shown.
      seed: of the random numbers.
    """

    each: tuple[Distribution, ...]
    text: str
    seed: int = 0

    def __call__(self, worker: int, now: float) -> float:
        """Returns the delay of a push of a worker at a time, both in seconds; the same for the same push."""
        (time_bits,) = struct.unpack("<Q", struct.pack("<d", now))
        generator = np.random.default_rng([self.seed, worker, time_bits])
        return float(self.of_worker(worker).sample(generator, 1)[0])

    def of_worker(self, worker: int) -> Distribution:
        """Returns the distribution of a worker's delays."""
        return self.each[min(worker, len(self.each) - 1)]

    @property
    def mean(self) -> float:
        """The mean of the distributions' expected values, in seconds."""
        return math.fsum(each.mean for each in self.each) / len(self.each)

    def table(self, worker: int, size: int) -> Any:
        """Returns equally likely delays of a worker, rising, in seconds: their quantiles; float64 [size]."""
        drawn = self.of_worker(worker).sample(np.random.default_rng(0), _DRAWS)
        return np.quantile(drawn, (np.arange(size) + 0.5) / size)

    def __repr__(self) -> str:
        return self.text


def parse_delay(option: str, text: str, parse_time: Callable[[str, str], float] = parse_seconds) -> float | RandomDelay:
    """Parses a delay.

    Args:
      option: its name, for error messages.
      text: a time, a distribution (see `distribution_of`), "inf", or several of these with slashes between them, for
        worker 0, worker 1, and so on; the last one is also that of all further workers.
      parse_time: parses the times in it.

    Returns:
      Seconds if it is always the same, otherwise a `RandomDelay`.

    Raises:
      SettingError: it has another form.
    """
    if text.strip() == "inf":
        return math.inf
    each = tuple(distribution_of(option, part.strip(), parse_time) for part in text.split("/"))
    if len(each) == 1 and isinstance(each[0], Constant):
        return each[0].seconds
    if any(math.isinf(part.mean) for part in each):
        raise SettingError(option, f"must have a mean, {text!r} has none.")
    return RandomDelay(each, text.replace(" ", ""))
