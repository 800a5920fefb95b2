"""Creates a per-worker dataset from a dataset function or from an existing dataset.

The function is traced on the client and run on each worker. One trace serves all workers. But if the function reads
`input_pipeline_id`, which must be a Python int (to choose files, for example), it is traced once for each worker.
`coordinator.get_current_worker_index()` returns the same number as a tensor, and needs one trace. If a worker gets a
new share because the workers have changed, the thread of that worker traces the function once more.

A `tf.distribute.InputContext` tells the function which share of the data it has:

    the workers of the beginning    share 0 of 2, share 1 of 2
    worker 2 is added               the new worker: share 2 of 3; the others keep their shares
      with `reshard_inputs`         share 0 of 3, share 1 of 3, share 2 of 3

If workers have several replicas, an element has a part for each replica:

    of a dataset function    batch 0   batch 1   batch 2   batch 3        one batch for each replica
                             `-- element 0 --'   `-- element 1 --'
    any other dataset        batch 0 = element 0, divided by rows         one batch for all replicas

Promises: the parts are in the order of the dataset. If a function's batches run out within an element, replicas without
a batch get a batch without rows, as with other strategies. If the shapes do not allow a batch without rows, the element
is left out, as with `drop_remainder`. A warning is logged if a function shards a dataset whose order is random.
"""

import dataclasses
import logging
from collections.abc import Callable, Collection, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import numpy as np
import tensorflow as tf

from coordinator.data.source import without_autotuning
from coordinator.errors import ClosureInputError
from coordinator.ps_strategy.per_worker.cache_files import CacheFiles, CachesInGraph, TracedCaches
from coordinator.ps_strategy.per_worker.dataset import PerWorkerDataset
from coordinator.ps_strategy.per_worker.resource import WorkerContext, WorkerCopies, get_current_worker_index
from coordinator.ps_strategy.tensorflow_internals.datasets import caches_replaced, options_in_graph
from coordinator.ps_strategy.tensorflow_internals.functions import (
    called_functions,
    converted_by_autograph,
    passed_inputs,
)
from coordinator.ps_strategy.tensorflow_internals.replicas import PerReplicaSpec, divided, regrouped

_logger = logging.getLogger("coordinator")

DatasetFunction = Callable[[tf.distribute.InputContext], tf.data.Dataset]

# By the beginning of the type of an operation: the position of the first of two seeds among the operation's inputs.
_SEED_INPUTS = {"ShuffleDataset": 2, "ShuffleAndRepeatDataset": 2, "RandomDataset": 0}
# Random numbers in these operations change the values of elements, not their order.
_MAPS = ("Map", "ParallelMap")
# Datasets whose new iterators continue a random generator, with the positions of the two seeds among the inputs.
_RESHUFFLED = {"ShuffleDatasetV3": (2, 3), "ShuffleAndRepeatDatasetV2": (2, 3), "RandomDatasetV2": (0, 1)}
# Operations that call functions, in which there may be datasets of `_RESHUFFLED`.
_CALLS = ("PartitionedCall", "StatefulPartitionedCall", "If", "StatelessIf", "Case", "StatelessCase", "While")


class InputShare(NamedTuple):
    """A share of the data: `number` from 0 on (`input_pipeline_id`), of `pipelines` shares (`num_input_pipelines`)."""

    pipelines: int
    number: int


class InputShares:
    """The shares of the workers of one strategy.

    `workers` are the indices of the workers at the beginning. `present` returns the indices of the present workers;
    None if shares never change.
    """

    def __init__(self, workers: Sequence[int], present: Callable[[], Sequence[int]] | None = None) -> None:
        beginning = tuple(sorted(workers))
        self.may_change = present is not None
        self._workers = present or (lambda: beginning)

    @property
    def workers(self) -> Sequence[int]:
        """The indices, in order, of the workers among which the data is divided."""
        return self._workers()

    def count(self) -> int:
        return len(self._workers())

    def of(self, worker: int) -> InputShare:
        """Returns the share of a worker. A worker outside of `workers` gets a share of its own, after the others."""
        workers = self._workers()
        if worker in workers:
            return InputShare(len(workers), workers.index(worker))
        number = max(len(workers), worker)
        return InputShare(number + 1, number)


