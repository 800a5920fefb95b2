"""Bagua's argument (Gan et al. 2021): synchronous training is as slow as its slowest worker, averaging is not.

One of m workers takes f times as long to compute. In lockstep, the training runs at 1 / f of its speed. If no worker
waits, only a part of the slow worker's share is lost: (m - 1 + 1 / f) / m remains.
"""

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from coordinator.simulation import picture
from coordinator.simulation.result import Array
from coordinator.simulation.rule import Rule
from coordinator.simulation.rules import BoundedDelay, ModelAverage
from coordinator.simulation.setting import Setting
from coordinator.simulation.simulated_cluster import simulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORKERS = 8
FACTORS = (1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0)
_STEP = 0.05
_SECONDS = 30.0


@dataclasses.dataclass(frozen=True, eq=False)
class Stragglers:
    """Gradients per second relative to those without a slow worker; float64 [factors].

    Attributes:
      factors: the slow worker's computation takes this many times as long.
      synchronous, averaged: as simulated.
    """

    factors: Array
    synchronous: Array
    averaged: Array

    @property
    def synchronous_formula(self) -> Array:
        """The speed according to the formula."""
        return 1 / self.factors

    @property
    def averaged_formula(self) -> Array:
        """The speed according to the formula."""
        return (WORKERS - 1 + 1 / self.factors) / WORKERS

    def __str__(self) -> str:
        return (
            f"Where one of {WORKERS} workers is {self.factors[-1]:g} times as slow, synchronous training goes at "
            f"{self.synchronous[-1]:.0%} of its speed, model averaging at {self.averaged[-1]:.0%}."
        )


def measure() -> Stragglers:
    """Simulates it."""
    together = [_gradients(BoundedDelay(0, grads_to_wait=WORKERS), factor) for factor in FACTORS]
    averaged = [_gradients(ModelAverage(), factor) for factor in FACTORS]
    full = WORKERS / _STEP
    return Stragglers(np.array(FACTORS), np.array(together) / full, np.array(averaged) / full)


def draw(measured: Stragglers) -> "Figure":
    """Draws the relative speed against the slow worker's factor."""
    figure = picture.new_figure(7, 4.6)
    axes = figure.subplots()
    fine = np.linspace(FACTORS[0], FACTORS[-1], 100)
    said = Stragglers(fine, fine, fine)
    axes.plot(fine, 100 * said.averaged_formula, "-", color=picture.BLUE, label="(m - 1 + 1/f) / m")
    axes.plot(measured.factors, 100 * measured.averaged, "o", color=picture.BLUE, label="model averaging, simulated")
    axes.plot(fine, 100 * said.synchronous_formula, "-", color=picture.RED, label="1 / f")
    axes.plot(measured.factors, 100 * measured.synchronous, "s", color=picture.RED, label="synchronous, simulated")
    axes.set(
        title=f"One slow worker of m = {WORKERS}",
        xlabel="how many times as slow it is, f",
        ylabel="speed that is left [%]",
        ylim=(0, 105),
    )
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _gradients(rule: Rule, factor: float) -> float:
    result = simulate(Setting(workers=WORKERS, rule=rule, compute=_STEP, slow_down={0: factor}, seconds=_SECONDS))
    return result.gradients_per_second
