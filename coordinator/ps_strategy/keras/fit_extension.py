"""Keras' `fit`, `evaluate` and `predict` for the models of an open strategy.

    Keras' loop                                        this package
      epoch iterator   one turn per `steps_per_execution`  FitExtension
        |              steps                               |
        v                                                  v
      train_function(feed)  -->  FitExtension       -->  feed.schedule(steps)  -->  strategy.schedule
        |                           newest logs  <--  feed           <--  futures
        v
      callbacks, progress bar, history: Keras' own

Each batch of data on the client is trained on once per epoch. If the worker is lost before the step has finished, the
step runs again. An epoch ends when all its steps have finished; the logs at the end of an epoch cover all its steps.

A model may be compiled with an update rule, which `fit` then uses to train the model:

    model.compile(optimizer=rule)     model.optimizer is the rule's Keras optimizer, for callbacks and for saving
    fit, each step                    pull, model.train_step, push; once more with a newer model if it is rejected
    fit, the end of each epoch        the rule settles, before validation and callbacks
"""

import contextlib
import copy
import functools
import itertools
import logging
import math
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from coordinator.data import Source
from coordinator.ps_strategy.keras.exact_evaluation import (
    BATCH_SIZE,
    ClientShards,
    EvaluationFeed,
    WorkerShards,
    ranges_of,
    shard_count,
    source_shards,
)
from coordinator.ps_strategy.keras.feeds import (
    ClientFeed,
    Feed,
    FiniteWorkerFeed,
    WorkerFeed,
    is_endless,
    present_parts,
    result_of,
    schedule_batches,
    worker_indices,
)
from coordinator.ps_strategy.keras.internals.patches import (
    EpochIterator,
    OwnData,
    RepeatedStepScope,
    gradients_captured,
    stateful_layers,
)
from coordinator.ps_strategy.keras.range_fits import RangeFits
from coordinator.ps_strategy.keras.shard_functions import ShardFunctions
from coordinator.ps_strategy.keras.steps import ModelSteps, Step, check_model, on_replicas, whole
from coordinator.ps_strategy.per_worker.dataset import PerWorkerDataset
from coordinator.ps_strategy.tensorflow_internals.replicas import total

_logger = logging.getLogger("coordinator")


