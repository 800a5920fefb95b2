"""Synthetic loss curves."""

import numpy as np

from coordinator.testbed.experiment import ASYNCHRONOUS, Trial
from coordinator.testbed.results import LossCurve, TrialResult


def curve(trial: Trial, spikes: int = 0, quickness: float = 0.05, batches: int = 200, seed: int = 0) -> LossCurve:
    """Returns a loss that falls from 3 towards 0, with the given speed, and long spikes of height 1 at the end."""
    losses = 3 * np.exp(-quickness * np.arange(batches))
    for spike in range(spikes):
        losses[batches - 40 * spike - 20 : batches - 40 * spike] += 1
    times = 0.2 * np.arange(1, batches + 1) / trial.workers
    return LossCurve(
        trial=trial,
        seed=seed,
        losses=losses,
        times=times,
        mean_staleness=float(trial.workers - 1),
        seconds=1.0,
        accuracy=0.5,
    )


def asynchronous(workers: int, delay: float, spikes: int = 0, quickness: float = 0.05) -> LossCurve:
    """Returns such a curve of the asynchronous mode."""
    return curve(Trial(ASYNCHRONOUS, workers, delay), spikes, quickness)


def result(trial: Trial, spikes: int = 0, quickness: float = 0.05) -> TrialResult:
    """Returns a single run with such a curve."""
    return TrialResult([curve(trial, spikes, quickness)])
