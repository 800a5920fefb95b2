"""Trains the cells of a grid, one after another, on one cluster.

    cell 1 (1 worker)     worker 0: pull, compute, pause, push ...
    cell 2 (3 workers)    workers 0, 1 and 2
    cell 3 (2 workers)    workers 0 and 1; worker 2 rests

It promises that all begin with the same weights, and that a step takes no less than the experiment's step time, also if
the processor could be quicker: so a delay in seconds is as many steps on any machine that is quick enough.
"""

import concurrent.futures
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator.ps_strategy.parameter_server_strategy import ParameterServerStrategy
from coordinator.testbed.cell import Cell
from coordinator.testbed.experiment import Experiment
from coordinator.testbed.loss_curve import Curve
from coordinator.testbed.record_file import RecordFile
from coordinator.testbed.training import Training

# A cell that takes so many times as long as its pauses, and so much longer, has something wrong with it.
_SLOWNESS, _PATIENCE = 20.0, 300.0


class Bench:
    """A cluster, and what is trained on it.

    Args:
      strategy: has at least the workers of the largest cell.
      experiment: what all cells have in common.
      records: the images.
      shape: of an image: height, width and channels.
    """

    def __init__(
        self,
        strategy: ParameterServerStrategy,
        experiment: Experiment,
        records: RecordFile,
        shape: tuple[int, int, int],
    ) -> None:
        self._strategy = strategy
        self._experiment = experiment
        self._records = records
        self._shape = shape
        self._trainings: dict[Any, Training] = {}

    def train(self, cell: Cell, note: Callable[[], object] = lambda: None) -> Curve:
        """Trains one cell.

        Args:
          cell: which.
          note: called after each minibatch, on this thread.

        Raises:
          TimeoutError: it took far too long.
          Exception: what `ParameterServerStrategy.join` raises.
        """
        began = time.monotonic()
        training = self._training_of(cell)
        training.start_over(cell)
        minibatches = iter(self._strategy.experimental_distribute_datasets_from_function(self._dataset_of(cell)))
        turns = self._experiment.batches_of(cell) // cell.workers
        futures: list[concurrent.futures.Future[Any]] = [
            self._strategy.schedule(training.step, args=(minibatches,), worker=worker)
            for _ in range(turns)
            for worker in range(cell.workers)
        ]
        deadline = _PATIENCE + _SLOWNESS * turns * max(self._experiment.step_time, 0.01)
        for future in concurrent.futures.as_completed(futures, timeout=deadline):
            future.result()
            note()
        self._strategy.join()
        processed = np.array([future.result() for future in futures], np.float64)
        in_order = processed[np.argsort(processed[:, 0], kind="stable")]
        return Curve(cell, in_order[:, 1], training.mean_staleness(), time.monotonic() - began)

    def _training_of(self, cell: Cell) -> Training:
        kind = Training.kind(cell)
        if kind not in self._trainings:
            self._trainings[kind] = Training(self._strategy, self._experiment, self._shape, cell)
        return self._trainings[kind]

    def _dataset_of(self, cell: Cell) -> Callable[[tf.distribute.InputContext], tf.data.Dataset]:
        size, seed = self._experiment.batch_size, self._experiment.seed

        def dataset_fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
            # Workers that rest have a dataset as well, from which nothing is taken.
            worker = context.input_pipeline_id % cell.workers
            return self._records.minibatches(size, worker, cell.workers, seed)

        return dataset_fn

    def __repr__(self) -> str:
        return f"<Bench: {self._experiment}>"