class FitExtension:
    """Schedules the steps of `fit`, `evaluate` and `predict` for Keras' loop; see `patches.trainer_extended`."""

    def __init__(self) -> None:
        self._latest_feed: Callable[[], ClientFeed | None] = lambda: None
        self._range_fits = RangeFits()
        self.saving, self.restored = self._range_fits.saving, self._range_fits.restored
        # The update rules of compiled models. The class `UpdateRule` is in a higher layer.
        self._rules: weakref.WeakKeyDictionary[keras.Model, Any] = weakref.WeakKeyDictionary()
        self._has_warned = False

    def compile(self, model: keras.Model, optimizer: Any) -> Any:
        """Returns the optimizer to compile a model with; keeps an update rule for the model's steps."""
        self._rules.pop(model, None)
        if not (callable(getattr(optimizer, "switch_to", None)) and callable(getattr(optimizer, "pull", None))):
            return optimizer
        if optimizer.keras_optimizer is None:
            raise ValueError(
                "A model is compiled with a rule that has a Keras optimizer, which callbacks read and checkpoints "
                "save; this one has an update function. Call rule.pull() and rule.push() in a train_step of your own."
            )
        self._rules[model] = optimizer
        return optimizer.keras_optimizer

    @contextlib.contextmanager
    def fitting(self, model: keras.Model, given: dict[str, Any]) -> Iterator[None]:
        """A scope for a call of `fit`; see `RangeFits.fitting`.

        Also raises ValueError if the validation data is infinite and `validation_steps` is not given: Keras would look
        at the data only after the first epoch.
        """
        if given.get("validation_steps") is None:
            strategy, data = model.distribute_strategy, given.get("validation_data")
            if callable(data):
                data = strategy.experimental_distribute_datasets_from_function(data)
            if isinstance(data, PerWorkerDataset):
                is_infinite = is_endless(data, strategy)
            else:
                is_infinite = _is_infinite_dataset(data)
            if is_infinite:
                raise _endless("validation_steps=")
        if (rule := self._rules.get(model)) is not None:
            given["callbacks"] = _with_settling(rule, given.get("callbacks"))
        with self._range_fits.fitting(model, given):
            yield

    def epoch_iterator(self, strategy: Any, x: Any, arguments: dict[str, Any]) -> EpochIterator:
        """Returns the turns of an epoch; `arguments` are the other arguments of Keras' `EpochIterator`.

        `x` is any data that Keras takes, a per-worker dataset, a dataset function, or the data that `fitting` puts in
        place of `x`. Raises ValueError if labels or weights were given along with a per-worker dataset or a source, or
        if the data is infinite and the number of steps is not given.
        """
        if callable(x):
            x = strategy.experimental_distribute_datasets_from_function(x)
        # Keras passes class weights only for `fit`, and labels for all calls but `predict`.
        is_fit = "class_weight" in arguments
        if is_fit and (turns := self._range_fits.iterator(strategy, x, arguments)):
            return turns
        is_evaluation = "y" in arguments and not is_fit
        if isinstance(x, Source):
            return self._turns_of_source(x, strategy, arguments, is_evaluation)
        if isinstance(x, PerWorkerDataset):
            return self._turns_of_workers(x, strategy, arguments, is_evaluation)
        return self._turns_of_client(x, strategy, arguments, is_evaluation)

    def _turns_of_client(self, x: Any, strategy: Any, arguments: dict[str, Any], is_evaluation: bool) -> EpochIterator:
        def create_feed(dataset: tf.data.Dataset) -> Feed:
            batches = iter(dataset)
            if not is_evaluation:
                return self._noted(ClientFeed(batches, strategy))
            if itself.steps_per_epoch is not None:
                calls = math.ceil(itself.steps_per_epoch / itself.steps_per_execution)
                batches = itertools.islice(batches, calls * itself.steps_per_execution)
            shards = ClientShards(map(present_parts, batches), itself.num_batches, shard_count(None, strategy))
            return EvaluationFeed(shards, strategy, lambda: ClientFeed(shards.all_batches(), strategy))

        iterator = EpochIterator(create_feed, x, arguments)
        # A weak reference avoids a cycle, so that the rest of the data is freed when Keras drops the iterator. Until
        # then, a dataset that is cached in a file cannot be read again.
        itself: Any = weakref.proxy(iterator)
        self._check_length(strategy, arguments, _is_infinite_dataset(x), is_counted=iterator.num_batches is not None)
        return iterator

    def _turns_of_workers(
        self, dataset: PerWorkerDataset, strategy: Any, arguments: dict[str, Any], is_evaluation: bool
    ) -> EpochIterator:
        """Returns the turns for data that each worker reads; asks workers whether their data is infinite."""
        given = [name for name in ("y", "sample_weight", "class_weight") if arguments.get(name) is not None]
        if given:
            raise ValueError(
                f"{', '.join(given)} cannot be given along with a dataset function or a per-worker dataset, whose "
                "elements are whole batches (x, y) or (x, y, sample_weight). Put it into the dataset."
            )
        steps = arguments.get("steps_per_epoch")
        is_infinite = is_endless(dataset, strategy, is_counted=steps is not None)
        self._check_length(strategy, arguments, is_infinite, is_counted=steps is not None)
        calls = None if steps is None else math.ceil(steps / arguments.get("steps_per_execution", 1))
        workers = worker_indices(strategy) if is_evaluation and calls is None else []

        def create_feed(_: Any) -> Feed:
            if is_infinite:
                return WorkerFeed(dataset, strategy)
            if workers:
                shards = WorkerShards(dataset, workers)
                return EvaluationFeed(shards, strategy, lambda: FiniteWorkerFeed(dataset, strategy))
            return FiniteWorkerFeed(dataset, strategy, calls)

        return EpochIterator(create_feed, OwnData(dataset.element_spec), arguments)

    def _turns_of_source(
        self, source: Source, strategy: Any, arguments: dict[str, Any], is_evaluation: bool
    ) -> EpochIterator:
        names = {"y": "y", "sample_weight": "sample_weight", "steps_per_epoch": "steps or validation_steps"}
        given = [name for argument, name in names.items() if arguments.get(argument) is not None]
        if is_evaluation and given:
            raise ValueError(
                f"{', '.join(given)} cannot be given along with a source of coordinator.data, which gives (x, y) or "
                "(x, y, sample_weight), and is evaluated to its end."
            )
        size = arguments.get("batch_size") or BATCH_SIZE
        source.prepare(strategy)
        with strategy.scope():
            data = OwnData(source.element_spec(), math.ceil(source.size / size), size)

        def create_feed(_: Any) -> Feed:
            if is_evaluation:
                return EvaluationFeed(source_shards(source, size, shard_count(None, strategy)), strategy)
            return self._noted(ClientFeed(map(source.reader(), ranges_of(source, size)), strategy, source))

        return EpochIterator(create_feed, data, arguments)

    def _check_length(self, strategy: Any, arguments: dict[str, Any], is_infinite: bool, is_counted: bool) -> None:
        """Raises ValueError for endless data without a number of steps; warns once if recoveries leave out examples."""
        is_fit = "class_weight" in arguments
        if is_infinite and not is_counted:
            raise _endless("steps_per_epoch=" if is_fit else "steps=")
        if is_fit and not is_infinite and not self._has_warned and strategy.extended.services.variables.is_restored:
            self._has_warned = True
            _logger.warning(
                "The data of fit are neither endless nor a source: if a parameter server is lost, the examples since "
                "the checkpoint that restore_from restores are left out of the model. Give fit arrays or a source of "
                "coordinator.data, which go back with the model."
            )

    def turn_function(self, model: keras.Model, kind: str) -> Callable[[Any], Any]:
        """Returns the function that is called for each turn of training, evaluation or prediction.

        For the kinds `train` and `test`, the function takes a feed and returns logs. For `predict`, the function takes
        a list of batches and returns outputs. Raises ValueError for models that `check_model` refuses.
        """
        check_model(model)
        if kind == "predict":
            return self._prediction(model)
        if kind == "train":
            return _scheduled_function(model, self._train_step(model), None, is_training=True)
        # A test step runs on one device of the worker, so batches of `PerReplica` values are joined.
        test_step = model.test_step
        step = functools.wraps(test_step)(lambda batch: test_step(whole(batch)))
        shards = None
        if not stateful_layers(model):
            shards = ShardFunctions(step, lambda: model.metrics, model.get_metrics_result)
        return _scheduled_function(model, step, shards, is_training=False)

    def _train_step(self, model: keras.Model) -> Step:
        """Returns the function that trains a model on a batch: its `train_step`, with the model's rule, if any."""
        rule = self._rules.get(model)
        if rule is None:
            return on_replicas(model.train_step, model.distribute_strategy)
        if model.optimizer is not rule.keras_optimizer:
            raise ValueError(
                f"The model {model.name!r} computes in float16, for which Keras scales the loss, and a rule cannot "
                "train with that. Give it the dtype policy mixed_bfloat16, or compile it with auto_scale_loss=False."
            )
        return _step_of(rule, model)

    def _prediction(self, model: keras.Model) -> Callable[[Sequence[Any]], Any]:
        """Returns a function that predicts for a turn, while workers compute the following turns."""
        strategy, stateful = model.distribute_strategy, stateful_layers(model)
        steps = ModelSteps(model.predict_step, model.steps_per_execution)

        def run_turn(batches: Sequence[Any]) -> Any:
            """Returns the results of `predict_step` for some batches, joined along the first axis, on the client."""
            _check_order(stateful, strategy)
            # Keras passes the batches, but not their feed.
            feed = self._latest_feed()
            if feed is not None and feed.last_read is batches[-1]:
                future = feed.schedule_ahead(steps, batches)
            else:
                future = schedule_batches(strategy, steps.all_of, batches)
            return tf.nest.map_structure(_joined, *result_of(future, strategy))

        return run_turn

    def _noted(self, feed: ClientFeed) -> ClientFeed:
        self._latest_feed = weakref.ref(feed)
        return feed


