"""Datasets and iterators with a copy on each worker."""

import functools
import itertools
from collections.abc import Callable, Hashable
from typing import Any, NoReturn

import tensorflow as tf

from coordinator.data.autotuning import without_autotuning
from coordinator.ps_strategy.per_worker.cache_files import is_cache_begun
from coordinator.ps_strategy.per_worker.iterator_positions import IteratorPositions
from coordinator.ps_strategy.per_worker.resource import PerWorkerResource, WorkerContext, WorkerCopies
from coordinator.ps_strategy.tensorflow_internals.calls import call_concrete, flat_inputs
from coordinator.runtime import FiniteInput

# Of the index of a worker: what its dataset depends on beside the worker, such as its share of the data.
ShareOf = Callable[[int], Hashable]


class _PerWorkerElements(PerWorkerResource, tf.types.experimental.SupportsTracingProtocol):
    """What datasets and iterators have in common: the type of their elements, and that shares of the data may change.

    Args:
      name: used in messages.
      element_spec: the `tf.TypeSpec` of an element, nested as elements are.
      build: creates the worker's copy; called on the worker's thread, in its device scope.
      share_of: when it changes for a worker, its copy is created again at its next use, if `_may_begin_again`.
    """

    # The type of the worker's copy: what a function is traced with.
    _spec_class: type[Any]

    def __init__(self, name: str, element_spec: Any, build: Callable[[WorkerContext], Any], share_of: ShareOf) -> None:
        # Local, because `build_share` must not keep this object alive. Each entry is used by its worker's thread alone.
        shares: dict[int, Hashable] = {}

        def build_share(context: WorkerContext) -> Any:
            # Before the copy is built: if the share changes meanwhile, it is built once more.
            shares[context.index] = share_of(context.index)
            return build(context)

        super().__init__(name, build_share)
        self.element_spec = element_spec
        self._shares = shares
        self._share_of = share_of

    def value_on(self, context: WorkerContext) -> Any:
        """See `PerWorkerResource`; the copy is that of the worker's present share."""
        worker = context.index
        if worker in self._shares and self._shares[worker] != self._share_of(worker) and self._may_begin_again(worker):
            self.recreate_on(context)
        return super().value_on(context)

    def _may_begin_again(self, worker: int) -> bool:
        return True

    @property
    def _type_spec(self) -> Any:
        """The type of the worker's copy, under the name that programs give to `tf.function(input_signature=)`."""
        return self._spec_class(self.element_spec)

    def __tf_tracing_type__(self, context: Any) -> Any:
        return self._type_spec

    def __getattr__(self, name: str) -> NoReturn:
        # A function that is called on the client looks for the handle of a real dataset or iterator.
        raise AttributeError(
            f"{type(self).__name__} has no attribute {name!r}: it represents one on each worker. A function that takes "
            "it must be scheduled: strategy.schedule(step, args=(...)) instead of step(...). In Keras 2 (tf_keras), "
            "fit, evaluate and predict are such functions: schedule a step of your own, make the strategy with "
            "coordinator.compat.ParameterServerStrategy, or use a model of Keras 3."
        )


class EndOfDataError(tf.errors.OutOfRangeError):
    """An iterator has no element left on a worker. Raised to users when it has none on any worker that may be asked.

    Args:
      name: the iterator's name.
      ended: the iterator as the core knows it, if it has ended on one worker at least.
    """

    def __init__(self, name: str, ended: FiniteInput | None = None) -> None:
        self.ended = ended
        message = (
            f"The {name} has no element left on any worker that may run this function. Catch this error to "
            "end the loop; then iter(dataset) begins the next epoch:\n"
            "  while True:\n"
            "    try:\n"
            "      strategy.schedule(step, args=(iterator,))\n"
            "    except tf.errors.OutOfRangeError:\n"
            "      break\n"
            "  strategy.join()\n"
            "Data that is not to end needs dataset.repeat()."
        )
        super().__init__(None, None, message)


