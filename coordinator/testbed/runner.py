"""Runs the trials of a grid, one after another, on one cluster or in virtual time.

    trial 1 (1 worker)     worker 0: pull, compute, pause, push ...
    trial 2 (3 workers)    workers 0, 1 and 2
    trial 3 (2 workers)    workers 0 and 1; worker 2 is idle

All trials begin with the same weights. A step takes at least the experiment's step time, even on a faster machine. So a
delay in seconds is the same number of steps on every machine that is fast enough.

    simulated cluster    worker 1 pulls     worker 0 pushes     worker 0 pulls ...
    this process         keeps weights      computes gradient   applies what is due, keeps weights

In virtual time only the cluster is simulated. This process computes all gradients, in the order in which the simulated
cluster pushes them, on the weights that their worker has pulled. It applies each gradient when its rule does. A loss
curve differs from the curve of real servers only if the times of the steps differ.
"""

import concurrent.futures
import dataclasses
import functools
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

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
from coordinator.testbed.step_times import ASKED, FINISHED, RECORDED, Run
from coordinator.testbed.training import HeldOut, RecordFile, Training, initial_weights, new_loss, new_network

# A trial that takes longer than this multiple of its step times, plus this many seconds, has failed.
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

        `seed` is of the initial weights and the order of the images. Raises TimeoutError if it took far too long, and
        what `ParameterServerStrategy.join` raises.
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
        """Returns the losses in the order in which steps finished; `futures` has one of each worker in turn."""
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
            # Idle workers have a dataset, too, but take nothing from it.
            worker = context.input_pipeline_id % trial.workers
            return self._records.minibatches(size, worker, trial.workers, seed)

        return dataset_fn


class PushedGradient(NamedTuple):
    """A gradient of one minibatch: a tensor for each trainable variable, and the model version it was computed on."""

    parts: Sequence[Any]
    pulled_version: int


class NetworkModel(SimulatedModel):
    """The network of the test-bed, as the model of a simulated cluster.

    It has the loss and the time, in seconds, of each minibatch so far, in the order of the pushes.
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
        weights = initial_weights(self._shape, seed)
        for network in (self._shared, self._copy):
            network.set_weights(weights)
        for variable, value in self._fresh:
            variable.assign(value)
        self._minibatches, self._on_batch = list(minibatches), on_batch
        self.losses, self.times = [], []

    def weights(self) -> list[Any]:
        """Returns the shared weights, with the statistics of the workers' batch normalization."""
        for shared, counted in zip(
            self._shared.non_trainable_variables, self._copy.non_trainable_variables, strict=True
        ):
            shared.assign(counted)
        weights: list[Any] = self._shared.get_weights()
        return weights

    def pull(self, worker: SimulatedWorker) -> None:
        """Keeps the present weights for a worker."""
        # A tensor keeps its value when its variable is assigned.
        worker.parameters = [tf.convert_to_tensor(variable) for variable in self._shared.trainable_variables]

    def gradient(self, worker: SimulatedWorker) -> PushedGradient:
        """Computes the gradient of a worker's next minibatch on the weights that it has pulled."""
        loss, parts = self._compute(worker.parameters, *next(self._minibatches[worker.index]))
        self.losses.append(float(loss))
        self._on_batch()
        return PushedGradient(parts, worker.pulled_version)

    def apply(self, gradient: PushedGradient, scale: float = 1.0) -> None:
        """Applies a gradient, times a scale, to the shared weights."""
        self._apply([scale * part for part in gradient.parts], tf.constant(gradient.pulled_version, tf.int64))

    def apply_mean(self, gradients: Sequence[PushedGradient]) -> None:
        """Applies the mean of gradients to the shared weights."""
        parts = [tf.add_n(parts) / len(gradients) for parts in zip(*(each.parts for each in gradients), strict=True)]
        self.apply(PushedGradient(parts, gradients[-1].pulled_version))

    def count_push(self, now: float) -> None:
        """Records the time of a push, in seconds."""
        self.times.append(now)

    def _compute_eagerly(self, parameters: Sequence[Any], images: Any, labels: Any) -> Any:
        variables = self._copy.trainable_variables
        for variable, value in zip(variables, parameters, strict=True):
            variable.assign(value)
        with tf.GradientTape() as tape:
            loss = new_loss()(labels, self._copy(images, training=True))
        return loss, tape.gradient(loss, variables)

    def _apply_eagerly(self, parts: Sequence[Any], pulled_version: Any) -> None:
        # As on a cluster: with the count of updates that the gradient's step has pulled.
        self._optimizer.iterations.assign(pulled_version)
        self._optimizer.apply(parts, self._shared.trainable_variables)


