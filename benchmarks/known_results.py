"""Published results, reproduced in virtual time: each class has `measure()`, and `draw()` for a picture.

python -m benchmarks.known_results FOLDER    measures all of them, and draws them into a folder
"""

import argparse
import dataclasses
import math
import pathlib
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from coordinator.simulation import picture
from coordinator.simulation.distribution import Exponential, LogNormal, Normal
from coordinator.simulation.learning import Learning, LogisticRegression, SimulatedModel, SmallNetwork, Vector
from coordinator.simulation.result import Array, Result
from coordinator.simulation.rules import (
    Asynchronous,
    BoundedDelay,
    ModelAverage,
    Rule,
    RuleRun,
    StaleSynchronous,
    Synchronous,
    SynchronousRun,
    Transfer,
)
from coordinator.simulation.setting import Setting
from coordinator.simulation.simulated_cluster import simulate
from coordinator.simulation.simulated_tasks import SimulatedWorker

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def _largest_error(*pairs: tuple[Array, Array]) -> float:
    """Returns the largest relative difference between what was simulated and what the table says."""
    return max(float(np.abs(simulated / said - 1).max()) for simulated, said in pairs)


@dataclasses.dataclass(frozen=True)
class WithBackups(Synchronous):
    """As `Synchronous`, but a worker whose gradient was accepted waits for the update.

    In the paper on backup workers (arXiv 1604.00981) that worker waits. `coordinator.updates.Synchronous` lets the
    worker continue, and accepts a second gradient from the worker for the same update.
    """

    name: ClassVar[str] = "synchronous_with_backups"

    def new_run(self, model: SimulatedModel) -> RuleRun:
        return _WithBackupsRun(model, self.grads_to_wait)


class _WithBackupsRun(SynchronousRun):
    def __init__(self, model: SimulatedModel, grads_to_wait: int) -> None:
        super().__init__(model, grads_to_wait=grads_to_wait)
        self._accepted_at: dict[int, int] = {}

    def may_begin(self, worker: SimulatedWorker) -> bool:
        return self._accepted_at.get(worker.index) != self.version

    def push(self, worker: SimulatedWorker, now: float) -> Transfer:
        version, rejected = self.version, self.rejected
        transfer = super().push(worker, now)
        if self.rejected == rejected:
            self._accepted_at[worker.index] = version
        return transfer


@dataclasses.dataclass(frozen=True, eq=False)
class BackupWorkers:
    """The measured figures.

    Attributes:
      update_seconds: the mean time between two updates; float64 [settings].
      gradients_per_second: gradients that are part of an update; float64 [settings].
    """

    update_seconds: Array
    gradients_per_second: Array

    _WORKERS = 100
    # Their number in each setting.
    _BACKUPS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30)

    @classmethod
    def measure(cls) -> "BackupWorkers":
        """Simulates it: most steps take about the same time, four in a thousand four times that."""
        results = [
            simulate(
                Setting(
                    workers=cls._WORKERS,
                    rule=WithBackups(cls._WORKERS - backups),
                    compute=LogNormal(1.0, 0.05),
                    slow_steps=0.004,
                    slow_step_factor=4.0,
                    pushes=150 * cls._WORKERS,
                )
            )
            for backups in cls._BACKUPS
        ]
        return cls(
            np.array([result.seconds / result.updates for result in results]),
            np.array([result.gradients_per_second for result in results]),
        )

    @property
    def best(self) -> int:
        """The number of backup workers with the most gradients per second."""
        return self._BACKUPS[int(self.gradients_per_second.argmax())]

    def __str__(self) -> str:
        first, best = self.update_seconds[0], self.update_seconds[self.gradients_per_second.argmax()]
        return (
            f"Of {self._WORKERS} workers, {self.best} as backups are best: an update takes {1e3 * best:.0f} ms in "
            f"place of {1e3 * first:.0f} ms, and {self.gradients_per_second.max() / self.gradients_per_second[0]:.2f} "
            f"times as many gradients are used in a second. The paper: of 100, from 4 to 6."
        )

    def draw(self) -> "Figure":
        """Draws the time of an update, and the gradients per second, against the number of backup workers."""
        figure = picture.new_figure(10, 4.2)
        left, right = figure.subplots(1, 2)
        left.plot(self._BACKUPS, self.update_seconds, "o-", color=picture.BLUE)
        left.set(title=f"An update of {self._WORKERS} workers' gradients less the backups'", ylabel="time [s]")
        right.plot(self._BACKUPS, self.gradients_per_second, "o-", color=picture.BLUE)
        right.axvline(self.best, color=picture.RED, linestyle="--", label=f"best: {self.best}")
        right.set(title="Speed", ylabel="gradients used per second")
        right.legend()
        for axes in (left, right):
            axes.set(xlabel="backup workers", ylim=(0, None))
            axes.grid(alpha=0.3)
        return figure


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
        return _largest_error(
            (self.synchronous, self.synchronous_formula), (self.asynchronous, self.asynchronous_formula)
        )

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
    so its gradients are seldom near the bound, and a larger bound does not slow down learning. Its idle time falls.

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
        return _largest_error(
            (self.synchronous, self.synchronous_formula), (self.asynchronous, self.asynchronous_formula)
        )

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


# By the names of their pictures.
RESULTS: dict[str, Any] = {
    "softsync": Softsync,
    "bounded_delay": BoundedDelays,
    "overheads": Overheads,
    "convergence": Convergence,
    "stragglers": Stragglers,
    "backup_workers": BackupWorkers,
}


def main() -> None:
    """Runs the command."""
    parser = argparse.ArgumentParser(description="Reproduces known results about update rules in simulation.")
    parser.add_argument("folder", type=pathlib.Path, help="folder for the pictures")
    folder = parser.parse_args().folder
    folder.mkdir(parents=True, exist_ok=True)
    for name, known in RESULTS.items():
        measured = known.measure()
        print(f"{name}: {measured}", flush=True)
        picture.save(measured.draw(), folder / f"{name}.png")


if __name__ == "__main__":
    main()