def one_for_each_replica(dataset: tf.data.Dataset, replicas: int) -> tf.data.Dataset:
    """Returns a dataset whose elements each combine `replicas` consecutive elements into `PerReplica` values."""
    spec = dataset.element_spec
    leaves = tf.nest.flatten(spec)
    if replicas == 1 or any(isinstance(leaf, PerReplicaSpec) for leaf in leaves):
        return dataset
    # Whether every leaf of a batch may have no rows.
    may_be_empty = all(
        isinstance(leaf, tf.TensorSpec) and bool(leaf.shape.rank) and leaf.shape[0] is None for leaf in leaves
    )

    # Elements of different shapes can be batched in optionals, which are scalars and do not copy their content.
    def wrapped(*parts: Any) -> tf.Tensor:
        optional = tf.experimental.Optional.from_value(_element(parts))
        [variant] = tf.nest.flatten(optional, expand_composites=True)
        return variant

    def value(variant: tf.Tensor) -> Any:
        return tf.nest.pack_sequence_as(tf.OptionalSpec(spec), [variant], expand_composites=True).get_value()

    def no_rows() -> Any:
        return tf.nest.map_structure(lambda leaf: tf.zeros([size or 0 for size in leaf.shape], leaf.dtype), spec)

    def unwrapped(group: Any) -> Any:
        if not may_be_empty:
            return regrouped([value(group[number]) for number in range(replicas)])
        count = tf.shape(group)[0]
        return regrouped(
            [tf.cond(number < count, lambda number=number: value(group[number]), no_rows) for number in range(replicas)]
        )

    return dataset.map(wrapped).batch(replicas, drop_remainder=not may_be_empty).map(unwrapped)


def divided_among_replicas(dataset: tf.data.Dataset, replicas: int) -> tf.data.Dataset:
    """Divides the batches of a dataset into `PerReplica` values. Raises ValueError if the elements are no batches."""
    if replicas == 1:
        return dataset
    return dataset.map(lambda *parts: divided(_element(parts), replicas))


def _element(parts: tuple[Any, ...]) -> Any:
    return parts[0] if len(parts) == 1 else parts


def warn_of_random_order(name: str, concrete: Any) -> None:
    """Logs a warning if a traced dataset function shards a dataset whose order is random.

    The order then differs between workers, so that some elements are in the shards of two workers and others in no
    shard. No error is raised. `Dataset.list_files` shuffles by default. In the graph, a shuffle without a seed has the
    seeds 0 and 0, unless `tf.random.set_seed` was called.
    """
    graph = concrete.graph.as_graph_def()
    functions = {function.signature.name: function for function in graph.library.function}
    if _Nodes(graph.node, functions).have_random_shard():
        _logger.warning(
            "The dataset function %r takes a shard of data in a random order: a shuffle without a seed comes before "
            "shard(), so that each worker divides another order. Together they read some elements twice and others "
            "never. Shuffle after shard(), or in the same order everywhere: list_files(..., shuffle=False), "
            "shuffle(n, seed=17).",
            name,
        )


class _Nodes:
    """The operations of one graph. `random` has the names of arguments that are datasets in a random order."""

    def __init__(self, nodes: Sequence[Any], functions: Mapping[str, Any], random: Collection[str] = ()) -> None:
        self._nodes = {node.name: node for node in nodes}
        self._functions = functions
        self._random = random

    def have_random_shard(self) -> bool:
        """Returns whether this graph, or a function that it calls, shards a dataset whose order is random."""
        return any(
            (node.op == "ShardDataset" and self._constant(node.input[1]) != 1 and self._is_random(node.input[0]))
            or any(inner.have_random_shard() for inner in self._called_by(node))
            for node in self._nodes.values()
        )

    def _called_by(self, node: Any) -> Iterator["_Nodes"]:
        for role, name in called_functions(node):
            if (function := self._functions.get(name)) is not None:
                passed = passed_inputs(node, role, function)
                random = {argument for argument, outer in passed if self._is_random(outer)}
                yield _Nodes(function.node_def, self._functions, random)

    def _is_random(self, tensor: str) -> bool:
        """Returns whether the order of the dataset with this tensor name is random."""
        wanted, seen = [tensor], set()
        while wanted:
            name = wanted.pop().partition(":")[0]
            node = self._nodes.get(name)
            if name in self._random or (node is not None and self._draws_order(node)):
                return True
            if node is not None and name not in seen:
                seen.add(name)
                wanted += [source for source in node.input if not source.startswith("^")]
        return False

    def _draws_order(self, node: Any) -> bool:
        for begin, place in _SEED_INPUTS.items():
            if node.op.startswith(begin):
                return [self._constant(seed) for seed in node.input[place : place + 2]] == [0, 0]
        if _draws_value(node) or ("deterministic" in node.attr and node.attr["deterministic"].s == b"false"):
            return True
        is_map = node.op.startswith(_MAPS)
        return any(inner.draw_order(except_values=is_map) for inner in self._called_by(node))

    def draw_order(self, *, except_values: bool) -> bool:
        """Returns whether an operation makes the order random; `except_values` ignores operations that draw values."""
        return any(
            self._draws_order(node) for node in self._nodes.values() if not (except_values and _draws_value(node))
        )

    def _constant(self, tensor: str) -> int | None:
        node = self._nodes.get(tensor.partition(":")[0])
        return int(tf.make_ndarray(node.attr["value"].tensor)) if node is not None and node.op == "Const" else None


