"""Runs the trials of a grid in virtual time: network, data and gradients are real, the cluster is simulated.

    simulated cluster    worker 1 pulls     worker 0 pushes     worker 0 pulls ...
    this process         keeps weights      computes gradient   applies what is due, keeps weights

All gradients are computed in this process, in the order in which the simulated cluster pushes them, on the weights that
their worker has pulled, and applied when its rule applies them. So a loss curve differs from that of real servers only
as far as the times of the steps do.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import keras
import numpy as np
import tensorflow as tf

from coordinator.simulation.distribution import LogNormal, Normal
from coordinator.simulation.learning import SimulatedModel
from coordinator.simulation.random_delay import RandomDelay
from coordinator.simulation.rule import Rule
from coordinator.simulation.rules import Asynchronous, BoundedDelay, Delayed
from coordinator.simulation.setting import Setting
from coordinator.simulation.simulated_cluster import simulate
from coordinator.simulation.simulated_worker import SimulatedWorker
from coordinator.testbed.experiment import ASYNCHRONOUS, SYNCHRONOUS, Experiment, Trial
from coordinator.testbed.loss_curve import LossCurve
from coordinator.testbed.network import HeldOut, initial_weights, new_loss, new_network
from coordinator.testbed.record_file import RecordFile


class PushedGradient(NamedTuple):
    """A gradient of one minibatch.

    Attributes:
      parts: a tensor for each trainable variable.
      pulled_version: the model version that it was computed on.
    """

    parts: Sequence[Any]
    pulled_version: int


class NetworkModel(SimulatedModel):
    """The network of the test-bed, as the model of a simulated cluster.

    Args:
      shape: of an image: height, width and channels.
      optimizer: applies gradients.

    Attributes:
      losses: of each minibatch so far, in the order of the pushes.
      times: of these pushes, in seconds.
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
        """Begins a new training.

        Args:
          seed: of the initial weights.
          minibatches: an iterator for each worker.
          on_batch: called after each minibatch.
        """
        weights = initial_weights(self._shape, seed)
        for network in (self._shared, self._copy):
            network.set_weights(weights)
        for variable, value in self._fresh:
            variable.assign(value)
        self._minibatches, self._on_batch = list(minibatches), on_batch
        self.losses, self.times = [], []

    def weights(self) -> list[Any]:
        """Returns the shared weights, with what the workers' batch normalization has counted."""
        for shared, counted in zip(
            self._shared.non_trainable_variables, self._copy.non_trainable_variables, strict=True
        ):
            shared.assign(counted)
        weights: list[Any] = self._shared.get_weights()
        return weights

    def pull(self, worker: SimulatedWorker) -> None:
        """Keeps the weights as they are now for a worker."""
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
        # On a cluster, too, a gradient is applied with the count of updates that its step has pulled.
        self._optimizer.iterations.assign(pulled_version)
        self._optimizer.apply(parts, self._shared.trainable_variables)


def rule_of(trial: Trial, seed: int = 0) -> Rule:
    """Returns the rule of a trial, as `Training` has it on real servers.

    Args:
      trial: what is trained.
      seed: of random delays.
    """
    if trial.mode == ASYNCHRONOUS:
        delay = trial.delay
        return Delayed(dataclasses.replace(delay, seed=seed) if isinstance(delay, RandomDelay) else delay)
    return BoundedDelay(0, grads_to_wait=trial.workers) if trial.mode == SYNCHRONOUS else Asynchronous()


# Of a message and of the time between two steps on two processors, as `--confirm` measures them.
_LATENCY, _DISPATCH = LogNormal(0.0015, 0.5), LogNormal(0.008, 0.5)
# The share by which the times of steps vary: without it, workers would stay in phase for a whole training.
_VARIATION = 0.02


def assumed_setting(experiment: Experiment, trial: Trial) -> Setting:
    """Returns a cluster that computes each step within the step time, with the overheads of an idle machine."""
    compute = Normal(experiment.step_time, _VARIATION * experiment.step_time)
    return Setting(workers=trial.workers, rule=rule_of(trial), compute=compute, latency=_LATENCY, dispatch=_DISPATCH)


class SimulatedRunner:
    """Runs trials in virtual time.

    Args:
      experiment: what all trials have in common.
      records: the images.
      setting_of: returns the simulated cluster of a trial, but for its seed and its end; by default `assumed_setting`.
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
        """Runs one trial.

        Args:
          trial: what to train.
          seed: of the initial weights, the order of the images, and the simulated times.
          on_batch: called after each minibatch.

        Returns:
          The losses. Their times are virtual.
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
        """Returns the model with a trial's optimizer; trials with the same one share it, and what was traced for it."""
        averaged = trial.workers if trial.mode == SYNCHRONOUS else 1
        key = (trial.descent, averaged)
        if key not in self._models:
            self._models[key] = NetworkModel(self._records.data.shape, trial.descent.new_optimizer(averaged))
        return self._models[key]
