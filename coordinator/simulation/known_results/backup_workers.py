"""Backup workers: an update waits for a few gradients less than there are workers (arXiv 1604.00981).

In the paper, a worker whose gradient was accepted waits for the next update. `coordinator.updates.Synchronous` lets it
continue at once, and accepts a second gradient from it for the same update; so this is the paper's rule, not one of the
library. It accepts gradients by the same function.
"""

import dataclasses
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from coordinator.simulation import picture
from coordinator.simulation.distribution import LogNormal
from coordinator.simulation.learning import SimulatedModel
from coordinator.simulation.result import Array
from coordinator.simulation.rule import RuleRun, Transfer
from coordinator.simulation.rules import Synchronous, SynchronousRun
from coordinator.simulation.setting import Setting
from coordinator.simulation.simulated_cluster import simulate
from coordinator.simulation.simulated_worker import SimulatedWorker

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclasses.dataclass(frozen=True)
class WithBackups(Synchronous):
    """The paper's rule: as `Synchronous`, but a worker whose gradient was accepted waits for the update."""

    name: ClassVar[str] = "synchronous_with_backups"

    def new_run(self, model: SimulatedModel) -> RuleRun:
        return _WithBackupsRun(model, self.grads_to_wait)


class _WithBackupsRun(SynchronousRun):
    def __init__(self, model: SimulatedModel, grads_to_wait: int) -> None:
        super().__init__(model, grads_to_wait)
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
