"""The patches of Keras that are active while a strategy is open.

Models that are compiled with an update rule: `fit` trains them by it.

model.compile(optimizer=rule)     model.optimizer is the rule's Keras optimizer, for callbacks and for saving
fit, each step                    pull, model.train_step, push; once more with a newer model if it is rejected
fit, the end of each epoch        the rule settles, before validation and callbacks
"""

import contextlib
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
from coordinator.options import Options
from coordinator.ps_strategy.keras.feeds import (
    ClientFeed,
    EvaluationFeed,
    Feed,
    FiniteWorkerFeed,
    WorkerFeed,
    present_parts,
    result_of,
    schedule_batches,
    worker_indices,
)
from coordinator.ps_strategy.keras.internals import patches
from coordinator.ps_strategy.keras.internals import patches as keras_patches
from coordinator.ps_strategy.keras.internals.optimizers import is_optimizer, variable_of
from coordinator.ps_strategy.keras.internals.patches import (
    RepeatedStepScope,
    backups_extended,
    gradients_captured,
    stateful_layers,
)
from coordinator.ps_strategy.keras.internals.row_updates import is_table, row_updates, table_updates
from coordinator.ps_strategy.keras.ranges import RangeFits, evaluation_of_source, prediction_of_source
from coordinator.ps_strategy.keras.shard_functions import ShardFunctions
from coordinator.ps_strategy.keras.shards import ClientShards, WorkerShards, shard_count
from coordinator.ps_strategy.keras.steps import ModelSteps, Step, on_replicas, whole
from coordinator.ps_strategy.per_worker.dataset import PerWorkerDataset
from coordinator.ps_strategy.tensorflow_internals.replicas import total


class RuleFits:
    """Knows the rules of compiled models. A rule is an `UpdateRule` of the package above."""

    def __init__(self) -> None:
        self._rules: weakref.WeakKeyDictionary[keras.Model, Any] = weakref.WeakKeyDictionary()

    def compile(self, model: keras.Model, optimizer: Any) -> Any:
        """Returns what a model is compiled with, as `model.optimizer`; a rule is kept, for its steps.

        Raises:
          ValueError: the rule has an update function.
        """
        self._rules.pop(model, None)
        if not is_rule(optimizer):
            return optimizer
        if optimizer.keras_optimizer is None:
            raise ValueError(
                "A model is compiled with a rule that has a Keras optimizer, which callbacks read and checkpoints "
                "save; this one has an update function. Call rule.pull() and rule.push() in a train_step of your own."
            )
        self._rules[model] = optimizer
        return optimizer.keras_optimizer

    def step(self, model: keras.Model) -> Step:
        """Returns what trains a model on a batch: its `train_step`, by its rule if it has one.

        Raises:
          ValueError: Keras has put the rule's optimizer into one that scales the loss.
        """
        rule = self._rules.get(model)
        if rule is None:
            return on_replicas(model.train_step, model.distribute_strategy)
        if model.optimizer is not rule.keras_optimizer:
            raise ValueError(
                f"The model {model.name!r} computes in float16, for which Keras scales the loss, and a rule cannot "
                "train with that. Give it the dtype policy mixed_bfloat16, or compile it with auto_scale_loss=False."
            )
        return _step_of(rule, model)

    def callbacks(self, model: keras.Model, given: Any) -> Any:
        """Returns the callbacks of a call of `fit`, and the rule's, which comes first."""
        rule = self._rules.get(model)
        if rule is None:
            return given
        settling = _Settling(rule)
        if isinstance(given, keras.callbacks.CallbackList):
            given.append(settling)
            return given
        return [settling, *keras.tree.flatten(given if given is not None else [])]


def is_rule(optimizer: Any) -> bool:
    """Returns whether something is an update rule."""
    return callable(getattr(optimizer, "switch_to", None)) and callable(getattr(optimizer, "pull", None))


class _Settling(keras.callbacks.Callback):
    """Has the rule settle when the steps of an epoch have finished: before validation, and before other callbacks."""

    def __init__(self, rule: Any) -> None:
        super().__init__()
        self._rule = rule

    def on_test_begin(self, logs: Any = None) -> None:
        self._rule.current.settle()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        self._rule.current.settle()


