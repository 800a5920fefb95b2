"""What large minibatches and delays cost: the column "slowdown of convergence" in ps-lite's table of algorithms."""

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from coordinator.simulation import picture
from coordinator.simulation.distribution import LogNormal
from coordinator.simulation.learning import Learning
from coordinator.simulation.problem import Vector
from coordinator.simulation.result import Array
from coordinator.simulation.rule import Rule
from coordinator.simulation.rules import Asynchronous, BoundedDelay
from coordinator.simulation.setting import Setting
from coordinator.simulation.simulated_cluster import simulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure


class AbsoluteValue:
    """The loss |w|, from w = 1: of convex losses with slopes up to 1, one for which the bounds below are reached.

    All examples have the same gradient, so that a mean over a minibatch is worth no more than a single one.
    """

    initial: Vector = np.ones(1)

    def gradient(self, parameters: Vector, generator: np.random.Generator) -> Vector:
        """Returns the slope, 1 or -1."""
        del generator
        return np.where(parameters >= 0, 1.0, -1.0)

    def loss(self, parameters: Vector) -> float:
        """Returns the absolute value."""
        return abs(float(parameters[0]))


@dataclasses.dataclass(frozen=True, eq=False)
class Convergence:
    """The slowdown of convergence in the table in the overview of ps-lite.

    A training on n examples, in minibatches of b, with up to tau gradients under way at a time, has a mean loss above
    the optimum (its regret per example) that is a multiple of that with b = tau = 1:

        synchronous     sqrt(b)
        asynchronous    sqrt(b tau)

    with the learning rate sqrt(b / (n tau)). (Langford, NIPS'09: slow learners are fast.) With m workers, whose steps
    take about the same time, tau is m.

    Attributes:
      synchronous: the slowdown as simulated, of `SIZES` on four workers; float64 [sizes].
      asynchronous: the slowdown of `WORKERS`, with minibatches of `MINIBATCH`; float64 [workers].
    """

    synchronous: Array
    asynchronous: Array

    SIZES = np.array((4, 16, 64, 256))
    WORKERS = np.array((1, 2, 4, 8, 16, 32, 64))
    MINIBATCH = 4
    _EXAMPLES = 65_536
    # In seconds. They vary so much that workers do not push in a fixed order.
    _COMPUTE = LogNormal(0.05, 0.2)

    @classmethod
    def measure(cls) -> "Convergence":
        alone = cls._mean_loss(1, Asynchronous(), 1, 1)
        together = [cls._mean_loss(4, BoundedDelay(0, grads_to_wait=4), size, 1) for size in cls.SIZES.tolist()]
        each = [cls._mean_loss(count, Asynchronous(), cls.MINIBATCH, count) for count in cls.WORKERS.tolist()]
        return cls(np.array(together) / alone, np.array(each) / alone)

    @classmethod
    def _mean_loss(cls, workers: int, rule: Rule, size: int, tau: int) -> float:
        updates = cls._EXAMPLES // size
        learning = Learning(AbsoluteValue(), 1 / np.sqrt(updates * tau), evaluate_every=1)
        # If updates are means of gradients, each worker computes its part of the minibatch.
        pushes = updates * getattr(rule, "grads_to_wait", 1)
        result = simulate(Setting(workers=workers, rule=rule, compute=cls._COMPUTE, pushes=pushes, learning=learning))
        return float(np.mean(result.losses))

    @property
    def synchronous_formula(self) -> Array:
        """The slowdown according to the table."""
        slowdown: Array = np.sqrt(self.SIZES)
        return slowdown

    @property
    def asynchronous_formula(self) -> Array:
        """The slowdown according to the table."""
        slowdown: Array = np.sqrt(self.MINIBATCH * self.WORKERS)
        return slowdown

    @property
    def largest_error(self) -> float:
        """The largest relative difference between simulation and table."""
        pairs = ((self.synchronous, self.synchronous_formula), (self.asynchronous, self.asynchronous_formula))
        return max(float(np.abs(seen / said - 1).max()) for seen, said in pairs)

    def __str__(self) -> str:
        return (
            f"Minibatches of {self.SIZES[-1]} converge {self.synchronous[-1]:.1f} times as slowly as single examples, "
            f"those of {self.MINIBATCH} on {self.WORKERS[-1]} asynchronous workers {self.asynchronous[-1]:.1f} times. "
            f"Simulation and table differ by at most {self.largest_error:.1%}."
        )

    def draw(self) -> "Figure":
        """Draws the slowdown against b, and against b tau, as simulated and according to the table."""
        figure = picture.new_figure(7, 4.6)
        axes, delayed = figure.subplots(), self.MINIBATCH * self.WORKERS
        axes.plot(self.SIZES, self.synchronous_formula, "-", color=picture.RED, label="synchronous: sqrt(b)")
        axes.plot(self.SIZES, self.synchronous, "s", color=picture.RED, label="simulated")
        axes.plot(delayed, self.asynchronous_formula, "--", color=picture.BLUE, label="asynchronous: sqrt(b tau)")
        axes.plot(delayed, self.asynchronous, "o", color=picture.BLUE, label="simulated")
        axes.set(title=f"Slowdown of convergence: the regret of {self._EXAMPLES:,} examples")
        axes.set(
            xlabel=f"b, or b tau with b = {self.MINIBATCH} and tau = 1 to {self.WORKERS[-1]} workers", xscale="log"
        )
        axes.set(ylabel="mean loss, relative to b = tau = 1", yscale="log")
        axes.grid(alpha=0.3)
        axes.legend()
        return figure
