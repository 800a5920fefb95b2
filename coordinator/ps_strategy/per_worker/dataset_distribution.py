"""Creates a per-worker dataset from a dataset function or from an existing dataset.

The function is traced on the client and run on each worker. One trace serves all workers, unless the function reads
`input_pipeline_id`, which must be a Python int (to choose files, for example): then it is traced once for each worker.
`coordinator.get_current_worker_index()` returns the same number as a tensor, with one trace.
"""

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np
import tensorflow as tf

from coordinator.errors import ClosureInputError
from coordinator.ps_strategy.per_worker.dataset import PerWorkerDataset
from coordinator.ps_strategy.per_worker.resource import WorkerContext, WorkerCopies

DatasetFunction = Callable[[tf.distribute.InputContext], tf.data.Dataset]


class DatasetDistribution:
    """Distributes datasets over the workers.

    Args:
      workers: number of workers.
      trace: traces a function without arguments; returns the `calls.TracedFunction`.
      copies: runs work on the workers.
    """

    def __init__(
        self,
        workers: int,
        trace: Callable[[Callable[[], Any]], Any],
        copies: WorkerCopies,
    ) -> None:
        self._workers = workers
        self._trace = trace
        self._copies = copies

    def from_function(
        self, dataset_fn: DatasetFunction, options: tf.distribute.InputOptions | None = None
    ) -> PerWorkerDataset:
        """Creates each worker's dataset with `dataset_fn(input_context)`; see `ParameterServerStrategy`."""
        if not callable(dataset_fn):
            raise TypeError(
                "A dataset function takes a tf.distribute.InputContext and returns a tf.data.Dataset; "
                f"got {dataset_fn!r}."
            )
        _check(options)
        name = getattr(dataset_fn, "__name__", "dataset function")
        first = _InputContext(self._workers, 0)
        traced = [self._trace(_checked(dataset_fn, first, options))]
        if first.has_read_pipeline_id:
            others = (_InputContext(self._workers, index) for index in range(1, self._workers))
            traced += [self._trace(_checked(dataset_fn, other, options)) for other in others]

        def build(context: WorkerContext) -> tf.data.Dataset:
            if traced[0].uses_client_dataset:
                raise ClosureInputError(
                    f"The dataset function {name!r} uses a dataset that was made outside of it, on the client, where "
                    "workers cannot reach it. Make the whole dataset inside the function, or pass the ready one to "
                    "experimental_distribute_dataset."
                )
            return traced[context.index % len(traced)].call_on(context)

        element_spec = _common_element_spec(
            name, [function.concrete.structured_outputs.element_spec for function in traced]
        )
        return PerWorkerDataset(name, element_spec, build, self._workers, self._copies)

    def from_dataset(
        self, dataset: tf.data.Dataset, options: tf.distribute.InputOptions | None = None
    ) -> PerWorkerDataset:
        """Sends `dataset` as a graph to every worker, which reads all of it; see `ParameterServerStrategy`."""
        if not isinstance(dataset, tf.data.Dataset):
            raise TypeError(
                f"experimental_distribute_dataset takes a tf.data.Dataset, got {dataset!r}. A function that makes one "
                "goes to experimental_distribute_datasets_from_function."
            )
        _check(options)
        graph = _graph_of(dataset)
        element_spec = dataset.element_spec

        def build(_: WorkerContext) -> tf.data.Dataset:
            # Not in a traced function, where TensorFlow would evaluate it on the client.
            variant = tf.raw_ops.DatasetFromGraph(graph_def=graph)
            return _buffered(tf.data.experimental.from_variant(variant, element_spec), options)

        name = type(dataset).__name__.strip("_")
        return PerWorkerDataset(name, element_spec, build, self._workers, self._copies)


class _PipelineId(int):
    """A Python int that becomes an int64 tensor, as `get_current_worker_index()` is one; an int becomes int32."""

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.array(int(self), dtype or np.int64)


class _InputContext(tf.distribute.InputContext):
    """Records whether the dataset function has read the pipeline's number, which makes the workers' datasets differ."""

    def __init__(self, workers: int, index: int) -> None:
        super().__init__(num_input_pipelines=workers, input_pipeline_id=index, num_replicas_in_sync=1)
        self.has_read_pipeline_id = False

    @property
    def input_pipeline_id(self) -> int:
        self.has_read_pipeline_id = True
        return _PipelineId(super().input_pipeline_id)


def _checked(
    dataset_fn: DatasetFunction, context: tf.distribute.InputContext, options: tf.distribute.InputOptions | None
) -> Callable[[], tf.data.Dataset]:
    def make_dataset() -> tf.data.Dataset:
        with tf.variable_creator_scope(_refuse_variable):
            dataset = dataset_fn(context)
        if not isinstance(dataset, tf.data.Dataset):
            raise TypeError(
                f"The dataset function {getattr(dataset_fn, '__name__', dataset_fn)!r} must return a tf.data.Dataset, "
                f"but returned {dataset!r}."
            )
        return _buffered(dataset, options)

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
        raise ValueError("InputOptions: a worker is one replica, so only InputReplicationMode.PER_WORKER makes sense.")


def _buffered(dataset: tf.data.Dataset, options: tf.distribute.InputOptions | None) -> tf.data.Dataset:
    size = options.experimental_per_replica_buffer_size if options is not None else 0
    return dataset.prefetch(size) if size else dataset


def _refuse_variable(next_creator: Callable[..., Any], **kwargs: Any) -> NoReturn:
    raise ValueError(
        f"A dataset function must not create variables, but made one named {kwargs.get('name')!r}. Create it outside, "
        "in the strategy's scope."
    )