def _step_of(rule: Any, model: keras.Model) -> Step:
    def step(batch: Any) -> Any:
        with rule.pull() as version:
            logs, gradients = _logs_and_gradients(rule, model, batch)
        accepted = rule.push(gradients, version)
        if rule.current.may_reject:
            repeat = tf.function(lambda: _repeat(rule, model, batch), autograph=False)
            tf.while_loop(tf.logical_not, lambda _: repeat(), [accepted])
        return logs

    return step


def _repeat(rule: Any, model: keras.Model, batch: Any) -> Any:
    """Runs a step again whose gradients were rejected; the metrics have its examples already."""
    with rule.pull() as version:
        _, gradients = _logs_and_gradients(rule, model, batch, RepeatedStepScope)
    return rule.push(gradients, version)


def _logs_and_gradients(
    rule: Any,
    model: keras.Model,
    batch: Any,
    scope: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
) -> tuple[Any, list[Any]]:
    """Runs a model's `train_step` in a scope; returns its result, and the gradients, ordered as the rule's variables.

    Those of several replicas are summed, on the worker.
    """

    def train_step(part: Any) -> Any:
        # Of the thread: each replica has one.
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
    return logs, list(map(total, zip(*(rule.ordered(*each) for each in captured), strict=True)))


_logger = logging.getLogger("coordinator")


