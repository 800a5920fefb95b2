"""TensorFlow's names for parameter-server training: a program written for TensorFlow changes two imports.

    from coordinator.compat import ClusterCoordinator, ParameterServerStrategy

    strategy = ParameterServerStrategy(resolver)          in place of tf.distribute.ParameterServerStrategy
    coordinator = ClusterCoordinator(strategy)            in place of tf.distribute.coordinator.ClusterCoordinator
    iterator = iter(coordinator.create_per_worker_dataset(dataset_fn))
    value = coordinator.schedule(step, args=(iterator,))  a RemoteValue
    coordinator.join()
    value.fetch()

The arguments, results, types and errors are those that TensorFlow documents: `tf.errors.CancelledError` and
`tf.errors.UnavailableError` replace this library's error classes. docs/migrating.md lists the differences. The strategy
is a `coordinator.ParameterServerStrategy`, whose methods a program may use as well.
"""

import concurrent.futures
import contextlib
import gc
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import numpy as np
import tensorflow as tf

from coordinator.errors import ClosureInputError, ParameterServerLost
from coordinator.future import Future
from coordinator.options import Options
from coordinator.ps_strategy import parameter_server_strategy
from coordinator.ps_strategy.per_worker.dataset import PerWorkerDataset, PerWorkerIterator
from coordinator.ps_strategy.per_worker.resource import get_current_worker_index
from coordinator.workers.cluster import Cluster

__all__ = [
    "ClosureInputError",
    "ClusterCoordinator",
    "ParameterServerStrategy",
    "PerWorkerValues",
    "RemoteValue",
    "experimental_get_current_worker_index",
]

_logger = logging.getLogger("coordinator")

PerWorkerValues = tf.distribute.coordinator.PerWorkerValue
# Programs check `isinstance(iterator, tf.distribute.coordinator.PerWorkerValue)`.
PerWorkerValues.register(PerWorkerIterator)

experimental_get_current_worker_index = get_current_worker_index


class ParameterServerStrategy(parameter_server_strategy.ParameterServerStrategy, tf.distribute.ParameterServerStrategy):
    """A `coordinator.ParameterServerStrategy` that is created and used like `tf.distribute.ParameterServerStrategy`.

    Differences from the base class:

    * Creating a strategy closes the former strategy, since programs for TensorFlow do not close strategies.
    * `distribute_datasets_from_function` passes the same `tf.distribute.InputContext` on every worker, with one input
      pipeline. As in TensorFlow, a worker's data does not depend on the number of workers.
    * `tf.distribute.coordinator.ClusterCoordinator(strategy)` returns a `ClusterCoordinator` of this module.

    Args:
      cluster_resolver: see the base.
      variable_partitioner: see the base.
      options: see the base.
    """

    _latest: ClassVar[Callable[[], "ParameterServerStrategy | None"]] = lambda: None

    def __init__(
        self, cluster_resolver: Any, variable_partitioner: Any = None, *, options: Options | None = None
    ) -> None:
        # The collection closes unreachable strategies.
        gc.collect()
        former = ParameterServerStrategy._latest()
        if former is not None and former._closing.alive:
            _logger.warning(
                "This process already has a ParameterServerStrategy, which is closed now: one process has one at a "
                "time. Its variables are deleted."
            )
            former.close()
        super().__init__(cluster_resolver, variable_partitioner, options=options)
        ParameterServerStrategy._latest = weakref.ref(self)
        # tf_keras reads these attributes before it uses a ClusterCoordinator in `fit`, and for exact evaluation.
        self._should_use_with_coordinator = True
        self._num_workers, self._num_ps = len(self.cluster.workers), len(self.parameter_servers)

    @property
    def _cluster_coordinator(self) -> "ClusterCoordinator":
        # TensorFlow's own ClusterCoordinator(strategy) returns this property.
        return ClusterCoordinator(self)

    def experimental_distribute_datasets_from_function(
        self, dataset_fn: Any, options: tf.distribute.InputOptions | None = None
    ) -> PerWorkerDataset:
        """Creates a dataset on each worker by `dataset_fn(input_context)`, with the same context on all workers.

        Args:
          dataset_fn: takes a `tf.distribute.InputContext` with one input pipeline; returns a `tf.data.Dataset`. Use
            `experimental_get_current_worker_index()` to give each worker its own part of the data.
          options: see the base.
        """
        context = tf.distribute.InputContext(num_replicas_in_sync=self.num_replicas_in_sync)
        whole = _IgnoringContext(dataset_fn, context)
        return super().experimental_distribute_datasets_from_function(whole, options)

    distribute_datasets_from_function = experimental_distribute_datasets_from_function


