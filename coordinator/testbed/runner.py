"""Runs the trials of a grid, one after another, on one cluster or in virtual time.

    trial 1 (1 worker)     worker 0: pull, compute, pause, push ...
    trial 2 (3 workers)    workers 0, 1 and 2
    trial 3 (2 workers)    workers 0 and 1; worker 2 is idle

All trials begin with the same weights. A step takes at least the experiment's step time, even on a faster machine. So a
delay in seconds lasts the same number of steps on every machine that is fast enough.

    simulated cluster    worker 1 pulls     worker 0 pushes     worker 0 pulls ...
    this process         keeps weights      computes gradient   applies what is due, keeps weights

In virtual time only the cluster is simulated. This process computes all gradients, in the order in which the simulated
cluster pushes them. Each gradient is computed on the weights that its worker has pulled, and is applied when the
simulated rule applies it. A loss curve differs from the curve of real servers only if the times of the steps differ.
"""

import concurrent.futures
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from coordinator.ps_strategy.parameter_server_strategy import ParameterServerStrategy
from coordinator.simulation.distribution import LogNormal, Normal, RandomDelay
from coordinator.simulation.learning import SimulatedModel
from coordinator.simulation.rules import Asynchronous, BoundedDelay, Delayed, Rule
from coordinator.simulation.setting import Setting
from coordinator.simulation.simulated_cluster import simulate
from coordinator.simulation.simulated_tasks import SimulatedWorker
from coordinator.testbed.experiment import ASYNCHRONOUS, SYNCHRONOUS, Experiment, Trial
from coordinator.testbed.results import LossCurve
from coordinator.testbed.step_times import ASKED, FINISHED, RECORDED
from coordinator.testbed.training import HeldOut, RecordFile, Training, new_loss, new_network
from coordinator.updates.rule_state import Staleness

# A trial has failed if it takes longer than `_SLOWNESS` times the sum of its step times, plus `_GRACE` seconds.
_SLOWNESS, _GRACE = 20.0, 300.0


class Runner:
    """Runs trials on a cluster; the strategy has at least the workers of the largest trial."""

    def __init__(self, strategy: ParameterServerStrategy, experiment: Experiment, records: RecordFile) -> None:
        self._strategy = strategy
        self._experiment = experiment
        self._records = records
        self._held_out = HeldOut(records.data)
        self._trainings: dict[Any, Training] = {}

    def run(self, trial: Trial, seed: int, on_batch: Callable[[], object]) -> LossCurve:
        """Runs one trial; calls `on_batch` after each minibatch, on this thread.

        `seed` determines the initial weights and the order of the images. Raises TimeoutError if the trial took far too
        long, and the errors of `ParameterServerStrategy.join`.
        """
        began = time.monotonic()
        kind = Training.kind(trial)
        if kind not in self._trainings:
            self._trainings[kind] = Training(self._strategy, self._experiment, self._records.data.shape, trial)
        training = self._trainings[kind]
        training.reset(trial, seed)

        def dataset_fn(context: tf.distribute.InputContext) -> tf.data.Dataset:
            # Idle workers have a dataset, too, but read nothing from it.
            worker = context.input_pipeline_id % trial.workers
            return self._records.minibatches(trial.descent.batch_size, worker, trial.workers, seed)

        minibatches = iter(self._strategy.experimental_distribute_datasets_from_function(dataset_fn))
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
        seconds = time.monotonic() - began
        steps = np.array([future.result() for future in futures], np.float64)
        in_order = steps[np.argsort(steps[:, FINISHED], kind="stable")]
        run = training.run(seconds, [steps[worker :: trial.workers, :RECORDED] for worker in range(trial.workers)])
        return LossCurve(
            trial=trial,
            seed=seed,
            losses=in_order[:, RECORDED],
            times=in_order[:, FINISHED] - steps[:, ASKED].min(),
            mean_staleness=Staleness(tuple(map(int, run.histogram))).mean,
            seconds=seconds,
            accuracy=self._held_out.accuracy(training.network.get_weights()),
            run=run,
        )