class FitExtension:
    """Schedules the steps of `fit`, `evaluate` and `predict`; Keras' loop uses it (`patches.trainer_extended`)."""

    def __init__(self) -> None:
        self._latest_feed: Callable[[], ClientFeed | None] = lambda: None
        self._range_fits = RangeFits()
        self._rule_fits = RuleFits()
        self.compile = self._rule_fits.compile
        self.saving, self.restored = self._range_fits.saving, self._range_fits.restored
        self._has_warned = False
        self._is_infinite_on_workers = CardinalityCheck()

    def epoch_iterator(self, strategy: Any, x: Any, arguments: dict[str, Any]) -> keras_patches.EpochIterator:
        """Returns the turns of an epoch.

        Args:
          strategy: the model's strategy.
          x: anything that Keras takes, a per-worker dataset, a dataset function, or what `fitting` put in its place.
          arguments: the other arguments of Keras' `EpochIterator`.

        Raises:
          ValueError: labels or weights were given beside a per-worker dataset or a source; or the data is infinite, and
            nothing counts the steps.
        """
        if callable(x):
            x = strategy.experimental_distribute_datasets_from_function(x)
        if _is_fit(arguments) and (turns := self._range_fits.iterator(strategy, x, arguments)):
            return turns
        if isinstance(x, Source):
            if _is_evaluation(arguments):
                return evaluation_of_source(x, strategy, arguments)
            return prediction_of_source(x, strategy, arguments, self._note)
        if not isinstance(x, PerWorkerDataset):

            def create_feed(data: tf.data.Dataset) -> Feed:
                if _is_evaluation(arguments):
                    return _evaluation_feed(iter(data), strategy, itself)
                return self._client_feed(data, strategy)

            iterator = keras_patches.EpochIterator(create_feed, x, arguments)
            # Without a cycle of references, what is left of the data is freed when Keras drops it. Until then, a
            # dataset that is cached in a file cannot be read again.
            itself: Any = weakref.proxy(iterator)
            is_infinite = _is_infinite_dataset(x)
            if iterator.num_batches is None and is_infinite:
                raise _endless(_name_of_steps(arguments))
            self._warn_of_losses(strategy, arguments, is_infinite)
            return iterator
        given = [name for name in ("y", "sample_weight", "class_weight") if arguments.get(name) is not None]
        if given:
            raise ValueError(
                f"{', '.join(given)} cannot be given along with a dataset function or a per-worker dataset, whose "
                "elements are whole batches (x, y) or (x, y, sample_weight). Put it into the dataset."
            )
        feed = self._worker_feed(x, strategy, arguments)
        return keras_patches.EpochIterator(feed, keras_patches.OwnData(x), arguments)

    def _worker_feed(
        self, dataset: PerWorkerDataset, strategy: Any, arguments: dict[str, Any]
    ) -> Callable[[PerWorkerDataset], Feed]:
        """Returns a function that creates feeds; asks workers whether their data is infinite.

        Raises:
          ValueError: it is, and nothing counts the steps.
        """
        steps = arguments.get("steps_per_epoch")
        is_infinite = self._is_infinite_on_workers(dataset, strategy, is_counted=steps is not None)
        self._warn_of_losses(strategy, arguments, is_infinite)
        if steps is None:
            if is_infinite:
                raise _endless(_name_of_steps(arguments))
            if not _is_evaluation(arguments):
                return lambda dataset: FiniteWorkerFeed(dataset, strategy)
            workers = worker_indices(strategy)
            return lambda dataset: EvaluationFeed(
                WorkerShards(dataset, workers), strategy, lambda: FiniteWorkerFeed(dataset, strategy)
            )
        if is_infinite:
            return lambda dataset: WorkerFeed(dataset, strategy)
        calls = math.ceil(steps / arguments.get("steps_per_execution", 1))
        return lambda dataset: FiniteWorkerFeed(dataset, strategy, calls)

    def _warn_of_losses(self, strategy: Any, arguments: dict[str, Any], is_infinite: bool) -> None:
        if is_infinite or self._has_warned or not _is_fit(arguments):
            return
        if strategy.extended.services.variables.is_restored:
            self._has_warned = True
            _logger.warning(
                "The data of fit are neither endless nor a source: if a parameter server is lost, the examples since "
                "the checkpoint that restore_from restores are left out of the model. Give fit arrays or a source of "
                "coordinator.data, which go back with the model."
            )

    @contextlib.contextmanager
    def fitting(self, model: keras.Model, given: dict[str, Any]) -> Iterator[None]:
        """A scope for a call of `fit`; see `RangeFits.fitting`.

        Raises:
          ValueError: an argument or a layer does not go with the data; or the validation data is infinite, and nothing
            counts its steps. Keras would look at it only after the first epoch.
        """
        if given.get("validation_steps") is None:
            self._check_validation(model.distribute_strategy, given.get("validation_data"))
        given["callbacks"] = self._rule_fits.callbacks(model, given.get("callbacks"))
        with self._range_fits.fitting(model, given):
            yield

    def _check_validation(self, strategy: Any, data: Any) -> None:
        if callable(data):
            data = strategy.experimental_distribute_datasets_from_function(data)
        on_workers = isinstance(data, PerWorkerDataset)
        if self._is_infinite_on_workers(data, strategy) if on_workers else _is_infinite_dataset(data):
            raise _endless("validation_steps=")

    def turn_function(self, model: keras.Model, kind: str) -> Callable[[Any], Any]:
        """Returns the function that is called for each turn of training, evaluation or prediction.

        Args:
          model: the model.
          kind: `train` or `test`: it is called with a feed and returns logs; `predict`: with a list of batches, and
            returns outputs.

        Raises:
          ValueError: the model runs eagerly, is compiled by XLA, or has variables off the parameter servers.
        """
        check_model(model)
        if kind == "predict":
            return self._prediction(model)
        step, shards = self._rule_fits.step(model) if kind == "train" else _on_one_device(model.test_step), None
        if kind == "test" and not stateful_layers(model):
            shards = ShardFunctions(step, lambda: model.metrics, model.get_metrics_result)
        steps = ModelSteps(step, model.steps_per_execution, shards)
        return _scheduled_function(model, steps, is_training=kind == "train")

    def _prediction(self, model: keras.Model) -> Callable[[Sequence[Any]], Any]:
        """Returns a function that predicts for a turn, while workers compute the following turns."""
        strategy, stateful = model.distribute_strategy, stateful_layers(model)
        steps = ModelSteps(model.predict_step, model.steps_per_execution)

        def run_turn(batches: Sequence[Any]) -> Any:
            """Returns what `predict_step` returns, joined along the batch dimension, on the client.

            Args:
              batches: up to `steps_per_execution` batches.

            Raises:
              Exception: what a step raised.
            """
            _check_order(stateful, strategy)
            # Keras passes the batches, but not the feed that they come from.
            feed = self._latest_feed()
            if feed is not None and feed.was_read_last(batches[-1]):
                future = feed.schedule_ahead(steps, batches)
            else:
                future = schedule_batches(strategy, steps.all_of, batches)
            return tf.nest.map_structure(_joined, *result_of(future, strategy))

        return run_turn

    def _client_feed(self, dataset: tf.data.Dataset, strategy: Any) -> ClientFeed:
        feed = ClientFeed(iter(dataset), strategy)
        self._note(feed)
        return feed

    def _note(self, feed: ClientFeed) -> None:
        self._latest_feed = weakref.ref(feed)


