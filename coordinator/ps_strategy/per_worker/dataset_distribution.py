"""Creates a per-worker dataset from a dataset function or from an existing dataset.

The function is traced on the client and run on each worker. One trace serves all workers, unless the function reads
`input_pipeline_id`, which must be a Python int (to choose files, for example): then it is traced once for each worker.
`coordinator.get_current_worker_index()` returns the same number as a tensor, with one trace. For a share that comes
with a change of the workers, the function is traced once more, on the thread of the worker that needs it.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from coordinator.data.autotuning import without_autotuning
from coordinator.errors import ClosureInputError
from coordinator.ps_strategy.per_worker.cache_files import CacheFiles, CachesInGraph, TracedCaches
from coordinator.ps_strategy.per_worker.dataset import PerWorkerDataset
from coordinator.ps_strategy.per_worker.input_shares import InputShare, InputShares
from coordinator.ps_strategy.per_worker.replica_elements import divided_among_replicas, one_for_each_replica
from coordinator.ps_strategy.per_worker.resource import WorkerContext, WorkerCopies
from coordinator.ps_strategy.per_worker.shard_order import warn_of_random_order
from coordinator.ps_strategy.per_worker.variable import get_current_worker_index
from coordinator.ps_strategy.tensorflow_internals.dataset_options import caches_replaced, options_in_graph

DatasetFunction = Callable[[tf.distribute.InputContext], tf.data.Dataset]


class DatasetDistribution:
    """Distributes datasets over the workers.

    Args:
      shares: the share of the data that each worker reads.
      trace: traces a function without arguments; returns the `calls.TracedFunction`.
      copies: runs work on the workers.
      replicas: how many a worker has. With several, elements have a part for each; see `replica_elements`.
    """

    def __init__(
        self,
        shares: InputShares,
        trace: Callable[[Callable[[], Any]], Any],
        copies: WorkerCopies,
        replicas: int = 1,
    ) -> None:
        self._replicas = replicas
        self._shares = shares
        self._trace = trace
        self._copies = copies

    def from_function(self, dataset_fn: DatasetFunction, options: tf.distribute.InputOptions | None = None) -> Any:
        """Creates each worker's dataset with `dataset_fn(input_context)`; see `ParameterServerStrategy`.

        In a function that is being traced, such as another dataset function, it returns the dataset itself.
        """
        if not tf.executing_eagerly():
            context = tf.distribute.InputContext(num_replicas_in_sync=self._replicas)
            return one_for_each_replica(_without_autotuning_in_graph(dataset_fn(context)), self._replicas)
        if not callable(dataset_fn):
            raise TypeError(
                "A dataset function takes a tf.distribute.InputContext and returns a tf.data.Dataset; "
                f"got {dataset_fn!r}."
            )
        _check(options)
        name = getattr(dataset_fn, "__name__", "dataset function")
        shares = self._shares
        traces = _TracedShares(
            name,
            lambda context: self._trace(_checked(dataset_fn, context, options)),
            # Of the first worker to come, if there is none at the moment.
            [shares.of(worker) for worker in shares.workers or [0]],
            self._replicas,
        )
        caches = CacheFiles()

        def build(context: WorkerContext) -> tf.data.Dataset:
            traced = traces.of(shares.of(context.index))
            if traced.uses_client_dataset:
                raise ClosureInputError(
                    f"The dataset function {name!r} uses a dataset that was made outside of it, on the client, where "
                    "workers cannot reach it. Make the whole dataset inside the function, or pass the ready one to "
                    "experimental_distribute_dataset."
                )
            dataset, files = traced.call_on(context.on_cpu)
            return caches.note(dataset, files.numpy() if files.shape[0] else (), context)

        def share_of(worker: int) -> Hashable:
            return traces.part_read(shares.of(worker))

        def is_numbered(context: WorkerContext) -> bool:
            operations = traces.of(shares.of(context.index)).concrete.graph.get_operations()
            return any(map(_changes_with_iterators, operations))

        return PerWorkerDataset(name, traces.element_spec, build, self._count, self._copies, share_of, is_numbered)

    def from_dataset(self, dataset: tf.data.Dataset, options: tf.distribute.InputOptions | None = None) -> Any:
        """Sends `dataset` as a graph to every worker, which reads all of it; see `ParameterServerStrategy`.

        In a function that is being traced, such as a dataset function, it returns the dataset itself.
        """
        if not tf.executing_eagerly():
            return divided_among_replicas(_without_autotuning_in_graph(dataset), self._replicas)
        if not isinstance(dataset, tf.data.Dataset):
            raise TypeError(
                f"experimental_distribute_dataset takes a tf.data.Dataset, got {dataset!r}. A function that makes one "
                "goes to experimental_distribute_datasets_from_function."
            )
        _check(options)
        dataset = without_autotuning(divided_among_replicas(dataset, self._replicas))
        graph, caches = CachesInGraph(_graph_of(dataset)), CacheFiles()
        element_spec = dataset.element_spec

        def build(context: WorkerContext) -> tf.data.Dataset:
            definition, files = graph.copy_on(context)
            # Not in a traced function, where TensorFlow would evaluate it on the client.
            variant = tf.raw_ops.DatasetFromGraph(graph_def=definition)
            copy = _buffered(tf.data.experimental.from_variant(variant, element_spec), options)
            return caches.note(copy, files, context)

        name = type(dataset).__name__.strip("_")
        return PerWorkerDataset(name, element_spec, build, self._count, self._copies)

    def _count(self) -> int:
        return len(self._shares.workers)


class _TracedShares:
    """A dataset function, traced for each share of the data, as far as it reads which one it has.

    Args:
      name: of the function, for messages.
      trace: traces it with an input context.
      shares: those that are needed now.
      replicas: how many a worker has.

    Attributes:
      element_spec: the common type of the elements.
    """

    def __init__(
        self,
        name: str,
        trace: Callable[["_InputContext"], Any],
        shares: Sequence[InputShare],
        replicas: int,
    ) -> None:
        self._name = name
        self._replicas = replicas
        self._context = _InputContext(shares[0], replicas)
        # What it reads is known when it has been traced once.
        first = trace(self._context)
        warn_of_random_order(name, first.concrete)
        self._traces = {self.part_read(shares[0]): first}
        for share in shares[1:]:
            if (part := self.part_read(share)) not in self._traces:
                self._traces[part] = trace(_InputContext(share, replicas))
        self.element_spec = _common_element_spec(name, [_element_spec(traced) for traced in self._traces.values()])
        # A function that reads no share is not traced again, and need not be kept, nor what it refers to.
        self._trace = trace if any(part is not None for part in self.part_read(shares[0])) else None

    def part_read(self, share: InputShare) -> tuple[int | None, int | None]:
        """Returns what the function reads of a share, with None for what it does not read."""
        return (
            share.pipelines if self._context.has_read_pipelines else None,
            share.number if self._context.has_read_pipeline_id else None,
        )

    def of(self, share: InputShare) -> Any:
        """Returns the function traced for a share; traces it if that has not been done.

        Raises:
          ValueError: the elements are of a type that functions were not traced for.
        """
        part = self.part_read(share)
        if part not in self._traces:
            assert self._trace is not None
            # Not on the device of the worker that needs it.
            with tf.device(None):
                traced = self._trace(_InputContext(share, self._replicas))
            spec = _common_element_spec(self._name, [self.element_spec, _element_spec(traced)])
            if spec != self.element_spec:
                raise ValueError(
                    f"The dataset function {self._name!r} gives elements of the type {_element_spec(traced)} for "
                    f"{share}, and gave {self.element_spec} before. Set their shapes, for instance by tf.ensure_shape."
                )
            self._traces[part] = traced
        return self._traces[part]


class _PipelineId(int):
    """A Python int that becomes an int64 tensor, as `get_current_worker_index()` is one; an int becomes int32."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(int(self), dtype or np.int64)


