"""Exact evaluation: workers evaluate shards of the data, and each shard's change of the metrics counts once.

    data --> shards --> strategy.schedule --> a worker: the state of the metrics after the batches of a shard
                                                                                     |
    results <-- the initial state of the metrics, and what each shard has added <----'

Nothing on a parameter server changes. If a worker is lost, its shard is evaluated again; a shard has only one result.
"""

import contextlib
import functools
import itertools
import logging
import math
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, NoReturn

import keras
import numpy as np
import tensorflow as tf

from coordinator.data.source import Source, range_vector, without_autotuning
from coordinator.options import check_integer
from coordinator.owned_values import OwnedValues
from coordinator.ps_strategy.keras.feeds import CALLS_PER_WORKER, Feed, is_endless, worker_count, worker_indices
from coordinator.ps_strategy.keras.internals.patches import compilation_of, stateful_layers
from coordinator.ps_strategy.keras.shard_functions import MetricTotals, ModelCopies, NotShardableError, ShardFunctions
from coordinator.ps_strategy.keras.steps import ModelSteps, check_model, whole
from coordinator.ps_strategy.per_worker.dataset import PerWorkerDataset

_logger = logging.getLogger("coordinator")

# With this number, workers of different speed end at about the same time, and little is repeated for a lost worker.
_SHARDS_PER_WORKER = 4
# The batches of a shard if the number of all batches is unknown.
_BATCHES_PER_SHARD = 16
# The maximum size of the batches that are sent with one call, in bytes. A single batch may be larger.
_LARGEST = 2**24
# The default batch size, as in Keras.
BATCH_SIZE = 32
# The number of combinations of metrics for which the functions of each model are kept.
_KEPT = 4
_ATTEMPTS = 3


class ShardCall(NamedTuple):
    """A call to schedule: a `tf.function` and its arguments.

    Attributes:
      batches: how many batches the call evaluates, if `Shards.are_counted`.
      worker: the only worker that may run the call; None for any worker.
    """

    function: Any
    args: tuple[Any, ...]
    batches: int
    worker: int | None = None


class Shards(ABC):
    """Data that is evaluated in shards. `are_counted`: whether the number of batches of each call is known."""

    are_counted = True

    @abstractmethod
    def calls(self, functions: ShardFunctions) -> Iterator[ShardCall]:
        """Yields the call for each shard, in order."""

    @abstractmethod
    def trial(self, functions: ShardFunctions) -> ShardCall | None:
        """Returns a call that shows on two batches whether the metrics are sums; None if the data has fewer batches."""


def shard_count(shards: int | None, strategy: Any) -> int:
    """Returns the number of shards: `shards`, or else a number for the workers, which count as one if there is none."""
    return _SHARDS_PER_WORKER * worker_count(strategy) if shards is None else shards


class ClientShards(Shards):
    """Batches that the client reads and sends to the workers. A batch is a nested structure of tensors and None.

    `count` is the number of batches, None if unknown. There are more than `shards` shards if batches are large.
    """

    def __init__(self, batches: Iterator[Any], count: int | None, shards: int) -> None:
        self._batches = batches
        self._most = _BATCHES_PER_SHARD if count is None else max(1, math.ceil(count / shards))
        self._first: list[Any] = []

    def all_batches(self) -> Iterator[Any]:
        """Returns the batches from the first on. Call it before the second item of `calls` is taken."""
        return itertools.chain(self._first, self._batches)

    def calls(self, functions: ShardFunctions) -> Iterator[ShardCall]:
        group: list[Any] = []
        is_first = True
        for batch in self.all_batches():
            if group and not _may_follow(group, batch, self._most):
                self._first = [*group, batch] if is_first else []
                yield _call(functions, group)
                group, is_first = [], False
            group.append(batch)
        if group:
            yield _call(functions, group)

    def trial(self, functions: ShardFunctions) -> ShardCall | None:
        self._first += itertools.islice(self._batches, 2)
        return ShardCall(functions.trial_of_batches, tuple(self._first), 2) if len(self._first) == 2 else None