def _on_one_device(step: Step) -> Step:
    """Returns a step of evaluation that takes batches of `PerReplica` values, too."""
    return functools.wraps(step)(lambda batch: step(whole(batch)))


def _is_evaluation(arguments: dict[str, Any]) -> bool:
    # `predict` has no labels.
    return "y" in arguments and not _is_fit(arguments)


def _evaluation_feed(batches: Iterator[Any], strategy: Any, iterator: keras_patches.EpochIterator) -> EvaluationFeed:
    if iterator.steps_per_epoch is not None:
        calls = math.ceil(iterator.steps_per_epoch / iterator.steps_per_execution)
        batches = itertools.islice(batches, calls * iterator.steps_per_execution)
    shards = ClientShards(map(present_parts, batches), iterator.num_batches, shard_count(None, strategy))
    return EvaluationFeed(shards, strategy, lambda: ClientFeed(shards.all_batches(), strategy))


class CardinalityCheck:
    """Asks workers whether their data is infinite."""

    def __init__(self) -> None:
        self._is_infinite = tf.function(lambda dataset: dataset.cardinality() == tf.data.INFINITE_CARDINALITY)

    def __call__(self, dataset: PerWorkerDataset, strategy: Any, is_counted: bool = False) -> bool:
        """Returns True if the data of one worker is; any worker is asked if the steps are counted."""
        # Without a count, the data of every worker must end. With one, no lost worker is waited for.
        workers = [None] if is_counted else worker_indices(strategy)
        futures = [strategy.schedule(self._is_infinite, args=(dataset,), worker=worker) for worker in workers]
        return any(result_of(future, strategy) for future in futures)


def _is_infinite_dataset(data: Any) -> bool:
    return isinstance(data, tf.data.Dataset) and bool(data.cardinality() == tf.data.INFINITE_CARDINALITY)


def _is_fit(arguments: dict[str, Any]) -> bool:
    # Only `fit` has class weights.
    return "class_weight" in arguments


def _name_of_steps(arguments: dict[str, Any]) -> str:
    return "steps_per_epoch=" if _is_fit(arguments) else "steps="


def _endless(steps: str) -> ValueError:
    return ValueError(f"The dataset is endless, so an epoch of it would never end. Give {steps}, the number of steps.")


def check_model(model: keras.Model) -> None:
    """Raises ValueError if the model runs eagerly, is compiled by XLA, or has variables off the parameter servers."""
    if model.run_eagerly:
        raise ValueError(
            "run_eagerly=True: workers run traced functions, they have no Python. Compile the model without it; to "
            "debug a step, call model.train_step(batch) of a model that was made without a strategy."
        )
    variables = [*model.variables, *(variable for optimizer in _optimizers(model) for variable in optimizer.variables)]
    holds = model.distribute_strategy.extended.holds
    elsewhere = [each.path for each in variables if not is_table(each) and not holds(variable_of(each))]
    if elsewhere:
        raise ValueError(
            f"{len(elsewhere)} variables of model {model.name!r} are not on parameter servers, {elsewhere[0]!r} among "
            "them. Make the model, its optimizer and its metrics, and compile it, inside `with strategy.scope():`."
        )
    # After the variables: Keras chooses XLA by itself for a model outside of the scope, if this process sees a GPU.
    if model.jit_compile:
        raise ValueError(
            "jit_compile=True: XLA compiles functions for one device, and a step uses variables on parameter servers. "
            "Compile the model without it."
        )


def _optimizers(model: keras.Model) -> list[Any]:
    """Returns all optimizers of a model.

    They are `model.optimizer`, and those that the model has as attributes or in lists, for a custom `train_step`.
    """
    values = [value if isinstance(value, (list, tuple)) else [value] for value in vars(model).values()]
    return [value for value in itertools.chain.from_iterable(values) if is_optimizer(value)]


