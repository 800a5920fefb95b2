"""Bounded delay (Li et al., OSDI'14): more delay means less waiting, but a model that is too old learns more slowly.

In the paper, workers are idle for about half of the time at a delay of 0 and hardly at all at 16, and the time to reach
a loss is shortest in between. Its workers compute on models that may be as many of their own steps old as the delay;
that is a stale synchronous rule which pulls every delay + 1 steps. `BoundedDelay` pulls before every step, so its
gradients are seldom near the bound, and a larger bound does not slow down learning; its idle time falls likewise.
"""

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from coordinator.simulation import picture
from coordinator.simulation.distribution import LogNormal
from coordinator.simulation.learning import Learning
from coordinator.simulation.problem import LogisticRegression
from coordinator.simulation.result import Array, Result
from coordinator.simulation.rule import Rule
from coordinator.simulation.rules import BoundedDelay, StaleSynchronous
from coordinator.simulation.setting import Setting
from coordinator.simulation.simulated_cluster import simulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORKERS = 16
DELAYS = (0, 1, 2, 4, 8, 16)
_LOSS = 0.25
_PUSHES = 6_000


@dataclasses.dataclass(frozen=True, eq=False)
class BoundedDelays:
    """The measured figures at each delay.

    Attributes:
      delays: int64 [delays].
      idle_shares: of workers whose models are as old as the delay allows; from 0 to 1; float64 [delays].
      seconds: the time until they reach the loss; `inf` if they do not; float64 [delays].
      our_idle_shares: of workers under `BoundedDelay`; float64 [delays].
    """

    delays: Array
    idle_shares: Array
    seconds: Array
    our_idle_shares: Array

    @property
    def best(self) -> int:
        """The delay at which the loss is reached first."""
        return int(self.delays[self.seconds.argmin()])

    def __str__(self) -> str:
        return (
            f"Idle from {self.idle_shares[0]:.0%} at a delay of 0 to {self.idle_shares[-1]:.1%} at {self.delays[-1]} "
            f"(BoundedDelay: from {self.our_idle_shares[0]:.0%} to {self.our_idle_shares[-1]:.1%}). A loss of "
            f"{_LOSS:g} is reached first at {self.best}, in {self.seconds.min():.1f} s; at 0 it takes "
            f"{self.seconds[0]:.1f} s, at {self.delays[-1]} {self.seconds[-1]:.1f} s."
        )


def measure() -> BoundedDelays:
    """Simulates it: the time of steps varies, and any step may be slow."""
    learning = Learning(LogisticRegression(batch=64), 0.3, evaluate_every=WORKERS)
    old = [_simulate(StaleSynchronous(delay + 1, delay + 1), learning) for delay in DELAYS]
    ours = [_simulate(BoundedDelay(delay, grads_to_wait=WORKERS), None) for delay in DELAYS]
    return BoundedDelays(
        np.array(DELAYS),
        np.array([result.idle_share for result in old]),
        np.array([_seconds_to_loss(result) for result in old]),
        np.array([result.idle_share for result in ours]),
    )


def draw(measured: BoundedDelays) -> "Figure":
    """Draws the idle time, and the time to reach a loss as computing and waiting, against the delay."""
    figure = picture.new_figure(11, 4.2)
    idle, total = figure.subplots(1, 2)
    rows = np.arange(len(DELAYS))
    idle.plot(rows, 100 * measured.idle_shares, "o-", color=picture.BLUE, label="models as old as allowed")
    idle.plot(rows, 100 * measured.our_idle_shares, "s--", color=picture.RED, label="BoundedDelay")
    idle.set(title="Waiting for others", ylabel="share of the workers' time [%]", ylim=(0, 100))
    idle.legend()
    computed = measured.seconds * (1 - measured.idle_shares)
    total.bar(rows, computed, color=picture.COMPUTE, label="compute")
    total.bar(rows, measured.seconds - computed, bottom=computed, color=picture.WAIT, label="wait")
    total.set(title=f"Time to a loss of {_LOSS:g}", ylabel="time [s]")
    total.legend()
    for axes in (idle, total):
        axes.set(xlabel="delay", xticks=rows, xticklabels=DELAYS)
        axes.grid(alpha=0.3, axis="y")
        axes.set_axisbelow(True)
    return figure


def _simulate(rule: Rule, learning: Learning | None) -> Result:
    return simulate(
        Setting(
            workers=WORKERS,
            rule=rule,
            compute=LogNormal(0.05, 0.3),
            slow_steps=0.03,
            slow_step_factor=4.0,
            pushes=_PUSHES,
            learning=learning,
        )
    )


def _seconds_to_loss(result: Result) -> float:
    reached = np.flatnonzero(result.losses <= _LOSS)
    return float(result.loss_times[reached[0]]) if reached.size else float("inf")
