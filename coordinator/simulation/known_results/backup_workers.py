"""Backup workers: with a few more than an update waits for, the slowest are not waited for (arXiv 1604.00981).

There, a worker whose gradient was taken waits for the next update. `coordinator.updates.Synchronous` has it go on at
once, and give the same update a second gradient; so what is simulated here is the paper's rule, not one of ours. It
decides which gradients are taken by the same function as ours.
"""

import dataclasses
from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from coordinator.simulation import colours, picture
from coordinator.simulation.distribution import LogNormal
from coordinator.simulation.model import SimulatedModel
from coordinator.simulation.push_record import PushRecord
from coordinator.simulation.result import Array
from coordinator.simulation.rules.rule import Course, Moved
from coordinator.simulation.rules.synchronous import Synchronous, SynchronousCourse
from coordinator.simulation.setting import Setting
from coordinator.simulation.simulated_cluster import simulate
from coordinator.simulation.simulated_worker import SimulatedWorker

if TYPE_CHECKING:
    from matplotlib.figure import Figure

WORKERS = 100
BACKUPS = (0, 1, 2, 3, 4, 5, 6, 8, 10, 15, 20, 30)
_UPDATES = 150


@dataclasses.dataclass(frozen=True)
class WithBackups(Synchronous):
    """The paper's rule: as `Synchronous`, but who has given an update a gradient waits until it is made."""

    @property
    def name(self) -> str:
        """See `Rule`."""
        return "synchronous_with_backups"

    def course(self, model: SimulatedModel, record: PushRecord) -> Course:
        """See `Rule`."""
        return WithBackupsCourse(model, record, self.grads_to_wait)


class WithBackupsCourse(SynchronousCourse):
    """A training under it; see `Course`."""

    def __init__(self, model: SimulatedModel, record: PushRecord, grads_to_wait: int) -> None:
        super().__init__(model, record, grads_to_wait)
        self.lined_up: deque[SimulatedWorker] = deque()
        self._given: dict[int, int] = {}

    def may_begin(self, worker: SimulatedWorker) -> bool:
        """See `Course`."""
        return self._given.get(worker.index) != self.version

    def hold(self, worker: SimulatedWorker) -> None:
        """See `Course`."""
        self.lined_up.append(worker)

    def released(self) -> SimulatedWorker | None:
        """See `Course`."""
        return self.lined_up.popleft() if self.lined_up and self.may_begin(self.lined_up[0]) else None

    def push(self, worker: SimulatedWorker, now: float) -> Moved:
        """See `Course`."""
        version, rejected = self.version, self.rejected
        moved = super().push(worker, now)
        if self.rejected == rejected:
            self._given[worker.index] = version
        return moved


@dataclasses.dataclass(frozen=True, eq=False)
class BackupWorkers:
    """What was seen.

    Attributes:
      backups: of how many workers the gradients are not waited for; int64 [settings].
      update_seconds: the mean time between two updates; float64 [settings].
      gradients_per_second: that made an update; float64 [settings].
    """

    backups: Array
    update_seconds: Array
    gradients_per_second: Array

    @property
    def best(self) -> int:
        """With how many backup workers most gradients are used in a second."""
        return int(self.backups[self.gradients_per_second.argmax()])

    def __str__(self) -> str:
        first, best = self.update_seconds[0], self.update_seconds[self.gradients_per_second.argmax()]
        return (
            f"Of {WORKERS} workers, {self.best} as backups are best: an update takes {1e3 * best:.0f} ms in place of "
            f"{1e3 * first:.0f} ms, and {self.gradients_per_second.max() / self.gradients_per_second[0]:.2f} times as "
            f"many gradients are used in a second. The paper: of 100, from 4 to 6."
        )


def measure() -> BackupWorkers:
    """Simulates it: most steps take about the same, four in a thousand four times that."""
    results = [
        simulate(
            Setting(
                workers=WORKERS,
                rule=WithBackups(WORKERS - backups),
                compute=LogNormal(1.0, 0.05),
                slow_steps=0.004,
                slow_step_factor=4.0,
                pushes=_UPDATES * WORKERS,
            )
        )
        for backups in BACKUPS
    ]
    return BackupWorkers(
        np.array(BACKUPS),
        np.array([result.seconds / result.updates for result in results]),
        np.array([result.gradients_per_second for result in results]),
    )


def draw(measured: BackupWorkers) -> "Figure":
    """The time of an update, and the gradients that are used, against the number of backup workers."""
    figure = picture.new_figure(10, 4.2)
    left, right = figure.subplots(1, 2)
    left.plot(measured.backups, measured.update_seconds, "o-", color=colours.BLUE)
    left.set(title=f"An update of {WORKERS} workers' gradients less the backups'", ylabel="time [s]", ylim=(0, None))
    right.plot(measured.backups, measured.gradients_per_second, "o-", color=colours.BLUE)
    right.axvline(measured.best, color=colours.RED, linestyle="--", label=f"best: {measured.best}")
    right.set(title="Speed", ylabel="gradients used per second", ylim=(0, None))
    right.legend()
    for axes in (left, right):
        axes.set_xlabel("backup workers")
        axes.grid(alpha=0.3)
    return figure