class RemoteValue(tf.distribute.coordinator.RemoteValue):
    """The result of a scheduled function that may not have run yet. `future` holds the result."""

    def __init__(self, future: Future) -> None:
        self._future = future

    def fetch(self) -> Any:
        """Waits for the result and returns it in the function's output structure, with NumPy values for tensors.

        Raises:
          tf.errors.CancelledError: the function was cancelled, because another function failed.
          tf.errors.UnavailableError: a parameter server was lost.
          ClosureInputError: a dataset or another input of the function could not be created.
          Exception: the function's own exception, unchanged.
        """
        return tf.nest.map_structure(lambda leaf: leaf.numpy() if hasattr(leaf, "numpy") else leaf, self._result())

    def get(self) -> Any:
        """Waits for the result and returns it in the function's output structure, with tensors on the client.

        Raises:
          Exception: see `fetch`.
        """
        return tf.nest.map_structure(_as_tensor, self._result())

    def _result(self) -> Any:
        with _errors_of_tensorflow():
            return self._future.result()

    def __repr__(self) -> str:
        return f"<RemoteValue: {self._future!r}>"


class ClusterCoordinator:
    """Schedules functions on the workers of a strategy, as `tf.distribute.coordinator.ClusterCoordinator` does.

    A strategy has one coordinator: creating a `ClusterCoordinator` again returns the same object.

    Args:
      strategy: a `ParameterServerStrategy` of this module or of `coordinator`.

    Raises:
      ValueError: `strategy` has another type.
    """

    _strategy: parameter_server_strategy.ParameterServerStrategy

    def __new__(cls, strategy: Any) -> "ClusterCoordinator":
        """Returns the strategy's coordinator; creates it the first time."""
        if not isinstance(strategy, parameter_server_strategy.ParameterServerStrategy):
            raise ValueError(
                "ClusterCoordinator takes a coordinator.compat.ParameterServerStrategy, got "
                f"{type(strategy).__module__}.{type(strategy).__name__}. Import both names from coordinator.compat."
            )
        # The coordinator refers to the strategy. A reference cycle would delay closing until a garbage collection.
        existing: Any = vars(strategy).get("_compat_coordinator", lambda: None)()
        if existing is None:
            existing = super().__new__(cls)
            existing._strategy = strategy
            strategy._compat_coordinator = weakref.ref(existing)
        return existing

    @property
    def strategy(self) -> parameter_server_strategy.ParameterServerStrategy:
        """The strategy that was passed to the constructor."""
        return self._strategy

    @property
    def cluster(self) -> Cluster:
        """The workers and their statistics."""
        return self._strategy.cluster

    # TensorFlow has no public name for the cluster, so programs use this name to count the workers.
    _cluster = cluster

    def schedule(
        self, fn: Any, args: Sequence[Any] | None = None, kwargs: Mapping[str, Any] | None = None
    ) -> RemoteValue:
        """Queues one call of `fn` for the next free worker; see `coordinator.ParameterServerStrategy.schedule`.

        Args:
          fn: a `tf.function` or concrete function.
          args: positional arguments. A per-worker iterator becomes the iterator of the worker that runs `fn`.
          kwargs: keyword arguments, with iterators as in `args`.

        Raises:
          TypeError: `fn` has another type.
          ValueError: a `RemoteValue` is among the arguments.
          Exception: the error of an earlier scheduled function, raised once; see `join`.
        """
        if not isinstance(fn, tf.types.experimental.PolymorphicFunction | tf.types.experimental.ConcreteFunction):
            raise TypeError(
                "`tf.distribute.experimental.coordinator.ClusterCoordinator.schedule` only accepts a `tf.function` or "
                f"a concrete function, got {fn!r}. Decorate the function with @tf.function."
            )
        if any(isinstance(leaf, tf.distribute.coordinator.RemoteValue) for leaf in tf.nest.flatten((args, kwargs))):
            raise ValueError(
                "A `tf.distribute.experimental.coordinator.RemoteValue` used as an input to scheduled function is not "
                "supported. Pass what it holds, value.fetch(); or use the futures of strategy.schedule, which may be "
                "arguments."
            )
        with _errors_of_tensorflow():
            return RemoteValue(self._strategy.schedule(fn, args, kwargs))

    def join(self) -> None:
        """Waits until every scheduled function has finished.

        The first error cancels all other functions. The next `schedule`, `join` or `done` raises this error once.

        Raises:
          tf.errors.UnavailableError: a parameter server was lost.
          Exception: a scheduled function's own exception, unchanged.
        """
        with _errors_of_tensorflow():
            self._strategy.join()

    def done(self) -> bool:
        """Returns whether all scheduled functions have finished. Raises the same errors as `join`."""
        with _errors_of_tensorflow():
            return self._strategy.done()

    def create_per_worker_dataset(self, dataset_fn: Any) -> PerWorkerDataset:
        """Creates a dataset on each worker; `iter(dataset)` returns `PerWorkerValues`, an iterator on each worker.

        Args:
          dataset_fn: a function without arguments, run on each worker. It returns a dataset, or the result of one of
            the strategy's `distribute_...` methods. A dataset of either kind may be passed directly.

        Raises:
          ValueError: `dataset_fn` has another type, or the function creates a variable.
          TypeError: the function returns another type.
        """
        if isinstance(dataset_fn, PerWorkerDataset):
            return dataset_fn
        if isinstance(dataset_fn, tf.data.Dataset):
            return self._strategy.experimental_distribute_dataset(dataset_fn)
        if not callable(dataset_fn):
            raise ValueError(
                f"create_per_worker_dataset takes a dataset or a function that returns one, got {dataset_fn!r}."
            )
        return self._strategy.experimental_distribute_datasets_from_function(_IgnoringContext(dataset_fn))

    def fetch(self, val: Any) -> Any:
        """Waits for each `RemoteValue` in a structure, and returns the structure with their results.

        Raises:
          Exception: see `RemoteValue.fetch`.
        """
        return tf.nest.map_structure(
            lambda leaf: leaf.fetch() if isinstance(leaf, tf.distribute.coordinator.RemoteValue) else leaf, val
        )


class _IgnoringContext:
    """A dataset function that calls `function` with `args` instead of the input context, under the same name."""

    def __init__(self, function: Callable[..., Any], *args: Any) -> None:
        self.__name__ = getattr(function, "__name__", "dataset function")
        self._function = function
        self._args = args

    def __call__(self, _: tf.distribute.InputContext) -> Any:
        return self._function(*self._args)


def _as_tensor(value: Any) -> Any:
    # A leaf of another type is None or a composite tensor.
    return tf.convert_to_tensor(value) if isinstance(value, np.ndarray | np.generic | bytes) else value


@contextlib.contextmanager
def _errors_of_tensorflow() -> Iterator[None]:
    """A scope that converts errors of this library to the errors that TensorFlow documents."""
    try:
        yield
    except concurrent.futures.CancelledError as error:
        message = f"The corresponding function is cancelled. Please reschedule the function. {error}"
        raise tf.errors.CancelledError(None, None, message) from error
    except ParameterServerLost as error:
        raise tf.errors.UnavailableError(None, None, str(error)) from error