class _InputContext(tf.distribute.InputContext):
    """Records whether the dataset function has read which share it has, which makes the workers' datasets differ."""

    def __init__(self, share: InputShare, replicas: int) -> None:
        super().__init__(share.pipelines, share.number, replicas)
        self.has_read_pipeline_id = self.has_read_pipelines = False

    def owner(self) -> Any:
        """Returns, in the function, a name for the worker and its share, which is part of the names of its files.

        It has the number of workers too: a program that divides data by it must not read a file for another number.
        """
        pipelines = super().num_input_pipelines
        shares = f"share-{super().input_pipeline_id}-of-{pipelines}" if self.has_read_pipeline_id else f"of-{pipelines}"
        return tf.strings.join([f"{shares}.worker-", tf.strings.as_string(get_current_worker_index())])

    @property
    def num_input_pipelines(self) -> int:
        self.has_read_pipelines = True
        return super().num_input_pipelines

    @property
    def input_pipeline_id(self) -> int:
        self.has_read_pipeline_id = True
        return _PipelineId(super().input_pipeline_id)


def _checked(
    dataset_fn: DatasetFunction, context: "_InputContext", options: tf.distribute.InputOptions | None
) -> Callable[[], tuple[tf.data.Dataset, tf.Tensor]]:
    """Returns a function, to be traced, that makes the dataset and returns it with the files in which it is cached."""

    def make_dataset() -> tuple[tf.data.Dataset, tf.Tensor]:
        caches = TracedCaches(context.owner)
        with tf.variable_creator_scope(_refuse_variable), caches_replaced(caches.own_file):
            dataset = dataset_fn(context)
        if not isinstance(dataset, tf.data.Dataset):
            raise TypeError(
                f"The dataset function {getattr(dataset_fn, '__name__', dataset_fn)!r} must return a tf.data.Dataset, "
                f"but returned {dataset!r}."
            )
        dataset = one_for_each_replica(_without_autotuning_in_graph(dataset), context.num_replicas_in_sync)
        return _buffered(dataset, options), caches.names()

    return make_dataset


