"""How a training descends: optimizer, learning rate, weight decay and size of the minibatches, the axes of a grid."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from coordinator.errors import SettingError
from coordinator.setting_checks import check_integer, check_number

OPTIMIZERS = ("sgd", "momentum", "adam")
# The axes: names of attributes of `Descent`, which are those of options, and how they are called in texts.
AXES = {"optimizer": "optimizer", "learning_rate": "rate", "weight_decay": "decay", "batch_size": "batch"}


@dataclasses.dataclass(frozen=True)
class Descent:
    """One point of the axes.

    Attributes:
      optimizer: one of `OPTIMIZERS`; momentum is SGD with a momentum of 0.9.
      learning_rate: for the gradient of one minibatch.
      weight_decay: the share of each weight, times the learning rate, that an update subtracts.
      batch_size: images in a minibatch.
      text: what distinguishes it from others of the same grid, such as "adam, rate 0.001"; empty if there are none.

    Raises:
      SettingError: one of them is not allowed.
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

        The mean of n gradients at n times the rate is their sum at the rate: so each minibatch changes the model as
        much as if it were applied alone.
        """
        import keras

        kinds = {"sgd": keras.optimizers.SGD, "momentum": keras.optimizers.SGD, "adam": keras.optimizers.Adam}
        settings = {"momentum": 0.9} if self.optimizer == "momentum" else {}
        return kinds[self.optimizer](self.learning_rate * workers, weight_decay=self.weight_decay or None, **settings)


def descents(values: dict[str, Sequence[Any]]) -> list[Descent]:
    """Returns all combinations of values of the axes, by their names."""
    several = [name for name, of_axis in values.items() if len(of_axis) > 1]
    found = []
    for combination in itertools.product(*values.values()):
        chosen = dict(zip(values, combination, strict=True))
        words = (
            str(chosen[name]) if name == "optimizer" else f"{AXES[name]} {chosen[name]:g}"
            for name in AXES
            if name in several
        )
        found.append(Descent(**chosen, text=", ".join(words)))
    return found
