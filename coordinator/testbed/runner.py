"""Runs the trials of a grid, one after another, on one cluster.

    trial 1 (1 worker)     worker 0: pull, compute, pause, push ...
    trial 2 (3 workers)    workers 0, 1 and 2
    trial 3 (2 workers)    workers 0 and 1; worker 2 is idle

All trials begin with the same weights. A step takes at least the experiment's step time, also on a faster machine: so a
delay in seconds is the same number of steps on every machine that is fast enough.
"""

import concurrent.futures
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator.ps_strategy.parameter_server_strategy import ParameterServerStrategy
from coordinator.testbed.experiment import Experiment, Trial
from coordinator.testbed.loss_curve import LossCurve
from coordinator.testbed.network import HeldOut
from coordinator.testbed.record_file import RecordFile
from coordinator.testbed.step_times import ASKED, FINISHED, RECORDED, Run
from coordinator.testbed.training import Training

# A trial that takes longer than this multiple of its step times, plus this time in seconds, has failed.
_SLOWNESS, _GRACE = 20.0, 300.0


class Runner:
    """Runs trials on a cluster.

    Args:
      strategy: has at least the workers of the largest trial.
      experiment: what all trials have in common.
      records: the images.
    """

    def __init__(self, strategy: ParameterServerStrategy, experiment: Experiment, records: RecordFile) -> None:
        self._strategy = strategy
        self._experiment = experiment
        self._records = records
        self._held_out = HeldOut(records.data)
        self._trainings: dict[Any, Training] = {}

    def run(self, trial: Trial, seed: int, on_batch: Callable[[], object]) -> LossCurve:
        """Runs one trial.

        Args:
          trial: what to train.
          seed: of the initial weights and the order of the images.
          on_batch: called after each minibatch, on this thread.

        Raises:
          TimeoutError: it took far too long.
          Exception: what `ParameterServerStrategy.join` raises.
        """
        began = time.monotonic()
        kind = Training.kind(trial)
        if kind not in self._trainings:
            self._trainings[kind] = Training(self._strategy, self._experiment, self._records.data.shape, trial)
        training = self._trainings[kind]
        training.reset(trial, seed)
        minibatches = iter(self._strategy.experimental_distribute_datasets_from_function(self._dataset_of(trial, seed)))
        turns = self._experiment.batches_of(trial) // trial.workers
        futures: list[concurrent.futures.Future[Any]] = [
            self._strategy.schedule(training.step, args=(minibatches,), worker=worker)
            for _ in range(turns)
            for worker in range(trial.workers)
        ]
        deadline = _GRACE + _SLOWNESS * turns * max(self._experiment.step_time, 0.01)
        for future in concurrent.futures.as_completed(futures, timeout=deadline):
            future.result()
            on_batch()
        self._strategy.join()
        return self._curve_of(trial, seed, futures, time.monotonic() - began)

    def _curve_of(self, trial: Trial, seed: int, futures: Sequence[Any], seconds: float) -> LossCurve:
        """Returns the losses of steps, in the order in which they finished; one of each worker in turn."""
        steps = np.array([future.result() for future in futures], np.float64)
        in_order = steps[np.argsort(steps[:, FINISHED], kind="stable")]
        training = self._trainings[Training.kind(trial)]
        counted = training.counted()
        recorded = [steps[worker :: trial.workers, :RECORDED] for worker in range(trial.workers)]
        return LossCurve(
            trial=trial,
            seed=seed,
            losses=in_order[:, RECORDED],
            times=in_order[:, FINISHED] - steps[:, ASKED].min(),
            mean_staleness=counted.mean_staleness,
            seconds=seconds,
            accuracy=self._held_out.accuracy(training.weights()),
            run=Run(seconds, counted.updates, counted.histogram, counted.waited, recorded),
        )

    def _dataset_of(self, trial: Trial, seed: int) -> Callable[[tf.distribute.InputContext], tf.data.Dataset]:
        size = trial.descent.batch_size

        def dataset_fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
            # Idle workers have a dataset as well, from which nothing is taken.
            worker = context.input_pipeline_id % trial.workers
            return self._records.minibatches(size, worker, trial.workers, seed)

        return dataset_fn
