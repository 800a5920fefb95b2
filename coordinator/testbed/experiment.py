"""The settings of an experiment. The constructor checks them; each error names the option and what is allowed."""

import dataclasses
import functools
import itertools
import math
import pathlib
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coordinator.errors import LaunchError, SettingError
from coordinator.options import check_integer, check_number
from coordinator.simulation.distribution import RandomDelay, parse_delay, parse_number, parse_plain_seconds

OPTIMIZERS = ("sgd", "momentum", "adam")
# The axes of a grid: attribute of `Descent`, which is also the name of the option -> name in texts.
AXES = {"optimizer": "optimizer", "learning_rate": "rate", "weight_decay": "decay", "batch_size": "batch"}


@dataclasses.dataclass(frozen=True)
class Descent:
    """One point of the axes. `text` tells it from others of the same grid, such as "adam, rate 0.001", or is empty.

    Attributes:
      optimizer: one of `OPTIMIZERS`; momentum is SGD with a momentum of 0.9.
      learning_rate: the learning rate for the gradient of one minibatch.
      weight_decay: the share of each weight, times the learning rate, that an update subtracts.
      batch_size: images in a minibatch.

    Raises:
      SettingError: a value is not allowed.
    """

    optimizer: str = "sgd"
    learning_rate: float = 0.01
    weight_decay: float = 0.0
    batch_size: int = 100
    text: str = dataclasses.field(default="", compare=False)

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZERS:
            raise SettingError("optimizer", f"must be of {', '.join(OPTIMIZERS)}, got {self.optimizer!r}.")
        check_number("learning_rate", self.learning_rate, 1e-9, 1e3)
        check_number("weight_decay", self.weight_decay, 0.0, 1e3)
        check_integer("batch_size", self.batch_size, 1, 10_000)

    def new_optimizer(self, workers: int = 1) -> Any:
        """Returns the Keras optimizer, for updates that are means of the gradients of several workers.

        The mean of n gradients at n times the rate equals their sum at the rate, as if each minibatch were applied
        alone.
        """
        import keras

        kinds = {"sgd": keras.optimizers.SGD, "momentum": keras.optimizers.SGD, "adam": keras.optimizers.Adam}
        settings = {"momentum": 0.9} if self.optimizer == "momentum" else {}
        return kinds[self.optimizer](self.learning_rate * workers, weight_decay=self.weight_decay or None, **settings)


SEQUENTIAL, SYNCHRONOUS, ASYNCHRONOUS = MODES = ("sequential", "synchronous", "asynchronous")


def missing(package: str) -> LaunchError:
    """Returns the error for a missing package that only the test-bed needs."""
    return LaunchError(f"The test-bed needs {package}: pip install 'coordinator-tf[testbed]'.")


# A delay in seconds, or the distribution of delays.
Delay = float | RandomDelay


@dataclasses.dataclass(frozen=True)
class Trial:
    """One training of an experiment, in one of the `MODES`.

    The delay of gradients is in seconds, or drawn from distributions. Only the asynchronous mode has a delay.
    """

    mode: str
    workers: int
    delay: Delay = 0.0
    descent: Descent = dataclasses.field(default_factory=Descent)

    def __str__(self) -> str:
        parts = [self.mode]
        if self.mode != SEQUENTIAL:
            parts.append(worker_count(self.workers))
        if self.mode == ASYNCHRONOUS:
            parts.append(f"delay {delay_text(self.delay)} s")
        return ", ".join([*parts, self.descent.text] if self.descent.text else parts)


def mean_delay(delay: Delay) -> float:
    """Returns the mean of a delay, in seconds."""
    return delay.mean if isinstance(delay, RandomDelay) else delay


def delay_text(delay: Delay) -> str:
    """Returns a delay as text, in seconds without the unit."""
    return str(delay) if isinstance(delay, RandomDelay) else f"{delay:g}"


def worker_count(workers: int) -> str:
    """Returns a number of workers in words, such as "2 workers"."""
    return f"{workers} worker{'s' * (workers > 1)}"


