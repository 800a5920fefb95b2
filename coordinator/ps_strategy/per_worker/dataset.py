"""Datasets and iterators with a copy on each worker."""

import contextlib
import functools
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NoReturn

import tensorflow as tf

from coordinator.errors import ClosureCancelledError
from coordinator.ps_strategy.per_worker.iterator_positions import IteratorPositions
from coordinator.ps_strategy.per_worker.resource import PerWorkerResource, WorkerContext, WorkerCopies
from coordinator.ps_strategy.tensorflow_internals.calls import call_concrete, flat_inputs
from coordinator.runtime import FiniteInput

_logger = logging.getLogger("coordinator")


class _PerWorkerElements(PerWorkerResource, tf.types.experimental.SupportsTracingProtocol):
    """What datasets and iterators have in common: the type of their elements.

    Attributes:
      element_spec: the `tf.TypeSpec` of an element, nested as elements are.
    """

    # The type of the worker's copy: what a function is traced with.
    _spec_class: type[Any]

    def __init__(self, name: str, element_spec: Any, build: Callable[[WorkerContext], Any]) -> None:
        super().__init__(name, build)
        self.element_spec = element_spec

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

    Attributes:
      ended: as given.
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
      workers: the number of parts into which the data is divided.
      copies: runs work on the workers.

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
        workers: int,
        copies: WorkerCopies,
    ) -> None:
        # Local variables, because `build_iterator` must not keep this object alive.
        positions = IteratorPositions(workers, element_spec)
        finite_input = FiniteInput(functools.partial(EndOfDataError, f"iterator of {name}"))

        def build_iterator(context: WorkerContext) -> Any:
            iterator = positions.iterator_of(build(context), context)
            finite_input.is_finite = finite_input.is_finite or not positions.is_endless_on(context.index)
            return iterator

        super().__init__(f"iterator of {name}", element_spec, build_iterator)
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
    """

    def __init__(self, name: str, build: Callable[[WorkerContext], tf.data.Dataset]) -> None:
        # Each with the number of the iterators that were made of it. An entry is used by its worker's thread alone.
        self._datasets = PerWorkerResource(f"iterator of {name}", lambda context: [build(context), 0])

    def dataset_for(self, number: int, context: WorkerContext) -> tf.data.Dataset:
        """Returns the worker's dataset, whose next iterator is that of a number from 0 on."""
        if self._datasets.value_on(context)[1] > number:
            self._datasets.recreate_on(context)
        entry = self._datasets.value_on(context)
        for _ in range(entry[1], number):
            iter(entry[0])
        entry[1] = number + 1
        return entry[0]


class PerWorkerDataset(_PerWorkerElements):
    """One dataset per worker. `iter` of it returns a `PerWorkerIterator`; it may itself be an argument of a function.

    Args:
      name: used in messages.
      element_spec: the `tf.TypeSpec` of an element, nested as elements are.
      build: creates the worker's dataset; called on the worker's thread, in its device scope.
      workers: the number of parts into which the data is divided.
      copies: runs work on the workers.
    """

    _spec_class = tf.data.DatasetSpec

    def __init__(
        self,
        name: str,
        element_spec: Any,
        build: Callable[[WorkerContext], tf.data.Dataset],
        workers: int,
        copies: WorkerCopies,
    ) -> None:
        super().__init__(name, element_spec, build)
        self._workers = workers
        self._copies = copies
        self._iterated = _IteratedDataset(name, build)
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
        iterator = PerWorkerIterator(self.name, self.element_spec, build, self._workers, self._copies)
        self._copies.create(iterator)
        return iterator

    def build(self) -> "PerWorkerDataset":
        """Returns itself, which may be an argument of a function; TensorFlow's must be built for that."""
        return self


def tracing_type(value: Any) -> Any:
    """Returns the type of each worker's copy for a per-worker dataset or iterator; any other value unchanged."""
    return value.__tf_tracing_type__(None) if isinstance(value, _PerWorkerElements) else value


