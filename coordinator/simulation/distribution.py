"""Distributions of times in seconds, which are never negative, and their text form, such as "lognormal(50ms,0.4)".

NumPy's generator draws the times in blocks, because a single draw would cost more than an event. `scipy.stats` would
replace only four formulas for means, and takes 0.5 s to import, while a `coordinator simulate` takes 0.2 s. For the
same seed, `scipy.stats` draws other times, and the figures in docs/simulation.md depend on the times.

Quantities are texts with a unit, such as "50ms", "100MB", "10Gbit" or "5%". A delay is written as

    "lognormal(0.1s,1.0)"         a delay for each push
    "0s/lognormal(0.1s,1.0)"      worker 0 has no delay, all other workers have the second delay

A text of another form raises a `SettingError` that names the option and the allowed forms.
"""

import dataclasses
import itertools
import math
import re
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from coordinator.errors import SettingError
from coordinator.options import check_number

_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_BYTES = {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}
_BYTES_PER_SECOND = {"Mbit": 1e6 / 8, "Gbit": 1e9 / 8, "MB": 1e6, "GB": 1e9}
_NUMBER = re.compile(r"\s*([0-9]*\.?[0-9]+(?:[eE][+-]?[0-9]+)?)\s*([A-Za-z%]*)\s*", re.ASCII)


def parse_seconds(option: str, text: str) -> float:
    """Returns a time such as "200us", "50ms" or "1.5s" in seconds."""
    return _parse_quantity(option, text, _SECONDS, "a time of at least 0 with its unit, such as 200us, 50ms or 1.5s")


def parse_plain_seconds(option: str, text: str) -> float:
    """Returns a time in seconds. The unit s may be left out, so that "0.1" is the same as "0.1s" and "100ms"."""
    return _parse_quantity(
        option, text, {**_SECONDS, "": 1.0}, "a time of at least 0, in seconds or with its unit: 0.5 or 500ms"
    )


def parse_bytes(option: str, text: str) -> float:
    return _parse_quantity(option, text, _BYTES, "a size with its unit, such as 500kB, 100MB or 1.5GB")


def parse_rate(option: str, text: str) -> float:
    """Returns a rate per second such as "10Gbit" or "100MB" in bytes per second. "inf" means no limit."""
    if text.strip() == "inf":
        return float("inf")
    return _parse_quantity(
        option, text, _BYTES_PER_SECOND, "a rate per second with its unit, such as 10Gbit or 100MB, or inf"
    )


def parse_share(option: str, text: str) -> float:
    """Returns a share such as "5%" or "0.05" as a number from 0 to 1."""
    share = _parse_quantity(option, text, {"%": 0.01, "": 1.0}, "a share from 0% to 100%, such as 5% or 0.05")
    if share > 1:
        raise SettingError(option, f"must be a share from 0% to 100%, such as 5% or 0.05, got {text!r}.")
    return share


def parse_number(kind: Callable[[Any], float], expected: str, option: str, text: Any) -> Any:
    """Returns a number of the type `kind`, `int` or `float`. Errors describe the number as `expected`."""
    try:
        return kind(text)
    except ValueError:
        raise SettingError(option, f"must be {expected}, got {text!r}.") from None


def format_seconds(seconds: float) -> str:
    """Returns a time in seconds as text with a suitable unit, such as "50 ms"."""
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds / 1e-6:.3g} us" if seconds else "0 s"


def _parse_quantity(option: str, text: str, units: dict[str, float], expected: str) -> float:
    match = _NUMBER.fullmatch(text)
    if match and (match[2] in units or (not match[2] and float(match[1]) == 0)):
        return float(match[1]) * units.get(match[2], 1.0)
    raise SettingError(option, f"must be {expected}, got {text!r}.")


_BLOCK = 4096
Samples = np.ndarray[Any, np.dtype[np.float64]]


@dataclasses.dataclass(frozen=True)
class Distribution:
    """A distribution of times in seconds. Subclasses define `mean` and `sample`. Float fields must be at least 0."""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if field.type is float:
                name = f"{field.name} of a distribution {type(self).__name__}"
                check_number(name, getattr(self, field.name), minimum=0)

    @property
    def mean(self) -> float:
        """The expected value in seconds, or `inf` if there is none."""
        raise NotImplementedError

    def sample(self, generator: np.random.Generator, count: int) -> Samples:
        """Returns drawn times in seconds, float64 [count]."""
        raise NotImplementedError

    def sampler(self, generator: np.random.Generator) -> Callable[[], float]:
        """Returns a function that draws one time, in seconds, at each call."""

        def draws() -> Iterator[float]:
            while True:
                yield from self.sample(generator, _BLOCK).tolist()

        return draws().__next__


