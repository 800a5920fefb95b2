"""`strategy.evaluate`: the metrics of a model over data, exactly, without changing a variable."""

import itertools
import logging
import math
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from coordinator.data.source import Source, without_autotuning
from coordinator.options import check_integer
from coordinator.owned_values import OwnedValues
from coordinator.ps_strategy.keras.feeds import CardinalityCheck, worker_indices
from coordinator.ps_strategy.keras.fit_extension import BATCH_SIZE, check_model
from coordinator.ps_strategy.keras.internals.patches import compilation_of, stateful_layers
from coordinator.ps_strategy.keras.shard_functions import ModelCopies, ShardFunctions
from coordinator.ps_strategy.keras.shards import (
    ClientShards,
    EvaluationFeed,
    Shards,
    WorkerShards,
    shard_count,
    source_shards,
)
from coordinator.ps_strategy.keras.steps import whole
from coordinator.ps_strategy.per_worker.dataset import PerWorkerDataset

_logger = logging.getLogger("coordinator")

# For how many combinations of metrics the functions of each model are kept.
_KEPT = 4
# The maximum number of attempts to copy the weights.
_ATTEMPTS = 3


class StrategyEvaluation:
    """Evaluates models, and keeps the functions that it has traced as long as the models live.

    `wait_recovered` waits until lost parameter servers are recovered; it returns whether all can be reached.
    """

    def __init__(self, wait_recovered: Callable[[], bool]) -> None:
        self._wait_recovered = wait_recovered
        self._is_infinite_on_workers = CardinalityCheck()
        self._functions: OwnedValues[OrderedDict[Hashable, Any]] = OwnedValues()

    def evaluate(
        self,
        strategy: Any,
        model: Any,
        data: Any,
        metrics: Sequence[Any] | None,
        batch_size: int | None,
        shards: int | None,
        model_state: str,
    ) -> dict[str, Any]:
        """See `ParameterServerStrategy.evaluate`."""
        self._check(strategy, model, metrics, model_state)
        for name, number in (("batch_size", batch_size), ("shards", shards)):
            if number is not None:
                check_integer(name, number, minimum=1)
        create_shards = self._shards(strategy, data, batch_size, shards)
        while True:
            functions = self._prepared(model, metrics, model_state)
            results = EvaluationFeed(create_shards(), strategy).evaluate(functions)
            if functions.copies is None or not functions.copies.was_reset:
                return {name: _number(value) for name, value in results.items()}
            _logger.warning("The evaluation begins again: a parameter server was lost, and with it the model's copies.")

    def _check(self, strategy: Any, model: Any, metrics: Sequence[Any] | None, model_state: str) -> None:
        if model_state not in ("now", "snapshot"):
            raise ValueError(f'model_state must be "now" or "snapshot", got {model_state!r}.')
        is_keras = isinstance(model, keras.Model)
        if not is_keras and not callable(model):
            raise TypeError(f"evaluate takes a Keras model or a callable, got {model!r}.")
        if is_keras:
            if model.distribute_strategy is not strategy:
                raise ValueError(f"The model {model.name!r} was not created in the scope of this strategy.")
            check_model(model)
            if layers := stateful_layers(model):
                raise ValueError(
                    f"The layer {layers[0].name!r} has stateful=True and needs the batch before each batch, but the "
                    "evaluation is divided into shards. Use model.evaluate, with one worker or a dataset function."
                )
        elif model_state == "snapshot":
            raise ValueError('model_state="snapshot" is for Keras models: only their weights are known.')
        if metrics is None and not (is_keras and model.compiled):
            raise ValueError("Give metrics=[...]: only a Keras model that is compiled has metrics.")
        if metrics is not None:
            names = [metric.name for metric in metrics]
            if not names or len(set(names)) < len(names):
                raise ValueError(f"metrics must be a list of metrics with different names, got {names}.")

    def _shards(self, strategy: Any, data: Any, batch_size: int | None, shards: int | None) -> Callable[[], Shards]:
        """Returns a function that divides data into shards, from their beginning."""
        count = shard_count(shards, strategy)
        if isinstance(data, Source):
            data.prepare(strategy)
            return lambda: source_shards(data, batch_size or BATCH_SIZE, count)
        is_dataset = isinstance(data, tf.data.Dataset)
        on_workers = isinstance(data, PerWorkerDataset) or callable(data)
        if batch_size is not None and (is_dataset or on_workers):
            raise ValueError("batch_size is for arrays and sources; datasets have batches.")
        if is_dataset:
            batches = int(data.cardinality())
            if batches == tf.data.INFINITE_CARDINALITY:
                raise ValueError(
                    "The dataset is endless, so its evaluation would never end. Use dataset.take(batches)."
                )
            return lambda: ClientShards(iter(without_autotuning(data)), batches if batches >= 0 else None, count)
        if on_workers:
            if shards is not None:
                raise ValueError("shards cannot be given for data of which each worker has a share: that is a shard.")
            dataset = data if isinstance(data, PerWorkerDataset) else strategy.distribute_datasets_from_function(data)
            if self._is_infinite_on_workers(dataset, strategy):
                raise ValueError("The dataset is endless, so its evaluation would never end.")
            workers = worker_indices(strategy)
            return lambda: WorkerShards(dataset, workers)
        arrays = tf.nest.map_structure(_array, data)
        size = _rows(arrays)
        width = batch_size or BATCH_SIZE
        return lambda: ClientShards(_batches(arrays, size, width), math.ceil(size / width), count)

    def _prepared(self, model: Any, metrics: Sequence[Any] | None, model_state: str) -> ShardFunctions:
        """Returns the functions; copies the weights for them if they need it, also if a server is lost in between."""
        for attempt in itertools.count(1):
            try:
                functions = self._functions_of(model, metrics, model_state)
                if functions.copies is not None:
                    functions.copies.take()
                return functions
            except tf.errors.OpError:
                if attempt == _ATTEMPTS or not self._wait_recovered():
                    raise
        raise AssertionError

    def _functions_of(self, model: Any, metrics: Sequence[Any] | None, model_state: str) -> ShardFunctions:
        try:
            kept = self._functions.setdefault(model, OrderedDict())
        except TypeError:
            # A callable without attributes.
            kept = OrderedDict()
        key = (model_state, compilation_of(model)) if metrics is None else (model_state, *metrics)
        if key not in kept:
            kept[key] = _functions(model, metrics, model_state)
        kept.move_to_end(key)
        if len(kept) > _KEPT:
            kept.popitem(last=False)
        return kept[key]


