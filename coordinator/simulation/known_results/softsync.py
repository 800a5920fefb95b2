"""n-softsync (Zhang et al., arXiv 1511.05950): lambda / n gradients make an update, and none is rejected.

With lambda = 30 learners the staleness is about n on average and never above 2n. With a large n a model does not learn
at a rate that is good for n = 1, unless each gradient's rate is divided by its staleness.
"""

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np

from coordinator.simulation import picture
from coordinator.simulation.distribution import Normal
from coordinator.simulation.learning import Learning
from coordinator.simulation.problem import SmallNetwork
from coordinator.simulation.result import Array, Result
from coordinator.simulation.rule import Rule
from coordinator.simulation.rules import Asynchronous, BoundedDelay
from coordinator.simulation.setting import Setting
from coordinator.simulation.simulated_cluster import simulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LEARNERS = 30
SPLITS = (1, 2, 3, 5, 6, 10, 15, 30)
_PUSHES = 20_000
_PUSHES_LEARNED = 3_000
# Good for one update of 30 gradients, far too much for 30 updates of one each.
_LEARNING_RATE = 4.0
# A step on equal machines without other load.
_COMPUTE = Normal(0.05, 0.0025)


@dataclasses.dataclass(frozen=True, eq=False)
class Softsync:
    """The measured figures.

    Attributes:
      splits: the n of each training; int64 [trainings].
      staleness: of all pushes of each training; int64 [trainings, pushes].
      learned: the results with learning, by the label of the rule.
    """

    splits: Array
    staleness: Array
    learned: dict[str, Result]

    @property
    def means(self) -> Array:
        """The mean staleness of each training; float64 [trainings]."""
        means: Array = self.staleness.mean(axis=1)
        return means

    @property
    def over_twice(self) -> float:
        """The share of pushes of all trainings with a staleness above 2n."""
        return float((self.staleness > 2 * self.splits[:, None]).mean())

    def __str__(self) -> str:
        final = ", ".join(f"{name} {result.losses[-1]:.3f}" for name, result in self.learned.items())
        ratios = self.means / self.splits
        return (
            f"Mean staleness from {ratios.min():.2f} n to {ratios.max():.2f} n; P(staleness > 2n) = "
            f"{self.over_twice:.0e}, of {self.staleness.size:,} pushes. Losses: {final}."
        )


def measure() -> Softsync:
    """Simulates it."""
    staleness = [
        simulate(Setting(workers=LEARNERS, rule=_softsync(n), compute=_COMPUTE, pushes=_PUSHES)).staleness
        for n in SPLITS
    ]
    rules: dict[str, Rule] = {
        "n = 1": _softsync(1),
        "n = 30": Asynchronous(),
        "n = 30, rate / staleness": Asynchronous(lr_staleness_modulation=True),
    }
    learning = Learning(SmallNetwork(), _LEARNING_RATE, evaluate_every=LEARNERS)
    learned = {
        name: simulate(
            Setting(workers=LEARNERS, rule=rule, compute=_COMPUTE, pushes=_PUSHES_LEARNED, learning=learning)
        )
        for name, rule in rules.items()
    }
    return Softsync(np.array(SPLITS), np.array(staleness), learned)


def draw(measured: Softsync) -> "Figure":
    """Draws the staleness against n, its distribution for one n, and the losses."""
    figure = picture.new_figure(13, 4.2)
    means, spread, loss = figure.subplots(1, 3)
    means.plot(measured.splits, 2 * measured.splits, "--", color=picture.RED, label="2n")
    means.plot(measured.splits, measured.splits, ":", color="grey", label="n")
    means.plot(measured.splits, measured.staleness.max(axis=1), "^", color=picture.ORANGE, label="largest of all")
    means.plot(measured.splits, measured.means, "o", color=picture.BLUE, label="mean")
    means.set(title="Staleness of n-softsync, 30 learners", xlabel="n", ylabel="updates", ylim=(0, None))
    shown = 15
    values = measured.staleness[list(SPLITS).index(shown)]
    shares = 100 * np.bincount(values, minlength=2 * shown + 2) / values.size
    spread.bar(np.arange(shares.size), shares, color=picture.BLUE)
    spread.axvline(2 * shown, color=picture.RED, linestyle="--", label=f"2n = {2 * shown}")
    spread.set(title=f"Staleness at n = {shown}", xlabel="updates", ylabel="share of pushes [%]")
    picture.draw_losses(loss, list(measured.learned.items()))
    # Leaves room for the legend.
    loss.set(title=f"Loss at a learning rate of {_LEARNING_RATE:g}", yscale="log", ylim=(0.01, 3e4))
    for axes in (means, spread):
        axes.legend()
    for axes in (means, spread, loss):
        axes.grid(alpha=0.3)
    return figure


def _softsync(n: int) -> BoundedDelay:
    return BoundedDelay(math.inf, grads_to_wait=LEARNERS // n)
