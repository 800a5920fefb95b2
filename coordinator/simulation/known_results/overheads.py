"""The time lost to communication and to waiting: the table in the overview of ps-lite.

A training on n examples in minibatches of b with m workers loses

    synchronous     n / b (Tcomm + Tsync)     every update waits for the slowest worker's part of its minibatch
    asynchronous    n / (m b) Tcomm           each worker has its own minibatches, and does not wait

If steps are exponentially distributed, Tsync is known: the slowest of m takes H(m) = 1 + 1/2 + ... + 1/m times the
mean, so a worker waits for H(m) - 1 times the mean.
"""

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from coordinator.simulation import picture
from coordinator.simulation.distribution import Exponential
from coordinator.simulation.result import Array
from coordinator.simulation.rule import Rule
from coordinator.simulation.rules import Asynchronous, BoundedDelay
from coordinator.simulation.setting import Setting
from coordinator.simulation.simulated_cluster import simulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORKERS = (1, 2, 4, 8, 16, 32)
# n / b.
_MINIBATCHES = 1600
# The time of a whole minibatch on one worker, and Tcomm: that of a model on a worker's link; in seconds.
_MINIBATCH_SECONDS = 0.1
_COMMUNICATION_SECONDS = 0.02
# Enough that workers never wait for them, as the table assumes.
_PS = 10_000


@dataclasses.dataclass(frozen=True, eq=False)
class Overheads:
    """The time lost in a training, in seconds; float64 [workers].

    Attributes:
      synchronous, asynchronous: as simulated.
      synchronous_formula, asynchronous_formula: according to the table.
    """

    synchronous: Array
    asynchronous: Array
    synchronous_formula: Array
    asynchronous_formula: Array

    @property
    def largest_error(self) -> float:
        """The largest relative difference between simulation and table."""
        pairs = ((self.synchronous, self.synchronous_formula), (self.asynchronous, self.asynchronous_formula))
        return max(float(np.abs(seen / said - 1).max()) for seen, said in pairs)

    def __str__(self) -> str:
        return (
            f"With {WORKERS[-1]} workers {self.synchronous[-1]:.0f} s are lost if they are synchronous, and "
            f"{self.asynchronous[-1]:.1f} s if not. Simulation and table differ by at most {self.largest_error:.1%}."
        )


def measure() -> Overheads:
    """Simulates it."""
    together, each = [], []
    for workers in WORKERS:
        part = _MINIBATCH_SECONDS / workers
        together.append(_lost(workers, BoundedDelay(0, grads_to_wait=workers), part, _MINIBATCHES * workers))
        each.append(_lost(workers, Asynchronous(), _MINIBATCH_SECONDS, _MINIBATCHES))
    counts = np.array(WORKERS)
    harmonic = np.array([sum(1 / number for number in range(1, workers + 1)) for workers in WORKERS])
    communicated, waited = _COMMUNICATION_SECONDS, (harmonic - 1) * _MINIBATCH_SECONDS / counts
    return Overheads(
        np.array(together),
        np.array(each),
        _MINIBATCHES * (communicated + waited),
        _MINIBATCHES / counts * communicated,
    )


def draw(measured: Overheads) -> "Figure":
    """Draws the lost time against the number of workers, as simulated and according to the table."""
    figure = picture.new_figure(7, 4.6)
    axes = figure.subplots()
    axes.plot(WORKERS, measured.synchronous_formula, "-", color=picture.RED, label="synchronous: n/b (Tcomm + Tsync)")
    axes.plot(WORKERS, measured.synchronous, "s", color=picture.RED, label="simulated")
    axes.plot(WORKERS, measured.asynchronous_formula, "-", color=picture.BLUE, label="asynchronous: n/(mb) Tcomm")
    axes.plot(WORKERS, measured.asynchronous, "o", color=picture.BLUE, label="simulated")
    axes.set(
        title=f"Lost in a training of {_MINIBATCHES:,} minibatches",
        xlabel="workers m",
        ylabel="time lost by each worker [s]",
        xscale="log",
        yscale="log",
        xticks=WORKERS,
        xticklabels=WORKERS,
    )
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend()
    return figure


def _lost(workers: int, rule: Rule, seconds: float, pushes: int) -> float:
    """Returns the mean time that a worker has not computed in a training, in seconds."""
    result = simulate(
        Setting(
            workers=workers,
            ps=_PS,
            rule=rule,
            compute=Exponential(seconds),
            model_bytes=_COMMUNICATION_SECONDS,
            gradient_bytes=0.0,
            bandwidth=1.0,
            pushes=pushes,
        )
    )
    return result.seconds - float(result.computed.mean())