def _functions(model: Any, metrics: Sequence[Any] | None, model_state: str) -> ShardFunctions:
    copies = ModelCopies(model) if model_state == "snapshot" else None
    # The functions must not keep the model alive, by whose life theirs is determined.
    reference: Callable[[], Any] = weakref.ref(model)
    if metrics is None:
        return ShardFunctions(
            lambda batch: reference().test_step(whole(batch)),
            lambda: reference().metrics,
            lambda: reference().get_metrics_result(),
            copies,
        )
    own = list(metrics)

    def results() -> dict[str, Any]:
        return {metric.name: metric.result() for metric in own}

    def step(batch: Any) -> dict[str, Any]:
        x, y, weight = keras.utils.unpack_x_y_sample_weight(whole(batch))
        called = reference()
        outputs = called(x, training=False) if isinstance(called, keras.Model) else called(x)
        for metric in own:
            targets = (outputs,) if y is None else (y, outputs)
            metric.update_state(*targets, **({} if weight is None else {"sample_weight": weight}))
        return results()

    return ShardFunctions(step, lambda: own, results, copies)


def _array(value: Any) -> Any:
    if value is None or isinstance(value, tf.Tensor | tf.RaggedTensor | tf.SparseTensor):
        return value
    return np.asarray(value)


def _rows(arrays: Any) -> int:
    leaves = [array for array in tf.nest.flatten(arrays) if array is not None]
    if not all(isinstance(array, np.ndarray | tf.Tensor) and len(array.shape) for array in leaves):
        raise ValueError("Arrays to evaluate must have rows. Give ragged and sparse tensors in a tf.data.Dataset.")
    sizes = {int(array.shape[0]) for array in leaves}
    if len(sizes) != 1:
        raise ValueError(f"The arrays to evaluate must have the same number of rows, got {sorted(sizes)}.")
    return sizes.pop()


def _batches(arrays: Any, size: int, width: int) -> Iterator[Any]:
    for start in range(0, size, width):
        rows = slice(start, start + width)
        yield tf.nest.map_structure(
            lambda array, rows=rows: None if array is None else tf.convert_to_tensor(array[rows]), arrays
        )


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, np.ndarray | np.generic) and value.ndim == 0 else value