def _scheduled_function(model: keras.Model, steps: ModelSteps, *, is_training: bool) -> Callable[[Any], Any]:
    """Returns a function that schedules a turn of training or evaluation.

    Args:
      model: a compiled model.
      steps: of `model.train_step` or `model.test_step`.
      is_training: whether the logs are reported to the strategy.
    """
    strategy, stateful = model.distribute_strategy, stateful_layers(model)

    def run_turn(feed: Any) -> Any:
        """Schedules one turn and returns the newest logs, which may be of an earlier turn.

        Args:
          feed: a feed; or an iterator of batches (`train_on_batch`), whose turn is waited for.

        Raises:
          StopIteration: no batch is left.
          Exception: what an earlier step raised.
        """
        if not (isinstance(feed, Feed) and feed.has_own_data):
            _check_order(stateful, strategy)
        if isinstance(feed, Feed):
            logs = feed.train(steps) if is_training else feed.schedule(steps)
            if is_training:
                _report_numbers(strategy, logs)
            return logs
        future = schedule_batches(strategy, steps.last_of, tuple(itertools.islice(feed, steps.steps_per_call)))
        strategy.join()
        return future.result()

    return run_turn


def _check_order(stateful: Sequence[keras.Layer], strategy: Any) -> None:
    """Raises ValueError if workers would take turns with the batches of the same sequences."""
    count = len(strategy.cluster.workers)
    if stateful and count > 1:
        raise ValueError(
            f"The layer {stateful[0].name!r} has stateful=True: each batch continues the sequences of the batch before "
            f"it, whose state is on the worker that ran it. But these batches go to any of {count} workers. Give a "
            "dataset function instead, so that each worker reads sequences of its own, or use one worker."
        )


def _report_numbers(strategy: Any, logs: dict[str, Any]) -> None:
    """Reports the logs that are numbers; a custom `train_step` may return anything."""
    for name, value in logs.items():
        with contextlib.suppress(TypeError, ValueError):
            if np.ndim(value) == 0:
                strategy.report(**{name: value})


def _joined(*outputs: Any) -> Any:
    if isinstance(outputs[0], tf.SparseTensor):
        return tf.sparse.concat(0, outputs)
    if isinstance(outputs[0], tf.RaggedTensor) or outputs[0].ndim:
        return tf.concat(outputs, 0)
    return tf.stack(outputs)


def check_backend() -> None:
    """Raises RuntimeError if Keras does not run on TensorFlow in this process."""
    if keras.backend.backend() != "tensorflow":
        raise RuntimeError(
            f"Keras runs on {keras.backend.backend()!r} in this process, and parameter servers are of TensorFlow. Set "
            "KERAS_BACKEND=tensorflow in the environment, or the backend in ~/.keras/keras.json, before Keras is "
            "imported."
        )


@contextlib.contextmanager
def keras_extended(strategy_class: type[Any], options: Options) -> Iterator[None]:
    """A scope in which Keras reads and changes single rows of embeddings, and trains the models of strategies.

    Args:
      strategy_class: the class of the strategies whose models are trained on workers.
      options: those of the strategy that is open.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(patches.row_lookups())
        stack.enter_context(row_updates(by_rows=options.sparse_updates == "rows"))
        # After them, so that they see no gradient of a table.
        stack.enter_context(table_updates())
        extension = _Extension(strategy_class)
        stack.enter_context(patches.trainer_extended(extension))
        stack.enter_context(backups_extended(extension))
        yield


class _Extension:
    """A `FitExtension` for the models of strategies, imported and created for the first model that is compiled.

    A program that trains in its own loop does not wait for the import.

    Args:
      strategy_class: the class of the strategies.
    """

    def __init__(self, strategy_class: type[Any]) -> None:
        self._strategy_class = strategy_class

    def is_for(self, strategy: Any) -> bool:
        """Returns True if models of this strategy are trained on workers."""
        return isinstance(strategy, self._strategy_class)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fit_extension, name)

    @functools.cached_property
    def _fit_extension(self) -> Any:

        return FitExtension()
