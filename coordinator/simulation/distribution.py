"""How long something takes: distributions of times, in seconds, none of them ever negative.

They promise that numbers are drawn in blocks, since one at a time would cost more than the event that it is for.
"""

import dataclasses
import itertools
import math
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from coordinator.errors import SettingError
from coordinator.simulation.quantity import shown_seconds

_BLOCK = 4096


@dataclasses.dataclass(frozen=True)
class Distribution:
    """A distribution of times, in seconds. A kind of its own defines `mean` and `sample`."""

    @property
    def mean(self) -> float:
        """The expected value, in seconds; `inf` where there is none."""
        raise NotImplementedError

    def sample(self, generator: np.random.Generator, count: int) -> "np.ndarray[Any, np.dtype[np.float64]]":
        """Draws so many times; float64, in seconds."""
        raise NotImplementedError

    def drawn(self, generator: np.random.Generator) -> Callable[[], float]:
        """Returns a function that draws one time, in seconds, whenever it is called."""

        def draws() -> Iterator[float]:
            while True:
                yield from self.sample(generator, _BLOCK).tolist()

        return draws().__next__

    def _check(self, **least: float) -> None:
        """Refuses a field that is not a number above its least value, or at it if that is 0 for a time."""
        for name, bound in least.items():
            value = getattr(self, name)
            is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
            if not is_number or value < bound:
                kind = type(self).__name__
                raise SettingError(
                    name, f"of a distribution {kind} must be a number of at least {bound:g}, got {value!r}."
                )


@dataclasses.dataclass(frozen=True)
class Constant(Distribution):
    """Always the same.

    Attributes:
      seconds: at least 0.
    """

    seconds: float

    def __post_init__(self) -> None:
        self._check(seconds=0)

    @property
    def mean(self) -> float:
        """Itself."""
        return self.seconds

    def sample(self, generator: np.random.Generator, count: int) -> "np.ndarray[Any, np.dtype[np.float64]]":
        """See `Distribution`."""
        del generator
        return np.full(count, float(self.seconds))

    def drawn(self, generator: np.random.Generator) -> Callable[[], float]:
        """See `Distribution`; it needs no random numbers."""
        del generator
        return itertools.repeat(float(self.seconds)).__next__

    def __str__(self) -> str:
        return shown_seconds(self.seconds)


@dataclasses.dataclass(frozen=True)
class Normal(Distribution):
    """The normal distribution, truncated at 0: what would be negative is drawn again.

    Attributes:
      centre: the mean before truncation, in seconds, at least 0.
      deviation: the standard deviation before truncation, in seconds, at least 0.
    """

    centre: float
    deviation: float

    def __post_init__(self) -> None:
        self._check(centre=0, deviation=0)

    @property
    def mean(self) -> float:
        """Of the truncated distribution, so not below `centre`."""
        if not self.deviation:
            return self.centre
        below, unit = -self.centre / self.deviation, statistics.NormalDist()
        return self.centre + self.deviation * unit.pdf(below) / (1 - unit.cdf(below))

    def sample(self, generator: np.random.Generator, count: int) -> "np.ndarray[Any, np.dtype[np.float64]]":
        """See `Distribution`."""
        times = generator.normal(self.centre, self.deviation, count)
        while (negative := times < 0).any():
            times[negative] = generator.normal(self.centre, self.deviation, int(negative.sum()))
        return times

    def __str__(self) -> str:
        return f"normal({shown_seconds(self.centre)}, {shown_seconds(self.deviation)})"


@dataclasses.dataclass(frozen=True)
class Exponential(Distribution):
    """The exponential distribution.

    Attributes:
      average: its mean, in seconds, at least 0.
    """

    average: float

    def __post_init__(self) -> None:
        self._check(average=0)

    @property
    def mean(self) -> float:
        """As given."""
        return self.average

    def sample(self, generator: np.random.Generator, count: int) -> "np.ndarray[Any, np.dtype[np.float64]]":
        """See `Distribution`."""
        return generator.exponential(self.average, count)

    def __str__(self) -> str:
        return f"exponential({shown_seconds(self.average)})"