def _is_infinite_dataset(data: Any) -> bool:
    return isinstance(data, tf.data.Dataset) and bool(data.cardinality() == tf.data.INFINITE_CARDINALITY)


def _endless(steps: str) -> ValueError:
    return ValueError(f"The dataset is endless, so an epoch of it would never end. Give {steps}, the number of steps.")


def _scheduled_function(
    model: keras.Model, step: Step, shards: ShardFunctions | None, is_training: bool
) -> Callable[[Any], Any]:
    """Returns a function that schedules a turn of training or evaluation; reports the logs of training."""
    strategy, stateful = model.distribute_strategy, stateful_layers(model)
    steps = ModelSteps(step, model.steps_per_execution, shards)

    def run_turn(feed: Any) -> Any:
        """Schedules one turn and returns the newest logs, which may be of an earlier turn.

        Takes a feed, or an iterator of batches (from `train_on_batch`); for an iterator, waits for the steps. Raises
        StopIteration if no batch is left, and errors of earlier steps.
        """
        is_feed = isinstance(feed, Feed)
        if not (is_feed and feed.has_own_data):
            _check_order(stateful, strategy)
        if not is_feed:
            future = schedule_batches(strategy, steps.last_of, tuple(itertools.islice(feed, steps.steps_per_call)))
            strategy.join()
            return future.result()
        if not is_training:
            return feed.schedule(steps)
        logs = feed.train(steps)
        for name, value in logs.items():
            # A custom `train_step` may return anything.
            with contextlib.suppress(TypeError, ValueError):
                if np.ndim(value) == 0:
                    strategy.report(**{name: value})
        return logs

    return run_turn