def _call(functions: ShardFunctions, batches: Sequence[Any]) -> ShardCall:
    size = _size(batches[0])
    if size is None:
        return ShardCall(functions.of_batches, (tuple(batches),), len(batches))
    parts = [[leaf for leaf in tf.nest.flatten(batch) if leaf is not None] for batch in batches]
    joined = [leaves[0] if len(leaves) == 1 else tf.concat(leaves, 0) for leaves in zip(*parts, strict=True)]
    return ShardCall(functions.of_examples(batches[0]), (joined, np.int64(size)), len(batches))


def _may_follow(group: Sequence[Any], batch: Any, most: int) -> bool:
    """Returns True if a batch can be in one call with the batches of a group, which all have the same size."""
    size, last, next_ = _size(group[0]), _size(group[-1]), _size(batch)
    if len(group) >= most or size is None or next_ is None or last != size or not 0 < next_ <= size:
        return False
    leaves = [leaf for leaf in tf.nest.flatten(group[0]) if leaf is not None]
    size_in_bytes = sum(int(leaf.shape.num_elements()) * max(1, leaf.dtype.size) for leaf in leaves)
    if (len(group) + 1) * size_in_bytes > _LARGEST:
        return False
    return all(map(_have_same_spec, tf.nest.flatten(group[0]), tf.nest.flatten(batch)))


def _size(batch: Any) -> int | None:
    """Returns the number of examples in a batch; None if not all parts are tensors with the same number of rows."""
    leaves = [leaf for leaf in tf.nest.flatten(batch) if leaf is not None]
    if not leaves or not all(isinstance(leaf, tf.Tensor) and leaf.shape.rank for leaf in leaves):
        return None
    sizes = {leaf.shape[0] for leaf in leaves}
    return sizes.pop() if len(sizes) == 1 else None