@dataclasses.dataclass(frozen=True)
class Constant(Distribution):
    """A distribution that always gives the same time.

    Attributes:
      seconds: the time in seconds, at least 0.
    """

    seconds: float

    @property
    def mean(self) -> float:
        return self.seconds

    def sample(self, generator: np.random.Generator, count: int) -> Samples:
        del generator
        return np.full(count, float(self.seconds))

    def sampler(self, generator: np.random.Generator) -> Callable[[], float]:
        # A constant time needs no blocks, which would take three times as long.
        del generator
        return itertools.repeat(float(self.seconds)).__next__


@dataclasses.dataclass(frozen=True)
class Normal(Distribution):
    """The normal distribution, truncated at 0. Negative times are drawn again.

    Attributes:
      centre: the mean before truncation, in seconds, at least 0.
      deviation: the standard deviation before truncation, in seconds, at least 0.
    """

    centre: float
    deviation: float

    @property
    def mean(self) -> float:
        """The mean of the truncated distribution, which is at least `centre`."""
        if not self.deviation:
            return self.centre
        below, unit = -self.centre / self.deviation, statistics.NormalDist()
        return self.centre + self.deviation * unit.pdf(below) / (1 - unit.cdf(below))

    def sample(self, generator: np.random.Generator, count: int) -> Samples:
        times = generator.normal(self.centre, self.deviation, count)
        while (negative := times < 0).any():
            times[negative] = generator.normal(self.centre, self.deviation, int(negative.sum()))
        return times


@dataclasses.dataclass(frozen=True)
class Exponential(Distribution):
    """The exponential distribution.

    Attributes:
      average: the mean, in seconds, at least 0.
    """

    average: float

    @property
    def mean(self) -> float:
        return self.average

    def sample(self, generator: np.random.Generator, count: int) -> Samples:
        return generator.exponential(self.average, count)


@dataclasses.dataclass(frozen=True)
class LogNormal(Distribution):
    """The lognormal distribution. The logarithm of the time has a normal distribution.

    Attributes:
      median: the median in seconds, at least 0. (The mean is median * exp(sigma^2 / 2).)
      sigma: the standard deviation of the logarithm, without a unit, at least 0.
    """

    median: float
    sigma: float

    @property
    def mean(self) -> float:
        return self.median * math.exp(self.sigma**2 / 2)

    def sample(self, generator: np.random.Generator, count: int) -> Samples:
        return self.median * generator.lognormal(0.0, self.sigma, count)


@dataclasses.dataclass(frozen=True)
class Pareto(Distribution):
    """The Pareto distribution, with a heavy tail: P(longer than t) = (least / t) ** shape.

    Attributes:
      least: the shortest time, in seconds, at least 0.
      shape: above 0. A smaller shape has a heavier tail. There is no mean with 1 or less, no variance with 2 or less.
    """

    least: float
    shape: float

    def __post_init__(self) -> None:
        super().__post_init__()
        check_number("shape of a distribution Pareto", self.shape, above=0)

    @property
    def mean(self) -> float:
        return self.least * self.shape / (self.shape - 1) if self.shape > 1 else math.inf

    def sample(self, generator: np.random.Generator, count: int) -> Samples:
        return self.least * (1 + generator.pareto(self.shape, count))


@dataclasses.dataclass(frozen=True)
class Empirical(Distribution):
    """Measured times, which are equally likely.

    Attributes:
      times: one or more times in seconds, each at least 0.
    """

    times: tuple[float, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "times", tuple(float(time) for time in self.times))
        wrong = [time for time in self.times if not 0 <= time < math.inf]
        if wrong or not self.times:
            raise SettingError("times", f"of a distribution Empirical must be one or more of at least 0, got {wrong}.")

    @property
    def mean(self) -> float:
        return statistics.fmean(self.times)

    def sample(self, generator: np.random.Generator, count: int) -> Samples:
        return generator.choice(np.asarray(self.times), count)


@dataclasses.dataclass(frozen=True)
class Slowed(Distribution):
    """Random slow steps: the distribution `usual`, with a random `share` of the times multiplied by `factor`."""

    usual: Distribution
    share: float
    factor: float

    @property
    def mean(self) -> float:
        return self.usual.mean * (1 + self.share * (self.factor - 1))

    def sample(self, generator: np.random.Generator, count: int) -> Samples:
        times = self.usual.sample(generator, count)
        return np.where(generator.random(count) < self.share, times * self.factor, times)


_CALL = re.compile(r"\s*([a-z]+)\s*\((.*)\)\s*", re.ASCII)