class PerWorkerIterator(_PerWorkerElements, tf.train.experimental.PythonState):
    """One iterator per worker. Pass it as an argument of a scheduled function and call `next` on it there.

    In a `tf.train.Checkpoint`, it saves and restores the position of each worker's iterator; see docs/data.md.

    If its data ends, a function that finds no element on its worker is run on another worker. When all workers are at
    the end, `schedule` and `join` raise `tf.errors.OutOfRangeError`.

    The iterator of a worker that was restarted starts from the position that was last saved or restored, or from the
    beginning, and so does one that was interrupted; see `iterators_in_use`. The iterators on the workers are freed with
    the last reference to this object.

    Args:
      name: used in messages.
      element_spec: the `tf.TypeSpec` of an element, nested as elements are.
      build: creates the worker's dataset; called on the worker's thread, in its device scope.
      workers: returns the number of shares into which the data is divided.
      copies: runs work on the workers.
      share_of: see above; an endless iterator begins again when its share changes.

    Attributes:
      input: the iterator as the core knows it.
      positions: where the workers' iterators are.
      failed: the connection on which a call with a worker's iterator failed, if it may have interrupted the iterator.
        Each is used by its worker's thread alone.
    """

    _spec_class = tf.data.IteratorSpec

    def __init__(
        self,
        name: str,
        element_spec: Any,
        build: Callable[[WorkerContext], tf.data.Dataset],
        workers: Callable[[], int],
        copies: WorkerCopies,
        share_of: ShareOf = lambda worker: None,
    ) -> None:
        # Local variables, because `build_iterator` must not keep this object alive.
        positions = IteratorPositions(workers, element_spec)
        finite_input = FiniteInput(functools.partial(EndOfDataError, f"iterator of {name}"))

        def build_iterator(context: WorkerContext) -> Any:
            share = share_of(context.index)
            iterator = positions.iterator_of(build(context), context, share)
            finite_input.is_finite = finite_input.is_finite or not positions.is_endless_on(context.index)
            return iterator

        super().__init__(f"iterator of {name}", element_spec, build_iterator, share_of)
        self._copies = copies
        self.positions = positions
        self.input = finite_input
        self.failed: dict[int, int] = {}

    def serialize(self) -> str:
        """Returns the positions of all workers' iterators; TensorFlow calls it to save a checkpoint.

        A lost worker is not waited for: what is returned is where its iterator will start again.

        Raises:
          ValueError: the dataset has no position that can be saved.
          RuntimeError: in a callback of a future that a worker's thread runs.
        """
        try:
            self._copies.run_on_live(self._save_on, f"save the position of the {self.name}")
        except tf.errors.UnimplementedError as error:
            raise ValueError(
                f"The position of the {self.name} cannot be saved in a checkpoint: generators and TensorFlow's data "
                "service have none. Leave the iterator out of the tf.train.Checkpoint; coordinator.data has sources "
                "whose position is saved."
            ) from error
        return self.positions.to_json()

    def deserialize(self, text: Any) -> None:
        """Continues at positions that `serialize` has returned; TensorFlow calls it to restore a checkpoint.

        Raises:
          ValueError: they are of another number of workers or of other data; the message names what differs.
        """
        self.positions.from_json(text, self.name)
        self.failed.clear()
        self.recreate()
        self._copies.renew_input(self.input)

    def _may_begin_again(self, worker: int) -> bool:
        return self.positions.is_endless_on(worker)

    def _save_on(self, context: WorkerContext) -> None:
        self.positions.save_on(self.value_on(context), context)

    def get_next(self) -> NoReturn:
        """Raises RuntimeError; see `__next__`."""
        self.__next__()

    def __iter__(self) -> "PerWorkerIterator":
        return self

    def __next__(self) -> NoReturn:
        raise RuntimeError(
            "A per-worker iterator gives elements on the workers alone. Pass it as an argument: "
            "strategy.schedule(step, args=(iterator,)), and call next(iterator) inside `step`."
        )