class NetworkModel(SimulatedModel):
    """The network of the test-bed, as the model of a simulated cluster.

    A gradient consists of a tensor for each trainable variable, and the model version on which the tensors were
    computed. `losses` and `times` (in seconds) have an entry for each minibatch so far, in the order of the pushes.
    """

    def __init__(self, shape: tuple[int, int, int], optimizer: keras.optimizers.Optimizer) -> None:
        self.losses: list[float] = []
        self.times: list[float] = []
        self._shape = shape
        self._shared, self._copy = new_network(shape, 0), new_network(shape, 0)
        self._optimizer = optimizer
        optimizer.build(self._shared.trainable_variables)
        self._fresh = [(variable, variable.numpy()) for variable in optimizer.variables]
        self._minibatches: list[Any] = []
        self._on_batch: Callable[[], object] = lambda: None
        self._compute = tf.function(self._compute_eagerly)
        self._apply = tf.function(self._apply_eagerly)

    def reset(self, seed: int, minibatches: Sequence[Any], on_batch: Callable[[], object]) -> None:
        """Begins a new training with initial weights from a seed and an iterator of minibatches for each worker.

        `on_batch` is called after each minibatch.
        """
        weights = new_network(self._shape, seed).get_weights()
        for network in (self._shared, self._copy):
            network.set_weights(weights)
        for variable, value in self._fresh:
            variable.assign(value)
        self._minibatches, self._on_batch = list(minibatches), on_batch
        self.losses, self.times = [], []

    def weights(self) -> Any:
        """Returns the shared weights, with the statistics of the workers' batch normalization."""
        counted = self._copy.non_trainable_variables
        for shared, value in zip(self._shared.non_trainable_variables, counted, strict=True):
            shared.assign(value)
        return self._shared.get_weights()

    def pull(self, worker: SimulatedWorker) -> None:
        """Keeps the present weights for a worker."""
        # A tensor keeps its value when its variable is assigned.
        worker.parameters = [tf.convert_to_tensor(variable) for variable in self._shared.trainable_variables]

    def gradient(self, worker: SimulatedWorker) -> tuple[Sequence[Any], int]:
        """Computes the gradient of a worker's next minibatch on the weights that it has pulled."""
        loss, parts = self._compute(worker.parameters, *next(self._minibatches[worker.index]))
        self.losses.append(float(loss))
        self._on_batch()
        return parts, worker.pulled_version

    def apply(self, gradient: tuple[Sequence[Any], int], scale: float = 1.0) -> None:
        """Applies a gradient, times a scale, to the shared weights."""
        parts, pulled_version = gradient
        self._apply([scale * part for part in parts], tf.constant(pulled_version, tf.int64))

    def apply_mean(self, gradients: Sequence[tuple[Sequence[Any], int]]) -> None:
        parts, versions = zip(*gradients, strict=True)
        self.apply(([tf.add_n(each) / len(gradients) for each in zip(*parts, strict=True)], versions[-1]))

    def count_push(self, now: float) -> None:
        self.times.append(now)

    def _compute_eagerly(self, parameters: Sequence[Any], images: Any, labels: Any) -> Any:
        variables = self._copy.trainable_variables
        for variable, value in zip(variables, parameters, strict=True):
            variable.assign(value)
        with tf.GradientTape() as tape:
            loss = new_loss()(labels, self._copy(images, training=True))
        return loss, tape.gradient(loss, variables)

    def _apply_eagerly(self, parts: Sequence[Any], pulled_version: Any) -> None:
        # As on a cluster, the optimizer uses the count of updates that the gradient's step has pulled.
        self._optimizer.iterations.assign(pulled_version)
        self._optimizer.apply(parts, self._shared.trainable_variables)


def rule_of(trial: Trial, seed: int = 0) -> Rule:
    """Returns the rule of a trial, as `Training` has it on real servers; `seed` is for random delays."""
    if trial.mode == ASYNCHRONOUS:
        delay = trial.delay
        return Delayed(dataclasses.replace(delay, seed=seed) if isinstance(delay, RandomDelay) else delay)
    return BoundedDelay(0, grads_to_wait=trial.workers) if trial.mode == SYNCHRONOUS else Asynchronous()


# The time of a message, and the time between two steps, as `--confirm` measures them on two processors.
_LATENCY, _DISPATCH = LogNormal(0.0015, 0.5), LogNormal(0.008, 0.5)
# The share by which the times of steps vary. Without it, workers would stay in phase for a whole training.
_VARIATION = 0.02


class SimulatedRunner:
    """Runs trials in virtual time.

    `setting_of` returns the simulated cluster of a trial, without its seed and end. By default, the computation of a
    step takes about the experiment's step time, and latency and dispatch are as `--confirm` measures them.
    """

    def __init__(
        self, experiment: Experiment, records: RecordFile, setting_of: Callable[[Trial], Setting] | None = None
    ) -> None:
        self._experiment = experiment
        self._records = records
        self._setting_of = setting_of
        self._held_out = HeldOut(records.data)
        self._models: dict[Any, NetworkModel] = {}

    def run(self, trial: Trial, seed: int, on_batch: Callable[[], object]) -> LossCurve:
        """Runs one trial; the times of its losses are virtual.

        `seed` determines initial weights, image order and simulated times. `on_batch` is called after each minibatch.
        """
        experiment = self._experiment
        averaged = trial.workers if trial.mode == SYNCHRONOUS else 1
        # Trials with the same optimizer share a model, with its traced functions.
        key = (trial.descent, averaged)
        if key not in self._models:
            self._models[key] = NetworkModel(self._records.data.shape, trial.descent.new_optimizer(averaged))
        model = self._models[key]
        minibatches = [
            iter(self._records.minibatches(trial.descent.batch_size, worker, trial.workers, seed))
            for worker in range(trial.workers)
        ]
        model.reset(seed, minibatches, on_batch)
        if self._setting_of is None:
            compute = Normal(experiment.step_time, _VARIATION * experiment.step_time)
            setting = Setting(workers=trial.workers, compute=compute, latency=_LATENCY, dispatch=_DISPATCH)
        else:
            setting = self._setting_of(trial)
        end = experiment.batches_of(trial)
        result = simulate(dataclasses.replace(setting, rule=rule_of(trial, seed), pushes=end, seed=seed), model)
        return LossCurve(
            trial=trial,
            seed=seed,
            losses=np.array(model.losses),
            times=np.array(model.times),
            mean_staleness=result.mean_staleness,
            seconds=result.seconds,
            accuracy=self._held_out.accuracy(model.weights()),
        )