def _draws_value(node: Any) -> bool:
    return [node.attr[name].i for name in ("seed", "seed2") if name in node.attr] == [0, 0]


@dataclasses.dataclass(eq=False)
class DatasetDistribution:
    """The distribution of datasets over the workers. `trace` returns the `calls.TracedFunction` of a function."""

    shares: InputShares
    trace: Callable[[Callable[[], Any]], Any]
    copies: WorkerCopies
    replicas: int = 1

    def from_function(self, dataset_fn: DatasetFunction, options: tf.distribute.InputOptions | None = None) -> Any:
        """Creates each worker's dataset with `dataset_fn(input_context)`; see `ParameterServerStrategy`.

        In a function that is being traced, such as another dataset function, the method returns the dataset itself.
        """
        if not tf.executing_eagerly():
            return self._in_function(dataset_fn(tf.distribute.InputContext(num_replicas_in_sync=self.replicas)))
        return self._on_workers(dataset_fn, options)

    # AutoGraph converts each function that a converted function calls, which takes longer than tracing it. So it
    # converts only the program's functions.
    @tf.autograph.experimental.do_not_convert
    def _in_function(self, dataset: Any) -> Any:
        return one_for_each_replica(_without_autotuning_in_graph(dataset), self.replicas)

    def _on_workers(self, dataset_fn: DatasetFunction, options: tf.distribute.InputOptions | None) -> Any:
        if not callable(dataset_fn):
            raise TypeError(
                "A dataset function takes a tf.distribute.InputContext and returns a tf.data.Dataset; "
                f"got {dataset_fn!r}."
            )
        _check(options)
        name, shares, caches = getattr(dataset_fn, "__name__", "dataset function"), self.shares, CacheFiles()
        # If there is no worker now, the function is traced for the share of the first worker to come.
        present = [shares.of(worker) for worker in shares.workers or [0]]
        traces = _TracedShares(
            name, lambda context: self.trace(_checked(dataset_fn, context, options)), present, self.replicas
        )

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

        changing = share_of if shares.may_change and traces.reads_share else None
        return PerWorkerDataset(name, traces.element_spec, build, shares.count, self.copies, changing, is_numbered)

    @tf.autograph.experimental.do_not_convert
    def from_dataset(self, dataset: tf.data.Dataset, options: tf.distribute.InputOptions | None = None) -> Any:
        """Sends `dataset` as a graph to every worker, which reads all of it; see `ParameterServerStrategy`.

        In a function that is being traced, such as a dataset function, the method returns the dataset itself.
        """
        if not tf.executing_eagerly():
            return divided_among_replicas(_without_autotuning_in_graph(dataset), self.replicas)
        if not isinstance(dataset, tf.data.Dataset):
            raise TypeError(
                f"experimental_distribute_dataset takes a tf.data.Dataset, got {dataset!r}. A function that makes one "
                "goes to experimental_distribute_datasets_from_function."
            )
        _check(options)
        dataset = without_autotuning(divided_among_replicas(dataset, self.replicas))
        graph, caches = CachesInGraph(_graph_of(dataset)), CacheFiles()
        element_spec = dataset.element_spec

        def build(context: WorkerContext) -> tf.data.Dataset:
            definition, files = graph.copy_on(context)
            # Runs eagerly, because TensorFlow would evaluate the operation on the client in a traced function.
            variant = tf.raw_ops.DatasetFromGraph(graph_def=definition)
            copy = _buffered(tf.data.experimental.from_variant(variant, element_spec), options)
            return caches.note(copy, files, context)

        name = type(dataset).__name__.strip("_")
        return PerWorkerDataset(name, element_spec, build, self.shares.count, self.copies)