def _common_element_spec(name: str, specs: Sequence[Any]) -> Any:
    """Returns the common type of the elements of all workers' datasets, whose shapes may differ."""

    def common(first: Any, *others: Any) -> Any:
        spec = first.most_specific_common_supertype(others)
        if spec is None:
            raise ValueError(f"there is no common type for {first} and {', '.join(map(str, others))}")
        return spec

    try:
        return tf.nest.map_structure(common, *specs)
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"The dataset function {name!r} must give elements of one type on all workers, since one function takes "
            f"them: {error}"
        ) from error


def _element_spec(traced: Any) -> Any:
    return traced.concrete.structured_outputs[0].element_spec


# Datasets whose iterators take the next numbers of a random generator: the places of its two seeds among their inputs.
_RESHUFFLED = {"ShuffleDatasetV3": (2, 3), "ShuffleAndRepeatDatasetV2": (2, 3), "RandomDatasetV2": (0, 1)}
# Calls of functions, in which there may be such datasets.
_CALLS = ("PartitionedCall", "StatefulPartitionedCall", "If", "StatelessIf", "Case", "StatelessCase", "While")


def _changes_with_iterators(operation: tf.Operation) -> bool:
    """Returns whether an operation may make a dataset with a state that the creation of each iterator changes.

    Datasets in functions of others, as of `interleave`, are made again for each element.
    """
    if operation.type.startswith("DataServiceDataset") or operation.type in _CALLS:
        return True
    seeds = [operation.inputs[place] for place in _RESHUFFLED.get(operation.type, ())]
    # Two zeros stand for a seed that each worker chooses when it makes the dataset.
    return any(tf.get_static_value(seed) != 0 for seed in seeds)


def _graph_of(dataset: tf.data.Dataset) -> bytes:
    try:
        graph = tf.raw_ops.DatasetToGraphV2(
            input_dataset=tf.data.experimental.to_variant(dataset), strip_device_assignment=True
        )
    except tf.errors.FailedPreconditionError as error:
        raise ValueError(
            f"The dataset cannot be sent to the workers: {error.message} A dataset that uses variables or "
            "mutable tables must be made by a function, which goes to experimental_distribute_datasets_from_function."
        ) from error
    return bytes(graph.numpy())


def _check(options: tf.distribute.InputOptions | None) -> None:
    if options is not None and options.experimental_replication_mode != tf.distribute.InputReplicationMode.PER_WORKER:
        raise ValueError(
            "InputOptions: a worker has one dataset for all of its replicas, so only InputReplicationMode.PER_WORKER "
            "makes sense."
        )


def _without_autotuning_in_graph(dataset: tf.data.Dataset) -> tf.data.Dataset:
    """Returns a dataset of a function that is being traced, whose iterators are deleted at once."""
    return without_autotuning(dataset, options_in_graph(dataset))


def _buffered(dataset: tf.data.Dataset, options: tf.distribute.InputOptions | None) -> tf.data.Dataset:
    size = options.experimental_per_replica_buffer_size if options is not None else 0
    return dataset.prefetch(size) if size else dataset


def _refuse_variable(next_creator: Callable[..., Any], **kwargs: Any) -> NoReturn:
    raise ValueError(
        f"A dataset function must not create variables, but made one named {kwargs.get('name')!r}. Create it outside, "
        "in the strategy's scope."
    )