def _have_same_spec(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is other
    return one.dtype == other.dtype and one.shape[1:] == other.shape[1:]


class RangeShards(Shards):
    """At most `shards` ranges of a source. The workers read the ranges."""

    def __init__(self, source: Source, batch_size: int, shards: int) -> None:
        self._source = source
        self._batch_size = batch_size
        self._batches = math.ceil(math.ceil(source.size / batch_size) / shards)

    def calls(self, functions: ShardFunctions) -> Iterator[ShardCall]:
        function, size = functions.of_source(self._source)[0], np.int64(self._batch_size)
        for positions in ranges_of(self._source, self._batch_size, self._batches):
            yield ShardCall(function, (positions, size), math.ceil(int(positions[2]) / self._batch_size))

    def trial(self, functions: ShardFunctions) -> ShardCall | None:
        if self._source.size <= self._batch_size:
            return None
        first_two = itertools.islice(ranges_of(self._source, self._batch_size), 2)
        return ShardCall(functions.of_source(self._source)[1], tuple(first_two), 2)


def source_shards(source: Source, batch_size: int, shards: int) -> Shards:
    """Returns the shards of a source; at most `shards` if the workers read it."""
    if not source.is_on_client:
        return RangeShards(source, batch_size, shards)
    read = source.reader()
    batches = (
        tf.nest.map_structure(tf.convert_to_tensor, read(positions)[1]) for positions in ranges_of(source, batch_size)
    )
    return ClientShards(batches, math.ceil(source.size / batch_size), shards)


def ranges_of(source: Source, batch_size: int, batches: int = 1) -> Iterator[Any]:
    """Yields ranges of `batches` batches each, in order, that contain all examples of a source."""
    width = batch_size * batches
    for start in range(0, source.size, width):
        yield range_vector(start, min(width, source.size - start), start // batch_size)


class WorkerShards(Shards):
    """The finite data of each worker. The evaluation waits for a lost worker, because no other worker has its data."""

    are_counted = False

    def __init__(self, dataset: PerWorkerDataset, workers: Sequence[int]) -> None:
        self._dataset = dataset
        self._workers = workers

    def calls(self, functions: ShardFunctions) -> Iterator[ShardCall]:
        for worker in self._workers:
            yield ShardCall(functions.of_dataset, (self._dataset,), 0, worker)

    def trial(self, functions: ShardFunctions) -> ShardCall | None:
        return ShardCall(functions.trial_of_dataset, (self._dataset,), 2, self._workers[0])


class EvaluationFeed(Feed):
    """A feed that schedules enough shards to keep the workers busy, and adds up the states of their metrics.

    In Keras' loop, a turn ends when its batches have been scheduled; the last turn ends when all shards have finished.
    The logs of a turn are the results of all finished shards. `in_place` returns the feed to use if a layer, a step or
    a metric does not allow shards. If `in_place` is None, an error is raised instead.
    """

    def __init__(self, shards: Shards, strategy: Any, in_place: Callable[[], Feed] | None = None) -> None:
        super().__init__(strategy)
        self.has_own_data = isinstance(shards, WorkerShards)
        self._shards = shards
        self._in_place = in_place
        # The feed of `in_place`, if shards are not possible.
        self._feed: Feed | None = None
        self._functions: ShardFunctions | None = None
        # The shards after `_coming`, with their numbers.
        self._calls: Iterator[tuple[int, ShardCall]] = iter(())
        # The next shard with its number; None after the last shard.
        self._coming: tuple[int, ShardCall] | None = None
        self._totals: MetricTotals | None = None
        # The greatest number of a finished shard (its position in the data), and the log of that shard's last batch.
        self._last_logs: tuple[int, Any] = (-1, {})
        # How many batches no turn has counted yet: scheduled batches, or evaluated batches if `are_counted` is False.
        self._batches = 0
        self._results: Any = None

    def __next__(self) -> NoReturn:
        """Raises RuntimeError: Keras' loop schedules turns, and asks for no batch."""
        raise RuntimeError("The batches of an evaluation are sent to the workers, and cannot be read here.")

    def evaluate(self, functions: ShardFunctions) -> Any:
        """Evaluates all shards and returns the results of the metrics, as NumPy values.

        Raises ValueError if the step or a metric does not allow shards, or if there is no data, and errors of shards.
        """
        self._begin(functions)
        try:
            while self.unfinished:
                self.wait_one()
                self._fill()
        finally:
            for future in list(self.unfinished):
                future.cancel()
        if self._totals is None:
            raise ValueError("The data to evaluate are empty.")
        return self._results_so_far()

    def schedule(self, steps: ModelSteps) -> Any:
        if self._feed is None and self._functions is None:
            self._begin(steps.shards)
        if self._feed is not None:
            return self._feed.schedule(steps)
        self._fill()
        while self._batches < steps.steps_per_call and self.unfinished:
            self.wait_one()
            self._fill()
        if not self._batches:
            raise StopIteration
        self._batches = max(0, self._batches - steps.steps_per_call)
        is_last = not self._batches and self._coming is None
        while self.unfinished and (is_last or self._totals is None or not self._finished.empty()):
            self.wait_one()
        return self._results_so_far()

    def wait_one(self) -> tuple[Any, int | None]:
        result, number = super().wait_one()
        batches = int(result["batches"])
        if not self._shards.are_counted:
            self._batches += batches
        if batches:
            assert self._functions is not None
            assert number is not None
            self._totals = self._totals or MetricTotals(self._functions.metrics())
            self._totals.add(result["state"])
            self._last_logs = max(self._last_logs, (number, result["logs"]), key=lambda logs: logs[0])
            self._results = None
        return result, number

    def wait_finished(self) -> None:
        """Waits for all shards, and assigns their totals to the metrics, for Keras to read."""
        if self._feed is not None:
            self._feed.wait_finished()
            return
        super().wait_finished()
        totals, self._totals = self._totals, None
        if totals is not None:
            totals.assign()

    def _begin(self, functions: ShardFunctions | None) -> None:
        """Checks that the metrics can be added up, and schedules the first shards.

        If the metrics cannot be added up, or if `functions` is None because the model needs its batches in order, the
        feed of `in_place` is used.
        """
        self._functions = functions
        if functions is None:
            if self._in_place is None:
                raise ValueError(
                    "A layer of the model has stateful=True and needs the batch before each batch, but a source is "
                    "evaluated in shards, in any order. Give evaluate arrays, a dataset or a dataset function."
                )
            self._feed = self._in_place()
            return
        try:
            if not functions.are_sums and (trial := self._shards.trial(functions)):
                self._try(functions, trial)
            self._calls = enumerate(self._shards.calls(functions))
            self._coming = next(self._calls, None)
            self._fill()
        except NotShardableError as error:
            if self._in_place is None:
                raise ValueError(f"The evaluation cannot be divided into shards, because {error}.") from None
            if not functions.was_reported:
                functions.was_reported = True
                _logger.warning(
                    "Batches are evaluated one by one, and those of a lost worker may count twice, because %s.", error
                )
            self._feed = self._in_place()

    def _try(self, functions: ShardFunctions, trial: ShardCall) -> None:
        self.add(self._strategy.schedule(trial.function, args=trial.args, worker=trial.worker))
        result, _ = super().wait_one()
        if not int(result["batches"]):
            return
        functions.are_sums, others = MetricTotals(functions.metrics()).find_sums(*result["state"])
        if others:
            raise NotShardableError(
                f"the state of the metric {others[0]!r} is no sum over batches, and it has no method "
                "merge(state, other)"
            )

    def _fill(self) -> None:
        most = CALLS_PER_WORKER * worker_count(self._strategy)
        while self._coming is not None and len(self.unfinished) < most:
            number, call = self._coming
            self.add(self._strategy.schedule(call.function, args=call.args, worker=call.worker), number)
            if self._shards.are_counted:
                self._batches += call.batches
            self._coming = next(self._calls, None)

    def _results_so_far(self) -> Any:
        if self._results is None:
            assert self._functions is not None
            assert self._totals is not None
            functions, logs = self._functions, self._last_logs[1]
            # Logs that cannot be computed from the state of metrics have the values of the last batch, as in Keras.
            self._results = (
                {**logs, **functions.logs_of_state(self._totals.state())}
                if logs
                else self._totals.results(functions.results)
            )
        return self._results


class StrategyEvaluation:
    """Evaluates models. Traced functions are kept as long as the models live.

    `wait_recovered` waits until lost parameter servers are recovered, and returns whether all can be reached.
    """

    def __init__(self, wait_recovered: Callable[[], bool]) -> None:
        self._wait_recovered = wait_recovered
        self._functions: OwnedValues[Callable[..., ShardFunctions]] = OwnedValues()

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
        """Returns a function that divides the data into shards; each call begins at the start of the data."""
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
            if is_endless(dataset, strategy):
                raise ValueError("The dataset is endless, so its evaluation would never end.")
            workers = worker_indices(strategy)
            return lambda: WorkerShards(dataset, workers)
        arrays = tf.nest.map_structure(_array, data)
        size = _rows(arrays)
        width = batch_size or BATCH_SIZE
        return lambda: ClientShards(_batches(arrays, size, width), math.ceil(size / width), count)

    def _prepared(self, model: Any, metrics: Sequence[Any] | None, model_state: str) -> ShardFunctions:
        """Returns the functions, and copies the weights if needed; tries again if a server is lost while it copies."""
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
        # The functions live as long as the model, and must not keep the model alive.
        functions = functools.lru_cache(_KEPT)(functools.partial(_functions, weakref.ref(model)))
        # If `model` is a bound method, which cannot have attributes, the functions are not kept.
        with contextlib.suppress(TypeError):
            functions = self._functions.setdefault(model, functions)
        if metrics is None:
            return functions(None, model_state, compilation_of(model))
        return functions(tuple(metrics), model_state)


def _functions(
    reference: Callable[[], Any], metrics: Sequence[Any] | None, model_state: str, _compilation: Any = None
) -> ShardFunctions:
    copies = ModelCopies(reference()) if model_state == "snapshot" else None
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