def distribution_of(
    option: str, given: Distribution | str | float, parse_time: Callable[[str, str], float] = parse_seconds
) -> Distribution:
    """Converts a setting to a distribution.

    Args:
      option: the setting's name, for error messages.
      given: a distribution, a number of seconds, or a text. A text is a constant time such as "20ms", or one of
        constant(time), normal(mean,deviation), exponential(mean), lognormal(median,sigma), pareto(least,shape),
        empirical(time,time,...). Times have the unit us, ms or s.
      parse_time: parses the times in a text.

    Raises:
      SettingError: `given` is none of these.
    """
    if isinstance(given, Distribution):
        return given
    if not isinstance(given, str):
        check_number(option, given, minimum=0, maximum=math.inf, unit="seconds", note=", a text or a distribution")
        return Constant(float(given))
    call = _CALL.fullmatch(given)
    if call is None:
        if re.match(r"\s*[\d.]", given):
            return Constant(parse_time(option, given))
        raise SettingError(option, f"must be a time such as 20ms, or one of {', '.join(FORMS)}; got {given!r}.")
    name, parts = call[1], [part.strip() for part in call[2].split(",")]
    if name == "empirical":
        return Empirical(tuple(parse_time(option, part) for part in parts))
    if name not in _KINDS:
        raise SettingError(option, f"has no distribution {name!r}; it may be one of {', '.join(FORMS)}.")
    kind, parsers, form = _KINDS[name]
    if len(parts) != len(parsers):
        raise SettingError(option, f"must be of the form {form}, got {given!r}.")
    pairs = zip(parsers, parts, strict=True)
    values = [(parse_time if parse is parse_seconds else parse)(option, part) for parse, part in pairs]
    try:
        return kind(*values)
    except SettingError as error:
        # The message names the option, because users do not know the distribution's fields.
        raise SettingError(option, f"{given!r}: {error}") from None


def _number(option: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise SettingError(option, f"has {text!r} where a number without a unit is expected.") from None


# Maps a name to the class, the parsers of the class's arguments, and an example.
_KINDS: dict[str, tuple[Callable[..., Distribution], tuple[Callable[[str, str], float], ...], str]] = {
    "constant": (Constant, (parse_seconds,), "constant(20ms)"),
    "normal": (Normal, (parse_seconds, parse_seconds), "normal(50ms,5ms)"),
    "exponential": (Exponential, (parse_seconds,), "exponential(30ms)"),
    "lognormal": (LogNormal, (parse_seconds, _number), "lognormal(50ms,0.4)"),
    "pareto": (Pareto, (parse_seconds, _number), "pareto(20ms,2.5)"),
}
FORMS = (*(form for _, _, form in _KINDS.values()), "empirical(20ms,25ms,90ms)")


# The number of draws from which quantiles are computed.
_DRAWS = 100_000


@dataclasses.dataclass(frozen=True)
class RandomDelay:
    """The random delay of a push, which is a function of the worker, the time of the push, and a seed.

    Attributes:
      each: the distributions of the first workers' delays. All further workers have the last distribution.
      text: the text form of the delay.
      seed: the seed of the random numbers.
    """

    each: tuple[Distribution, ...]
    text: str
    seed: int = 0

    def __call__(self, worker: int, now: float) -> float:
        """Returns the delay of a worker's push at the time `now`, in seconds. The same push has the same delay."""
        generator = np.random.default_rng([self.seed, worker, int(np.float64(now).view(np.uint64))])
        return float(self.of_worker(worker).sample(generator, 1)[0])

    def of_worker(self, worker: int) -> Distribution:
        """Returns the distribution of a worker's delays."""
        return self.each[min(worker, len(self.each) - 1)]

    @property
    def mean(self) -> float:
        """The mean of the distributions' expected values, in seconds."""
        return math.fsum(each.mean for each in self.each) / len(self.each)

    def table(self, worker: int, size: int) -> Any:
        """Returns equally likely, rising quantiles of a worker's delays in seconds, float64 [size]."""
        drawn = self.of_worker(worker).sample(np.random.default_rng(0), _DRAWS)
        return np.quantile(drawn, (np.arange(size) + 0.5) / size)

    def __repr__(self) -> str:
        return self.text


def parse_delay(option: str, text: str, parse_time: Callable[[str, str], float] = parse_seconds) -> float | RandomDelay:
    """Parses a delay. Returns seconds if the delay is constant, otherwise a `RandomDelay`.

    Args:
      option: the option's name, for error messages.
      text: "inf", a time, a distribution (see `distribution_of`), or several times and distributions with slashes
        between them, for worker 0, worker 1, and so on. Further workers have the last one.
      parse_time: parses the times in `text`.

    Raises:
      SettingError: `text` has another form.
    """
    if text.strip() == "inf":
        return math.inf
    each = tuple(distribution_of(option, part.strip(), parse_time) for part in text.split("/"))
    if len(each) == 1 and isinstance(each[0], Constant):
        return each[0].seconds
    if any(math.isinf(part.mean) for part in each):
        raise SettingError(option, f"must have a mean, {text!r} has none.")
    return RandomDelay(each, text.replace(" ", ""))