class _IteratedDataset:
    """The dataset of each worker from which its iterators are made, which tells them apart by their order.

    Guarantee: a worker's iterator is the one of its number, whatever was lost or made again before.

    Args:
      name: used in messages.
      build: creates the worker's dataset; called on the worker's thread, in its device scope.
      share_of: see `_PerWorkerElements`.
      is_numbered: of a worker: whether an iterator of its dataset depends on how many were made before.
    """

    def __init__(
        self,
        name: str,
        build: Callable[[WorkerContext], tf.data.Dataset],
        share_of: ShareOf,
        is_numbered: Callable[[WorkerContext], bool],
    ) -> None:
        # Each with its share, and the number of the iterators that were made of it.
        self._datasets = PerWorkerResource(
            f"iterator of {name}", lambda context: [share_of(context.index), build(context), 0]
        )
        self._share_of = share_of
        self._is_numbered = is_numbered

    def dataset_for(self, number: int, context: WorkerContext) -> tf.data.Dataset:
        """Returns the worker's dataset, whose next iterator is that of a number from 0 on."""
        share, dataset, made = self._datasets.value_on(context)
        # What an iterator has begun to cache in a file, another iterator of the same dataset cannot write.
        if made > number or share != self._share_of(context.index) or (made and is_cache_begun(dataset)):
            self._datasets.recreate_on(context)
        entry = self._datasets.value_on(context)
        _, dataset, made = entry
        if made < number and self._is_numbered(context):
            concrete = _make_unread.get_concrete_function(dataset, tf.TensorSpec([], tf.int64))
            inputs = flat_inputs(concrete, (dataset, tf.constant(number - made, tf.int64)), {})
            call_concrete(concrete, [*inputs, *concrete.captured_inputs], context.cancellation)
        entry[2] = number + 1
        return dataset


@tf.function(autograph=False)
def _make_unread(dataset: tf.data.Dataset, count: Any) -> None:
    """Makes iterators of a dataset that are never read.

    They are iterators inside of one, each of which costs a worker 0.1 ms; one that is made by itself costs 70 ms.
    """
    # Choosing from datasets makes an iterator of each, and here chooses nothing.
    nothing = tf.data.Dataset.range(0)
    unread = tf.data.Dataset.choose_from_datasets([dataset, dataset.take(0)], nothing, stop_on_empty_dataset=False)
    all_unread = tf.data.Dataset.range(count).flat_map(lambda _: unread)
    iter(without_autotuning(all_unread, tf.data.Options())).get_next_as_optional()


class PerWorkerDataset(_PerWorkerElements):
    """One dataset per worker. `iter` of it returns a `PerWorkerIterator`; it may itself be an argument of a function.

    Args:
      name: used in messages.
      element_spec: the `tf.TypeSpec` of an element, nested as elements are.
      build: creates the worker's dataset; called on the worker's thread, in its device scope.
      workers: returns the number of shares into which the data is divided.
      copies: runs work on the workers.
      share_of: see above.
      is_numbered: see `_IteratedDataset`.
    """

    _spec_class = tf.data.DatasetSpec

    def __init__(
        self,
        name: str,
        element_spec: Any,
        build: Callable[[WorkerContext], tf.data.Dataset],
        workers: Callable[[], int],
        copies: WorkerCopies,
        share_of: ShareOf = lambda worker: None,
        is_numbered: Callable[[WorkerContext], bool] = lambda context: True,
    ) -> None:
        super().__init__(name, element_spec, build, share_of)
        self._workers = workers
        self._copies = copies
        self._iterated = _IteratedDataset(name, build, share_of, is_numbered)
        self._iterators = itertools.count()

    def __iter__(self) -> PerWorkerIterator:
        """Returns a new iterator per worker, at the beginning of the data.

        As in TensorFlow, it is one more iterator of the same dataset: a seeded shuffle gives another order, and a job
        of TensorFlow's data service is repeated.

        Raises:
          RuntimeError: inside a `tf.function`.
        """
        if not tf.executing_eagerly():
            raise RuntimeError(
                "Make the iterator outside of the function, and pass it: strategy.schedule(step, args=(iterator,))."
            )
        build = functools.partial(self._iterated.dataset_for, next(self._iterators))
        iterator = PerWorkerIterator(self.name, self.element_spec, build, self._workers, self._copies, self._share_of)
        self._copies.create(iterator)
        return iterator

    def build(self) -> "PerWorkerDataset":
        """Returns itself, which may be an argument of a function; TensorFlow's must be built for that."""
        return self


def tracing_type(value: Any) -> Any:
    """Returns the type of each worker's copy for a per-worker dataset or iterator; any other value unchanged."""
    return value.__tf_tracing_type__(None) if isinstance(value, _PerWorkerElements) else value
