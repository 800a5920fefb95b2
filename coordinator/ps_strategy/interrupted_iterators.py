"""Iterators that were asked for an element when their call was cut off.

TensorFlow cancels such an iterator for good: from then on it fails as cancelled, or, if it prefetches, tells that its
data has ended. A call is cut off when it is cancelled, and when anything else in it fails, such as a pull from a
parameter server that was lost.

    a call fails        its iterators may be interrupted
    the next one fails as a cancelled or ended iterator does: they begin anew, and it is made again

Promises:
- An iterator that is known to be interrupted begins anew on its worker, as after a restart, and the call that found it
  so is made again. That it is interrupted is known if the call says that it was cancelled and it was not, and if data
  ends that is endless.
- Data that may end is never begun anew because it has ended; that it may have ended too early is logged.
"""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from coordinator.errors import ClosureCancelledError
from coordinator.ps_strategy.per_worker.resource import WorkerContext
from coordinator.ps_strategy.per_worker_dataset import PerWorkerIterator

_logger = logging.getLogger("coordinator")


@contextlib.contextmanager
def iterators_in_use(arguments: Any, context: WorkerContext) -> Iterator[None]:
    """A scope for one call on a worker. Nothing is looked at unless the call fails.

    Args:
      arguments: what the call is given: a structure with iterators in it.
      context: the worker.

    Raises:
      tf.errors.AbortedError: one of them was interrupted by an earlier call, and begins anew with the next.
    """
    try:
        yield
    except (ClosureCancelledError, tf.errors.OpError) as error:
        iterators = [leaf for leaf in tf.nest.flatten(arguments) if isinstance(leaf, PerWorkerIterator)]
        suspects = [each for each in iterators if each.may_be_interrupted_on(context)]
        _note_failed_call(iterators, error, context)
        if interrupted := [each for each in suspects if _is_interrupted(each, error, context)]:
            for each in interrupted:
                each.begin_anew_on(context)
            message = f"{_names(interrupted, context)} begins anew: a call that waited for an element was cut off."
            _logger.warning("%s", message)
            raise tf.errors.AbortedError(None, None, message) from error
        if suspects and isinstance(error, tf.errors.OutOfRangeError):
            for each in suspects:
                each.forget_failed_calls_on(context)
            _logger.warning(
                "%s has ended, and a call that used it was cut off before, which may have ended it too early. Make a "
                "new iterator if some of its data is missing.",
                _names(suspects, context),
            )
        raise


def _note_failed_call(iterators: Sequence[PerWorkerIterator], error: Exception, context: WorkerContext) -> None:
    may_have_ended = not all(each.is_endless_on(context.index) for each in iterators)
    if isinstance(error, tf.errors.OutOfRangeError) and may_have_ended:
        # That is how data ends, and nothing was cut off.
        return
    for each in iterators:
        each.note_failed_call_on(context)


def _is_interrupted(iterator: PerWorkerIterator, error: Exception, context: WorkerContext) -> bool:
    if isinstance(error, tf.errors.OutOfRangeError):
        return iterator.is_endless_on(context.index)
    # Whoever cancels a call of ours gets an error of ours.
    return isinstance(error, tf.errors.CancelledError)


def _names(iterators: Sequence[PerWorkerIterator], context: WorkerContext) -> str:
    return f"{', '.join(each.name for each in iterators)} on {context.device}"