@dataclasses.dataclass(frozen=True)
class LogNormal(Distribution):
    """The lognormal distribution: its logarithm is normal.

    Attributes:
      median: the value that half of all are below, in seconds, at least 0. (The mean is median * exp(sigma^2 / 2).)
      sigma: the standard deviation of the logarithm, without a unit, at least 0.
    """

    median: float
    sigma: float

    def __post_init__(self) -> None:
        self._check(median=0, sigma=0)

    @property
    def mean(self) -> float:
        """Above the median."""
        return self.median * math.exp(self.sigma**2 / 2)

    def sample(self, generator: np.random.Generator, count: int) -> "np.ndarray[Any, np.dtype[np.float64]]":
        """See `Distribution`."""
        return self.median * generator.lognormal(0.0, self.sigma, count)

    def __str__(self) -> str:
        return f"lognormal(median {shown_seconds(self.median)}, sigma {self.sigma:g})"


@dataclasses.dataclass(frozen=True)
class Pareto(Distribution):
    """The Pareto distribution: a heavy tail. P(longer than t) = (least / t) ** shape.

    Attributes:
      least: no time is below it; in seconds, at least 0.
      shape: the smaller, the heavier the tail; above 0. With 1 or less there is no mean, with 2 or less no variance.
    """

    least: float
    shape: float

    def __post_init__(self) -> None:
        self._check(least=0, shape=0)
        if not self.shape > 0:
            raise SettingError("shape", f"of a distribution Pareto must be above 0, got {self.shape!r}.")

    @property
    def mean(self) -> float:
        """Infinite with a shape of 1 or less."""
        return self.least * self.shape / (self.shape - 1) if self.shape > 1 else math.inf

    def sample(self, generator: np.random.Generator, count: int) -> "np.ndarray[Any, np.dtype[np.float64]]":
        """See `Distribution`."""
        return self.least * (1 + generator.pareto(self.shape, count))

    def __str__(self) -> str:
        return f"pareto(least {shown_seconds(self.least)}, shape {self.shape:g})"


@dataclasses.dataclass(frozen=True)
class Empirical(Distribution):
    """Times that were measured; each is as likely as any other.

    Attributes:
      times: in seconds, none negative, at least one.
    """

    times: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "times", tuple(float(time) for time in self.times))
        if not self.times or not all(time >= 0 and math.isfinite(time) for time in self.times):
            raise SettingError("times", f"of a distribution Empirical must be one or more of at least 0, got {self}.")

    @property
    def mean(self) -> float:
        """Of what was measured."""
        return statistics.fmean(self.times)

    def sample(self, generator: np.random.Generator, count: int) -> "np.ndarray[Any, np.dtype[np.float64]]":
        """See `Distribution`."""
        return generator.choice(np.asarray(self.times), count)

    def __str__(self) -> str:
        return f"empirical({len(self.times)} times, mean {shown_seconds(statistics.fmean(self.times or (0.0,)))})"


@dataclasses.dataclass(frozen=True)
class Slowed(Distribution):
    """Another distribution, with some of its times, at random, a factor longer: random slow steps.

    Attributes:
      usual: the other distribution.
      share: of the times that are longer, from 0 to 1.
      factor: how many times as long they are.
    """

    usual: Distribution
    share: float
    factor: float

    @property
    def mean(self) -> float:
        """The factor included."""
        return self.usual.mean * (1 + self.share * (self.factor - 1))

    def sample(self, generator: np.random.Generator, count: int) -> "np.ndarray[Any, np.dtype[np.float64]]":
        """See `Distribution`."""
        times = self.usual.sample(generator, count)
        return np.where(generator.random(count) < self.share, times * self.factor, times)

    def __str__(self) -> str:
        return f"{self.usual}, {self.share:.3g} of them {self.factor:g} times as long"
