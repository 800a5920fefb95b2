"""What waiting costs: the overheads in ps-lite's table, and Bagua's argument about one slow worker."""

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from coordinator.simulation import picture
from coordinator.simulation.distribution import Exponential
from coordinator.simulation.result import Array
from coordinator.simulation.rule import Rule
from coordinator.simulation.rules import Asynchronous, BoundedDelay, ModelAverage
from coordinator.simulation.setting import Setting
from coordinator.simulation.simulated_cluster import simulate

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True, eq=False)
class Overheads:
    """The time lost to communication and to waiting: the table in the overview of ps-lite.

    A training on n examples in minibatches of b with m workers loses

        synchronous     n / b (Tcomm + Tsync)     every update waits for the slowest worker's part of its minibatch
        asynchronous    n / (m b) Tcomm           each worker has its own minibatches, and does not wait

    If steps are exponentially distributed, Tsync is known: the slowest of m takes H(m) = 1 + 1/2 + ... + 1/m times the
    mean, so a worker waits for H(m) - 1 times the mean.

    Attributes:
      synchronous, asynchronous: the lost time as simulated, in seconds; float64 [workers].
    """

    synchronous: Array
    asynchronous: Array

    _WORKERS = (1, 2, 4, 8, 16, 32)
    # n / b.
    _MINIBATCHES = 1600
    # The time of a whole minibatch on one worker, and Tcomm: that of a model on a worker's link; in seconds.
    _MINIBATCH_SECONDS = 0.1
    _COMMUNICATION_SECONDS = 0.02

    @classmethod
    def measure(cls) -> "Overheads":
        together, each = [], []
        for workers in cls._WORKERS:
            part = cls._MINIBATCH_SECONDS / workers
            together.append(
                cls._lost(workers, BoundedDelay(0, grads_to_wait=workers), part, cls._MINIBATCHES * workers)
            )
            each.append(cls._lost(workers, Asynchronous(), cls._MINIBATCH_SECONDS, cls._MINIBATCHES))
        return cls(np.array(together), np.array(each))

    @classmethod
    def _lost(cls, workers: int, rule: Rule, seconds: float, pushes: int) -> float:
        result = simulate(
            Setting(
                workers=workers,
                # Enough that workers never wait for them, as the table assumes.
                ps=10_000,
                rule=rule,
                compute=Exponential(seconds),
                model_bytes=cls._COMMUNICATION_SECONDS,
                gradient_bytes=0.0,
                bandwidth=1.0,
                pushes=pushes,
            )
        )
        return result.seconds - float(result.computed.mean())

    @property
    def synchronous_formula(self) -> Array:
        """The lost time according to the table."""
        harmonic = np.array([sum(1 / number for number in range(1, workers + 1)) for workers in self._WORKERS])
        waited: Array = (harmonic - 1) * self._MINIBATCH_SECONDS / np.array(self._WORKERS)
        return self._MINIBATCHES * (self._COMMUNICATION_SECONDS + waited)

    @property
    def asynchronous_formula(self) -> Array:
        """The lost time according to the table."""
        return self._MINIBATCHES / np.array(self._WORKERS) * self._COMMUNICATION_SECONDS

    @property
    def largest_error(self) -> float:
        """The largest relative difference between simulation and table."""
        pairs = ((self.synchronous, self.synchronous_formula), (self.asynchronous, self.asynchronous_formula))
        return max(float(np.abs(seen / said - 1).max()) for seen, said in pairs)

    def __str__(self) -> str:
        return (
            f"With {self._WORKERS[-1]} workers {self.synchronous[-1]:.0f} s are lost if they are synchronous, and "
            f"{self.asynchronous[-1]:.1f} s if not. Simulation and table differ by at most {self.largest_error:.1%}."
        )

    def draw(self) -> "Figure":
        """Draws the lost time against the number of workers, as simulated and according to the table."""
        figure = picture.new_figure(7, 4.6)
        axes, workers = figure.subplots(), self._WORKERS
        axes.plot(workers, self.synchronous_formula, "-", color=picture.RED, label="synchronous: n/b (Tcomm + Tsync)")
        axes.plot(workers, self.synchronous, "s", color=picture.RED, label="simulated")
        axes.plot(workers, self.asynchronous_formula, "-", color=picture.BLUE, label="asynchronous: n/(mb) Tcomm")
        axes.plot(workers, self.asynchronous, "o", color=picture.BLUE, label="simulated")
        axes.set(title=f"Lost in a training of {self._MINIBATCHES:,} minibatches")
        axes.set(xlabel="workers m", xscale="log", xticks=workers, xticklabels=workers)
        axes.set(ylabel="time lost by each worker [s]", yscale="log")
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend()
        return figure


@dataclasses.dataclass(frozen=True, eq=False)
class Stragglers:
    """Bagua's argument (Gan et al. 2021): synchronous training is as slow as its slowest worker, averaging is not.

    One of m workers takes f times as long to compute. In lockstep, the training runs at 1 / f of its speed. If no
    worker waits, only a part of the slow worker's share is lost: (m - 1 + 1 / f) / m remains.

    Attributes:
      synchronous, averaged: gradients per second relative to those without a slow worker, as simulated; float64
        [factors].
    """

    synchronous: Array
    averaged: Array

    FACTORS = np.array((1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0))
    _WORKERS = 8
    _STEP = 0.05
    _SECONDS = 30.0

    @classmethod
    def measure(cls) -> "Stragglers":
        together = [cls._speed(BoundedDelay(0, grads_to_wait=cls._WORKERS), factor) for factor in cls.FACTORS.tolist()]
        averaged = [cls._speed(ModelAverage(), factor) for factor in cls.FACTORS.tolist()]
        return cls(np.array(together), np.array(averaged))

    @classmethod
    def _speed(cls, rule: Rule, factor: float) -> float:
        setting = Setting(
            workers=cls._WORKERS, rule=rule, compute=cls._STEP, slow_down={0: factor}, seconds=cls._SECONDS
        )
        return simulate(setting).gradients_per_second / (cls._WORKERS / cls._STEP)

    @classmethod
    def averaged_formula(cls, factors: Array) -> Array:
        """Returns the relative speeds of averaging according to the formula."""
        return (cls._WORKERS - 1 + 1 / factors) / cls._WORKERS

    def __str__(self) -> str:
        return (
            f"Where one of {self._WORKERS} workers is {self.FACTORS[-1]:g} times as slow, synchronous training goes at "
            f"{self.synchronous[-1]:.0%} of its speed, model averaging at {self.averaged[-1]:.0%}."
        )

    def draw(self) -> "Figure":
        """Draws the relative speed against the slow worker's factor."""
        figure = picture.new_figure(7, 4.6)
        axes, factors = figure.subplots(), self.FACTORS
        fine = np.linspace(factors[0], factors[-1], 100)
        axes.plot(fine, 100 * self.averaged_formula(fine), "-", color=picture.BLUE, label="(m - 1 + 1/f) / m")
        axes.plot(factors, 100 * self.averaged, "o", color=picture.BLUE, label="model averaging, simulated")
        axes.plot(fine, 100 / fine, "-", color=picture.RED, label="1 / f")
        axes.plot(factors, 100 * self.synchronous, "s", color=picture.RED, label="synchronous, simulated")
        axes.set(title=f"One slow worker of m = {self._WORKERS}")
        axes.set(xlabel="how many times as slow it is, f", ylabel="speed that is left [%]", ylim=(0, 105))
        axes.grid(alpha=0.3)
        axes.legend()
        return figure
