"""What staleness does, and what it is worth: n-softsync, and bounded delay."""

import dataclasses
import math
from typing import TYPE_CHECKING

import numpy as np

from coordinator.simulation import picture
from coordinator.simulation.distribution import LogNormal, Normal
from coordinator.simulation.learning import Learning
from coordinator.simulation.problem import LogisticRegression, SmallNetwork
from coordinator.simulation.result import Array, Result
from coordinator.simulation.rule import Rule
from coordinator.simulation.rules import Asynchronous, BoundedDelay, StaleSynchronous
from coordinator.simulation.setting import Setting
from coordinator.simulation.simulated_cluster import simulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True, eq=False)
class Softsync:
    """n-softsync (Zhang et al., arXiv 1511.05950): lambda / n gradients make an update, and none is rejected.

    With lambda = 30 learners the staleness is about n on average and never above 2n. With a large n a model does not
    learn at a rate that is good for n = 1, unless each gradient's rate is divided by its staleness.

    Attributes:
      staleness: of all pushes of each training; int64 [trainings, pushes].
      learned: the results with learning, by the label of the rule.
    """

    staleness: Array
    learned: dict[str, Result]

    # The n of each training.
    SPLITS = np.array((1, 2, 3, 5, 6, 10, 15, 30))
    _LEARNERS = 30
    # Good for one update of 30 gradients, far too much for 30 updates of one each.
    _LEARNING_RATE = 4.0

    @classmethod
    def measure(cls) -> "Softsync":
        staleness = [cls._simulate(cls._rule(n), 20_000).staleness for n in cls.SPLITS.tolist()]
        rules: dict[str, Rule] = {
            "n = 1": cls._rule(1),
            "n = 30": Asynchronous(),
            "n = 30, rate / staleness": Asynchronous(lr_staleness_modulation=True),
        }
        learning = Learning(SmallNetwork(), cls._LEARNING_RATE, evaluate_every=cls._LEARNERS)
        learned = {name: cls._simulate(rule, 3_000, learning) for name, rule in rules.items()}
        return cls(np.array(staleness), learned)

    @classmethod
    def _rule(cls, n: int) -> Rule:
        return BoundedDelay(math.inf, grads_to_wait=cls._LEARNERS // n)

    @classmethod
    def _simulate(cls, rule: Rule, pushes: int, learning: Learning | None = None) -> Result:
        # Steps on equal machines without other load.
        compute = Normal(0.05, 0.0025)
        return simulate(Setting(workers=cls._LEARNERS, rule=rule, compute=compute, pushes=pushes, learning=learning))

    @property
    def means(self) -> Array:
        """The mean staleness of each training; float64 [trainings]."""
        means: Array = self.staleness.mean(axis=1)
        return means

    @property
    def over_twice(self) -> float:
        """The share of pushes of all trainings with a staleness above 2n."""
        return float((self.staleness > 2 * self.SPLITS[:, None]).mean())

    def __str__(self) -> str:
        final = ", ".join(f"{name} {result.losses[-1]:.3f}" for name, result in self.learned.items())
        ratios = self.means / self.SPLITS
        return (
            f"Mean staleness from {ratios.min():.2f} n to {ratios.max():.2f} n; P(staleness > 2n) = "
            f"{self.over_twice:.0e}, of {self.staleness.size:,} pushes. Losses: {final}."
        )

    def draw(self) -> "Figure":
        """Draws the staleness against n, its distribution for one n, and the losses."""
        figure = picture.new_figure(13, 4.2)
        means, spread, loss = figure.subplots(1, 3)
        means.plot(self.SPLITS, 2 * self.SPLITS, "--", color=picture.RED, label="2n")
        means.plot(self.SPLITS, self.SPLITS, ":", color="grey", label="n")
        means.plot(self.SPLITS, self.staleness.max(axis=1), "^", color=picture.ORANGE, label="largest of all")
        means.plot(self.SPLITS, self.means, "o", color=picture.BLUE, label="mean")
        means.set(title="Staleness of n-softsync, 30 learners", xlabel="n", ylabel="updates", ylim=(0, None))
        shown = 15
        values = self.staleness[self.SPLITS.tolist().index(shown)]
        shares = 100 * np.bincount(values, minlength=2 * shown + 2) / values.size
        spread.bar(np.arange(shares.size), shares, color=picture.BLUE)
        spread.axvline(2 * shown, color=picture.RED, linestyle="--", label=f"2n = {2 * shown}")
        spread.set(title=f"Staleness at n = {shown}", xlabel="updates", ylabel="share of pushes [%]")
        picture.draw_losses(loss, list(self.learned.items()))
        # Leaves room for the legend.
        loss.set(title=f"Loss at a learning rate of {self._LEARNING_RATE:g}", yscale="log", ylim=(0.01, 3e4))
        for axes in (means, spread):
            axes.legend()
        for axes in (means, spread, loss):
            axes.grid(alpha=0.3)
        return figure


@dataclasses.dataclass(frozen=True, eq=False)
class BoundedDelays:
    """Bounded delay (Li et al., OSDI'14): more delay means less waiting, but too old a model learns more slowly.

    In the paper, workers are idle for about half of the time at a delay of 0 and hardly at all at 16, and the time to
    reach a loss is shortest in between. Its workers compute on models that may be as many of their own steps old as the
    delay; that is a stale synchronous rule which pulls every delay + 1 steps. `BoundedDelay` pulls before every step,
    so its gradients are seldom near the bound, and a larger bound does not slow down learning; its idle time falls
    likewise.

    Attributes:
      idle_shares: of workers whose models are as old as the delay allows; from 0 to 1; float64 [delays].
      seconds: the time until they reach the loss; `inf` if they do not; float64 [delays].
      our_idle_shares: of workers under `BoundedDelay`; float64 [delays].
    """

    idle_shares: Array
    seconds: Array
    our_idle_shares: Array

    _DELAYS = (0, 1, 2, 4, 8, 16)
    _WORKERS = 16
    _LOSS = 0.25

    @classmethod
    def measure(cls) -> "BoundedDelays":
        """Simulates it: the time of steps varies, and any step may be slow."""
        learning = Learning(LogisticRegression(batch=64), 0.3, evaluate_every=cls._WORKERS)
        old = [cls._simulate(StaleSynchronous(delay + 1, delay + 1), learning) for delay in cls._DELAYS]
        ours = [cls._simulate(BoundedDelay(delay, grads_to_wait=cls._WORKERS), None) for delay in cls._DELAYS]
        return cls(
            np.array([result.idle_share for result in old]),
            np.array([cls._seconds_to_loss(result) for result in old]),
            np.array([result.idle_share for result in ours]),
        )

    @classmethod
    def _simulate(cls, rule: Rule, learning: Learning | None) -> Result:
        return simulate(
            Setting(
                workers=cls._WORKERS,
                rule=rule,
                compute=LogNormal(0.05, 0.3),
                slow_steps=0.03,
                slow_step_factor=4.0,
                pushes=6_000,
                learning=learning,
            )
        )

    @classmethod
    def _seconds_to_loss(cls, result: Result) -> float:
        reached = np.flatnonzero(result.losses <= cls._LOSS)
        return float(result.loss_times[reached[0]]) if reached.size else float("inf")

    @property
    def best(self) -> int:
        """The delay at which the loss is reached first."""
        return self._DELAYS[int(self.seconds.argmin())]

    def __str__(self) -> str:
        most = self._DELAYS[-1]
        return (
            f"Idle from {self.idle_shares[0]:.0%} at a delay of 0 to {self.idle_shares[-1]:.1%} at {most} "
            f"(BoundedDelay: from {self.our_idle_shares[0]:.0%} to {self.our_idle_shares[-1]:.1%}). A loss of "
            f"{self._LOSS:g} is reached first at {self.best}, in {self.seconds.min():.1f} s; at 0 it takes "
            f"{self.seconds[0]:.1f} s, at {most} {self.seconds[-1]:.1f} s."
        )

    def draw(self) -> "Figure":
        """Draws the idle time, and the time to reach a loss as computing and waiting, against the delay."""
        figure = picture.new_figure(11, 4.2)
        idle, total = figure.subplots(1, 2)
        rows = np.arange(len(self._DELAYS))
        idle.plot(rows, 100 * self.idle_shares, "o-", color=picture.BLUE, label="models as old as allowed")
        idle.plot(rows, 100 * self.our_idle_shares, "s--", color=picture.RED, label="BoundedDelay")
        idle.set(title="Waiting for others", ylabel="share of the workers' time [%]", ylim=(0, 100))
        computed = self.seconds * (1 - self.idle_shares)
        total.bar(rows, computed, color=picture.COMPUTE, label="compute")
        total.bar(rows, self.seconds - computed, bottom=computed, color=picture.WAIT, label="wait")
        total.set(title=f"Time to a loss of {self._LOSS:g}", ylabel="time [s]")
        for axes in (idle, total):
            axes.legend()
            axes.set(xlabel="delay", xticks=rows, xticklabels=self._DELAYS)
            axes.grid(alpha=0.3, axis="y")
            axes.set_axisbelow(True)
        return figure