def _check_order(stateful: Sequence[keras.Layer], strategy: Any) -> None:
    """Raises ValueError if several workers would get batches of the same sequences."""
    if stateful and (count := len(strategy.cluster.workers)) > 1:
        raise ValueError(
            f"The layer {stateful[0].name!r} has stateful=True: each batch continues the sequences of the batch before "
            f"it, whose state is on the worker that ran it. But these batches go to any of {count} workers. Give a "
            "dataset function instead, so that each worker reads sequences of its own, or use one worker."
        )


def _joined(*outputs: Any) -> Any:
    if isinstance(outputs[0], tf.SparseTensor):
        return tf.sparse.concat(0, outputs)
    if isinstance(outputs[0], tf.RaggedTensor) or outputs[0].ndim:
        return tf.concat(outputs, 0)
    return tf.stack(outputs)


def _with_settling(rule: Any, callbacks: Any) -> Any:
    """Returns the callbacks of a call of `fit` with one more callback, which settles the rule.

    The rule settles when the steps of an epoch have finished, before validation and before the other callbacks.
    """

    def settle(*_: Any, **__: Any) -> None:
        rule.current.settle()

    settling = keras.callbacks.LambdaCallback(on_epoch_end=settle, on_test_begin=settle)
    if isinstance(callbacks, keras.callbacks.CallbackList):
        with_settling = copy.copy(callbacks)
        with_settling.callbacks = [settling, *callbacks.callbacks]
        return with_settling
    return [settling, *keras.tree.flatten(callbacks if callbacks is not None else [])]


def _step_of(rule: Any, model: keras.Model) -> Step:
    def step(batch: Any) -> Any:
        with rule.pull() as version:
            logs, gradients = _logs_and_gradients(rule, model, batch)
        accepted = rule.push(gradients, version)
        if rule.current.may_reject:

            @tf.function(autograph=False)
            def repeat() -> Any:
                # `RepeatedStepScope` leaves the metrics unchanged, which already contain these examples.
                with rule.pull() as version:
                    _, gradients = _logs_and_gradients(rule, model, batch, RepeatedStepScope)
                return rule.push(gradients, version)

            tf.while_loop(tf.logical_not, lambda _: repeat(), [accepted])
        return logs

    return step


def _logs_and_gradients(
    rule: Any,
    model: keras.Model,
    batch: Any,
    scope: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> tuple[Any, list[Any]]:
    """Runs a model's `train_step` in a scope; returns the step's result, and the gradients.

    The gradients are in the order of the rule's variables. The worker sums the gradients of several replicas.
    """

    def train_step(part: Any) -> Any:
        # A scope belongs to a thread, and each replica has its own thread.
        with scope():
            return model.train_step(part)

    strategy = model.distribute_strategy
    with gradients_captured(rule.keras_optimizer) as captured:
        logs = on_replicas(train_step, strategy)(batch)
    if len(captured) != strategy.num_replicas_in_sync:
        raise ValueError(
            f"The train_step of {model.name!r} has applied the rule's optimizer {len(captured)} times. A model that is "
            "compiled with a rule applies all of its gradients once; otherwise call rule.pull() and rule.push() in "
            "train_step, and compile the model without the rule."
        )
    return logs, list(map(total, zip(*(rule.ordered(*pair) for pair in captured), strict=True)))