def rule_of(trial: Trial, seed: int = 0) -> Rule:
    """Returns the rule of a trial, as `Training` has it on real servers; `seed` is for random delays."""
    if trial.mode == ASYNCHRONOUS:
        delay = trial.delay
        return Delayed(dataclasses.replace(delay, seed=seed) if isinstance(delay, RandomDelay) else delay)
    return BoundedDelay(0, grads_to_wait=trial.workers) if trial.mode == SYNCHRONOUS else Asynchronous()


# The times of a message, and between two steps, on two processors, as `--confirm` measures them.
_LATENCY, _DISPATCH = LogNormal(0.0015, 0.5), LogNormal(0.008, 0.5)
# The share by which the times of steps vary: otherwise workers would stay in phase for a whole training.
_VARIATION = 0.02


def assumed_setting(experiment: Experiment, trial: Trial) -> Setting:
    """Returns a cluster that computes each step within the step time, with the overheads of an idle machine."""
    compute = Normal(experiment.step_time, _VARIATION * experiment.step_time)
    return Setting(workers=trial.workers, rule=rule_of(trial), compute=compute, latency=_LATENCY, dispatch=_DISPATCH)


class SimulatedRunner:
    """Runs trials in virtual time.

    `setting_of` returns the simulated cluster of a trial, without its seed and end; by default `assumed_setting`.
    """

    def __init__(
        self, experiment: Experiment, records: RecordFile, setting_of: Callable[[Trial], Setting] | None = None
    ) -> None:
        self._experiment = experiment
        self._records = records
        self._setting_of = setting_of or functools.partial(assumed_setting, experiment)
        self._held_out = HeldOut(records.data)
        self._models: dict[Any, NetworkModel] = {}

    def run(self, trial: Trial, seed: int, on_batch: Callable[[], object]) -> LossCurve:
        """Runs one trial; the times of its losses are virtual.

        `seed` is of the initial weights, the order of the images, and the simulated times. `on_batch` is called after
        each minibatch.
        """
        experiment = self._experiment
        model = self._model_of(trial)
        minibatches = [
            iter(self._records.minibatches(trial.descent.batch_size, worker, trial.workers, seed))
            for worker in range(trial.workers)
        ]
        model.reset(seed, minibatches, on_batch)
        setting = dataclasses.replace(
            self._setting_of(trial), rule=rule_of(trial, seed), pushes=experiment.batches_of(trial), seed=seed
        )
        result = simulate(setting, model)
        return LossCurve(
            trial=trial,
            seed=seed,
            losses=np.array(model.losses),
            times=np.array(model.times),
            mean_staleness=result.mean_staleness,
            seconds=result.seconds,
            accuracy=self._held_out.accuracy(model.weights()),
        )

    def _model_of(self, trial: Trial) -> NetworkModel:
        """Returns the model with a trial's optimizer. Trials with the same one share it, with its traced functions."""
        averaged = trial.workers if trial.mode == SYNCHRONOUS else 1
        key = (trial.descent, averaged)
        if key not in self._models:
            self._models[key] = NetworkModel(self._records.data.shape, trial.descent.new_optimizer(averaged))
        return self._models[key]