DATA = ("digits", "cifar10")
MOST_WORKERS = 16
# The longest delay or step, in seconds. A delay or step of more than an hour is more likely a mistake.
LONGEST = 3600.0

# The defaults with `--quick`.
QUICK: Mapping[str, Any] = {
    "workers": (2, 3),
    "delays": (0.0, 0.2),
    "batches": 100,
    "step_time": 0.08,
    "learning_rate": 0.02,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """A grid of trials, and what they have in common.

    Attributes:
      modes: some of `MODES`.
      workers: the numbers of workers, in ascending order.
      delays: the delays of gradients in the asynchronous mode, in seconds or as distributions, with ascending means.
      optimizer, learning_rate, weight_decay, batch_size: the values of each axis, one or several; see `Descent`.
      batches: minibatches that all workers together process in each trial.
      step_time: the shortest time of a worker's step between its pull and its push, in seconds. The worker pauses for
        the rest of this time.
      target_loss: the loss that counts as learned.
      seed: determines the initial weights and the order of the images.
      repeats: how often each trial is run, each time with the next seed.
      data: one of `DATA`.
      folder: where CIFAR-10 is.
      simulated: whether the trials run in virtual time, without servers.

    Raises:
      SettingError: a value is not allowed.
    """

    modes: Sequence[str] = MODES
    workers: Sequence[int] = (1, 2, 3)
    delays: Sequence[Delay] = (0.0, 0.5, 1.0, 1.5, 2.0)
    optimizer: Sequence[str] | str = ("sgd",)
    learning_rate: Sequence[float] | float = (0.01,)
    weight_decay: Sequence[float] | float = (0.0,)
    batch_size: Sequence[int] | int = (100,)
    batches: int = 180
    step_time: float = 0.2
    target_loss: float = 1.0
    seed: int = 0
    repeats: int = 1
    data: str = "digits"
    folder: pathlib.Path | None = None
    simulated: bool = False

    def __post_init__(self) -> None:
        for name in AXES:
            value = getattr(self, name)
            object.__setattr__(self, name, (value,) if isinstance(value, str | float | int) else tuple(value))
        for number in self.workers:
            check_integer("workers", number, 1, MOST_WORKERS)
        for delay in self.delays:
            check_number("delays", mean_delay(delay), 0.0, LONGEST, unit="seconds")
        for mode in self.modes:
            _check_word("modes", mode, MODES)
        for name in ("modes", "workers", "delays", *AXES):
            if not getattr(self, name):
                raise SettingError(name, "must name at least one.")
        check_integer("batches", self.batches, 10, 10_000_000)
        check_number("step_time", self.step_time, 0.0, LONGEST, unit="seconds")
        check_number("target_loss", self.target_loss, 1e-9, 1e3)
        check_integer("seed", self.seed, 0, 2**31 - 1)
        check_integer("repeats", self.repeats, 1, 1000)
        _check_word("data", self.data, DATA)
        if self.data == "cifar10" and self.folder is None:
            raise SettingError("folder", "is needed with --data cifar10: where data_batch_1 to data_batch_5 are.")
        if not self.trials():
            raise SettingError("workers", "must have one of at least 2 for the synchronous mode.")

    @staticmethod
    def of(given: Mapping[str, Any]) -> "Experiment":
        """Parses the options of the command: texts by attribute name, None if not given.

        `quick` selects other defaults. Raises SettingError if an option is wrong.
        """
        chosen: dict[str, Any] = dict(QUICK) if given.get("quick") else {}
        for name, parse in _PARSERS.items():
            if (text := given.get(name)) is not None:
                chosen[name] = parse(name, text)
        return Experiment(**chosen)

    def trials(self) -> list[Trial]:
        """Returns the trials, in their order: one for each combination.

        The sequential mode has one trial: one worker, no delay. The synchronous mode has no delays, because workers
        wait for each other's gradients, so that no gradient is stale. With one worker, the synchronous mode would be
        the sequential mode, and is left out.
        """
        found = []
        for descent in self.descents:
            if SEQUENTIAL in self.modes:
                found.append(Trial(SEQUENTIAL, 1, 0.0, descent))
            if SYNCHRONOUS in self.modes:
                found += [Trial(SYNCHRONOUS, count, 0.0, descent) for count in self.workers if count > 1]
            if ASYNCHRONOUS in self.modes:
                pairs = itertools.product(self.workers, self.delays)
                found += [Trial(ASYNCHRONOUS, count, delay, descent) for count, delay in pairs]
        return found

    @property
    def descents(self) -> list[Descent]:
        """All combinations of optimizer, learning rate, weight decay and batch size."""
        found = []
        for values in itertools.product(*(getattr(self, name) for name in AXES)):
            words = (
                str(value) if name == "optimizer" else f"{text} {value:g}"
                for (name, text), value in zip(AXES.items(), values, strict=True)
                if len(getattr(self, name)) > 1
            )
            found.append(Descent(**dict(zip(AXES, values, strict=True)), text=", ".join(words)))
        return found

    @property
    def most_workers(self) -> int:
        return max(trial.workers for trial in self.trials())

    @property
    def seconds(self) -> float:
        """The shortest time of all trials together, in seconds."""
        return self.repeats * sum(self.batches_of(trial) / trial.workers * self.step_time for trial in self.trials())

    def batches_of(self, trial: Trial) -> int:
        """Returns the number of minibatches of a trial; each of its workers processes the same number."""
        return math.ceil(self.batches / trial.workers) * trial.workers

    def __str__(self) -> str:
        delays = f", delays {', '.join(map(delay_text, self.delays))} s" * (ASYNCHRONOUS in self.modes)
        seeds = f"seed{'s' * (self.repeats > 1)} {self.seed}"
        if self.repeats > 1:
            seeds += f" to {self.seed + self.repeats - 1}"
        sizes, rates, decays = (
            ", ".join(f"{value:g}" for value in getattr(self, name))
            for name in ("batch_size", "learning_rate", "weight_decay")
        )
        optimizer = f", optimizer {', '.join(self.optimizer)}" * (tuple(self.optimizer) != ("sgd",))
        decay = f", weight decay {decays}" * (decays != "0")
        return (
            f"{self.data}, {self.batches} minibatches of {sizes} in each training, steps of "
            f"{self.step_time:g} s{optimizer}, learning rate {rates}{decay}, {seeds}; {', '.join(self.modes)}; "
            f"workers {', '.join(map(str, self.workers))}{delays}{'; in virtual time' * self.simulated}"
        )


def _check_word(name: str, value: Any, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise SettingError(name, f"must be of {', '.join(allowed)}, got {value!r}.")


_integer = functools.partial(parse_number, int, "an integer")
_number = functools.partial(parse_number, float, "a number")


def _words(_: str, text: str) -> tuple[str, ...]:
    return tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))


def _rising(parse: Callable[[str, str], Any]) -> Callable[[str, str], tuple[Any, ...]]:
    return lambda name, text: tuple(sorted({parse(name, part) for part in _words(name, text)}))


def _delays(name: str, text: str) -> tuple[Delay, ...]:
    # Commas within parentheses separate the parameters of a distribution.
    parts = [part for part in re.split(r",(?![^(]*\))", text) if part.strip()]
    return tuple(sorted({_delay(name, part) for part in parts}, key=mean_delay))


def _delay(name: str, text: str) -> Delay:
    try:
        return float(text)
    except ValueError:
        return parse_delay(name, text, parse_plain_seconds)


_PARSERS: dict[str, Callable[[str, str], Any]] = {
    "modes": _words,
    "workers": _rising(_integer),
    "delays": _delays,
    "optimizer": _words,
    "learning_rate": _rising(_number),
    "weight_decay": _rising(_number),
    "batch_size": _rising(_integer),
    "batches": _integer,
    "step_time": _number,
    "target_loss": _number,
    "seed": _integer,
    "repeats": _integer,
    "data": lambda _, text: text,
    "folder": lambda _, text: pathlib.Path(text),
    "simulated": lambda _, given: given,
}