class _TracedShares:
    """A dataset function, with one trace for all shares that look equal to the function.

    `trace` traces the function with an input context; `shares` are the shares that are needed now.
    """

    def __init__(
        self, name: str, trace: Callable[["_InputContext"], Any], shares: Sequence[InputShare], replicas: int
    ) -> None:
        self._name = name
        self._replicas = replicas
        self._context = _InputContext(shares[0], replicas)
        # The context records which parts of the share the function reads while it is traced.
        first = trace(self._context)
        warn_of_random_order(name, first.concrete)
        self._traces = {self.part_read(shares[0]): first}
        for share in shares[1:]:
            if (part := self.part_read(share)) not in self._traces:
                self._traces[part] = trace(_InputContext(share, replicas))
        self.element_spec = _common_element_spec(name, [_element_spec(traced) for traced in self._traces.values()])
        self.reads_share = self._context.has_read_pipelines or self._context.has_read_pipeline_id
        # A function that reads no share is not traced again, so the function and the objects in it are not kept.
        self._trace = trace if self.reads_share else None

    def part_read(self, share: InputShare) -> tuple[int | None, int | None]:
        """Returns the parts of a share, with None for parts that the function does not read."""
        return (
            share.pipelines if self._context.has_read_pipelines else None,
            share.number if self._context.has_read_pipeline_id else None,
        )

    def of(self, share: InputShare) -> Any:
        """Returns the function traced for a share; raises ValueError if the type of its elements is not as before."""
        part = self.part_read(share)
        if part not in self._traces:
            assert self._trace is not None
            # The caller is in the scope of a worker's device.
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
    """A Python int that becomes an int64 tensor, like `get_current_worker_index()`; a plain int would become int32."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(int(self), dtype or np.int64)


class _InputContext(tf.distribute.InputContext):
    """An input context that records which parts of its share are read, because these parts make datasets differ."""

    def __init__(self, share: InputShare, replicas: int) -> None:
        super().__init__(share.pipelines, share.number, replicas)
        self.has_read_pipeline_id = self.has_read_pipelines = False

    def owner(self) -> Any:
        """Returns, in the traced function, the part of the names of cache files for the worker and its share.

        This part contains the number of workers, so that no program reads a file made for another number of workers.
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
    """Returns a function to trace, which returns the dataset and the files in which it is cached."""

    def refuse_variable(next_creator: Callable[..., Any], **kwargs: Any) -> NoReturn:
        raise ValueError(
            f"A dataset function must not create variables, but made one named {kwargs.get('name')!r}. Create it "
            "outside, in the strategy's scope."
        )

    converted = converted_by_autograph(dataset_fn)

    @tf.autograph.experimental.do_not_convert
    def make_dataset() -> tuple[tf.data.Dataset, tf.Tensor]:
        caches = TracedCaches(context.owner)
        with tf.variable_creator_scope(refuse_variable), caches_replaced(caches.own_file):
            dataset = converted(context)
        if not isinstance(dataset, tf.data.Dataset):
            raise TypeError(
                f"The dataset function {getattr(dataset_fn, '__name__', dataset_fn)!r} must return a tf.data.Dataset, "
                f"but returned {dataset!r}."
            )
        dataset = one_for_each_replica(_without_autotuning_in_graph(dataset), context.num_replicas_in_sync)
        return _buffered(dataset, options), caches.names()

    return make_dataset


def _common_element_spec(name: str, specs: Sequence[Any]) -> Any:

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


def _changes_with_iterators(operation: tf.Operation) -> bool:
    """Returns whether an operation may make a dataset with a state that each new iterator changes.

    A dataset in the function of another dataset, such as `interleave`, is made again for each element.
    """
    if operation.type.startswith("DataServiceDataset") or operation.type in _CALLS:
        return True
    seeds = [operation.inputs[place] for place in _RESHUFFLED.get(operation.type, ())]
    # If both seeds are 0, each worker chooses a seed when it makes the dataset.
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
    """Returns, in a function that is being traced, a dataset whose iterators are deleted without a delay."""
    return without_autotuning(dataset, options_in_graph(dataset))


def _buffered(dataset: tf.data.Dataset, options: tf.distribute.InputOptions | None) -> tf.data.Dataset:
    size = options.experimental_per_replica_buffer_size if options is not None else 0
    return dataset.prefetch(size) if size else dataset
