"""Iterators while a call uses them on a worker: one that was interrupted is reset, one that has ended is found."""

import contextlib
import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from coordinator.errors import ClosureCancelledError
from coordinator.ps_strategy.per_worker.dataset import EndOfDataError, PerWorkerIterator
from coordinator.ps_strategy.per_worker.resource import WorkerContext
from coordinator.ps_strategy.tensorflow_internals.calls import call_concrete, flat_inputs

_logger = logging.getLogger("coordinator")


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
      tf.errors.AbortedError: an iterator was ended by an earlier call; it starts again with the next call.
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
            message = _restart(interrupted, context)
            if isinstance(error, tf.errors.OutOfRangeError):
                # Tried again, as the cancelled call is; it is not the end of the data.
                raise tf.errors.AbortedError(None, None, message) from error
            raise
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


def _restart(iterators: Sequence[PerWorkerIterator], context: WorkerContext) -> str:
    """Makes interrupted iterators again on the worker; returns what was logged."""
    for each in iterators:
        each.failed.pop(context.index, None)
        each.recreate_on(context)
    is_saved = all(each.positions.has_saved(context.index) for each in iterators)
    start = "its last saved position" if is_saved else "the beginning"
    message = f"{_names(iterators, context)} starts from {start}: a call that waited for an element was cancelled."
    _logger.warning("%s", message)
    return message


def _names(iterators: Sequence[PerWorkerIterator], context: WorkerContext) -> str:
    return f"{', '.join(each.name for each in iterators)} on {context.device}"