@contextlib.contextmanager
def iterators_in_use(iterators: Sequence[PerWorkerIterator], context: WorkerContext) -> Iterator[None]:
    """A scope for one call on a worker, which resets iterators that an earlier call left interrupted.

    A call that is cancelled while it waits for an element may leave its iterator cancelled, or ended too early. Nothing
    is inspected unless the call fails. If it fails because data has ended, an iterator that may have ended is asked for
    one more element, which is lost if there is one.

    Args:
      iterators: those among the call's arguments.
      context: the worker.

    Raises:
      tf.errors.AbortedError: an iterator was interrupted by an earlier call; it starts again with the next call.
      EndOfDataError: an iterator has ended on this worker.
    """
    try:
        yield
    except (ClosureCancelledError, tf.errors.OpError) as error:
        suspects = [each for each in iterators if each.failed.get(context.index) == context.connection_number]
        may_have_ended = not all(each.positions.is_endless_on(context.index) for each in iterators)
        # The regular end of data interrupts nothing.
        if not (isinstance(error, tf.errors.OutOfRangeError) and may_have_ended):
            for each in iterators:
                each.failed[context.index] = context.connection_number
        if interrupted := [each for each in suspects if _is_interrupted(each, error, context)]:
            for each in interrupted:
                each.failed.pop(context.index, None)
                each.recreate_on(context)
            is_saved = all(each.positions.has_saved(context.index) for each in interrupted)
            start = "its last saved position" if is_saved else "the beginning"
            message = (
                f"{_names(interrupted, context)} starts from {start}: a call that waited for an element was cancelled."
            )
            _logger.warning("%s", message)
            raise tf.errors.AbortedError(None, None, message) from error
        if suspects and isinstance(error, tf.errors.OutOfRangeError):
            for each in suspects:
                each.failed.pop(context.index, None)
            _logger.warning(
                "%s has ended, and an earlier call that used it was cancelled, which may have ended it too early. Make "
                "a new iterator if some of its data is missing.",
                _names(suspects, context),
            )
        if isinstance(error, tf.errors.OutOfRangeError):
            for each in itertools.filterfalse(lambda each: each.positions.is_endless_on(context.index), iterators):
                _raise_if_ended(each, context, error)
        raise


@tf.function
def _has_element(iterator: Any) -> Any:
    return iterator.get_next_as_optional().has_value()


def _raise_if_ended(iterator: PerWorkerIterator, context: WorkerContext, cause: Exception) -> None:
    """Takes an element on the worker, and raises EndOfDataError if there is none.

    The error of the call does not tell: a function may raise the same for another dataset.
    """
    on_worker = iterator.value_on(context)
    iterator.positions.count_on(context.index, 1)
    concrete = _has_element.get_concrete_function(on_worker)
    try:
        with tf.device(context.device):
            inputs = flat_inputs(concrete, (on_worker,), {})
            has_element = call_concrete(concrete, inputs, context.cancellation).numpy()
    except tf.errors.OpError as error:
        iterator.failed[context.index] = context.connection_number
        if context.cancellation.is_cancelled:
            raise ClosureCancelledError("The call was cancelled.") from error
        raise
    if not has_element:
        iterator.positions.count_on(context.index, math.inf)
        # Without its traceback, whose frames would keep the iterator alive until the garbage collector runs.
        raise EndOfDataError(iterator.name, iterator.input) from cause.with_traceback(None)


def _is_interrupted(iterator: PerWorkerIterator, error: Exception, context: WorkerContext) -> bool:
    if isinstance(error, tf.errors.OutOfRangeError):
        return iterator.positions.is_endless_on(context.index)
    # A call that this client cancels raises `ClosureCancelledError` instead.
    return isinstance(error, tf.errors.CancelledError)


def _names(iterators: Sequence[PerWorkerIterator], context: WorkerContext) -> str:
    return f"{', '.join(each.name for each in iterators)} on {context.device}"
