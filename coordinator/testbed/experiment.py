"""What is to be tried, checked when it is made: each complaint names the option and what is allowed."""

import dataclasses
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from coordinator.errors import SettingError
from coordinator.testbed.cell import ASYNCHRONOUS, MODES, Cell, grid

DATA = ("digits", "cifar10")
MOST_WORKERS = 16
# An hour: beyond it a mistake is more likely than an experiment.
LONGEST = 3600.0

# What `--quick` has in place of the defaults.
QUICK: Mapping[str, Any] = {
    "workers": (2, 3),
    "delays": (0.0, 0.2),
    "batches": 100,
    "step_time": 0.08,
    "learning_rate": 0.02,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experiment:
    """The grid, and what all of its trainings have in common.

    Attributes:
      modes: of `MODES`.
      workers: how many workers, rising.
      delays: of gradients in the asynchronous mode, in seconds, rising.
      batch_size: images in a minibatch.
      batches: that are processed in each training, by all workers together.
      step_time: what a step of a worker takes at least until its push, in seconds. What pulling and computing leave of
        it, the worker pauses.
      learning_rate: of plain SGD, for the gradient of one minibatch.
      target_loss: the loss that counts as learned.
      seed: of the first weights and the order of the images.
      data: one of `DATA`.
      folder: where CIFAR-10 is.

    Raises:
      SettingError: one of them cannot be.
    """

    modes: Sequence[str] = MODES
    workers: Sequence[int] = (1, 2, 3)
    delays: Sequence[float] = (0.0, 0.5, 1.0, 1.5, 2.0)
    batch_size: int = 100
    batches: int = 180
    step_time: float = 0.2
    learning_rate: float = 0.01
    target_loss: float = 1.0
    seed: int = 0
    data: str = "digits"
    folder: pathlib.Path | None = None

    def __post_init__(self) -> None:
        for number in self.workers:
            _check_whole("workers", number, 1, MOST_WORKERS)
        for delay in self.delays:
            _check_number("delays", delay, 0.0, LONGEST, " seconds")
        for mode in self.modes:
            _check_word("modes", mode, MODES)
        for name in ("modes", "workers", "delays"):
            if not getattr(self, name):
                raise SettingError(name, "must name at least one.")
        _check_whole("batch_size", self.batch_size, 1, 10_000)
        _check_whole("batches", self.batches, 10, 10_000_000)
        _check_number("step_time", self.step_time, 0.0, LONGEST, " seconds")
        _check_number("learning_rate", self.learning_rate, 1e-9, 1e3)
        _check_number("target_loss", self.target_loss, 1e-9, 1e3)
        _check_whole("seed", self.seed, 0, 2**31 - 1)
        _check_word("data", self.data, DATA)
        if self.data == "cifar10" and self.folder is None:
            raise SettingError("folder", "is needed with --data cifar10: where data_batch_1 to data_batch_5 are.")
        if not self.cells():
            raise SettingError("workers", "must have one of at least 2 for the synchronous mode.")

    @staticmethod
    def of(given: Mapping[str, Any]) -> "Experiment":
        """The experiment that options ask for.

        Args:
          given: by the names of the attributes, as text; None for what was not given. `quick` chooses other defaults.

        Raises:
          SettingError: what was given cannot be.
        """
        chosen: dict[str, Any] = dict(QUICK) if given.get("quick") else {}
        for field in dataclasses.fields(Experiment):
            if (text := given.get(field.name)) is not None:
                chosen[field.name] = _READ[field.name](field.name, text)
        return Experiment(**chosen)

    def cells(self) -> list[Cell]:
        """What is trained, in this order."""
        return grid(self.modes, self.workers, self.delays)

    @property
    def most_workers(self) -> int:
        """How many workers the largest cell needs."""
        return max(cell.workers for cell in self.cells())

    @property
    def seconds(self) -> float:
        """What all trainings take at least."""
        return sum(self.batches_of(cell) / cell.workers * self.step_time for cell in self.cells())

    def batches_of(self, cell: Cell) -> int:
        """How many minibatches are processed in a cell: as many by each of its workers."""
        return math.ceil(self.batches / cell.workers) * cell.workers

    def __str__(self) -> str:
        delays = f", delays {', '.join(f'{delay:g}' for delay in self.delays)} s" * (ASYNCHRONOUS in self.modes)
        return (
            f"{self.data}, {self.batches} minibatches of {self.batch_size} in each training, steps of "
            f"{self.step_time:g} s, learning rate {self.learning_rate:g}, seed {self.seed}; {', '.join(self.modes)}; "
            f"workers {', '.join(map(str, self.workers))}{delays}"
        )


def _check_whole(name: str, value: Any, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise SettingError(name, f"must be a whole number from {least} to {most}, got {value!r}.")


def _check_number(name: str, value: Any, least: float, most: float, unit: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= most:
        raise SettingError(name, f"must be a number{unit and ' of' + unit} from {least:g} to {most:g}, got {value!r}.")


def _check_word(name: str, value: Any, allowed: Sequence[str]) -> None:
    if value not in allowed:
        raise SettingError(name, f"must be of {', '.join(allowed)}, got {value!r}.")


def _whole(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise SettingError(name, f"must be a whole number, got {text!r}.") from None


def _number(name: str, text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise SettingError(name, f"must be a number, got {text!r}.") from None


def _list(read: Callable[[str, str], Any]) -> Callable[[str, str], tuple[Any, ...]]:
    """Reads what is separated by commas: each once, numbers rising, words as given."""

    def read_list(name: str, text: str) -> tuple[Any, ...]:
        values = dict.fromkeys(read(name, part.strip()) for part in text.split(",") if part.strip())
        return tuple(values if read is _word else sorted(values))

    return read_list


def _word(_: str, text: str) -> str:
    return text


def _path(_: str, text: str) -> pathlib.Path:
    return pathlib.Path(text)


_READ: dict[str, Callable[[str, str], Any]] = {
    "modes": _list(_word),
    "workers": _list(_whole),
    "delays": _list(_number),
    "batch_size": _whole,
    "batches": _whole,
    "step_time": _number,
    "learning_rate": _number,
    "target_loss": _number,
    "seed": _whole,
    "data": _word,
    "folder": _path,
}
