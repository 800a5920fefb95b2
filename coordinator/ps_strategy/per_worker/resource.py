"""Something that every worker has a copy of: an iterator, a dataset, a table, a variable.

A copy is made on its worker's thread when the worker first needs it, and made again after the worker was restarted.
So a worker that dies while it makes one is like a worker that dies at any other time, and a resource that cannot be
made harms only the closures that use it.
"""

import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from coordinator.errors import ClosureCancelledError, ClosureInputError
from coordinator.ps_strategy import tensorflow_internals
from coordinator.ps_strategy.tensorflow_internals import CancellationManager


@dataclasses.dataclass(frozen=True)
class WorkerContext:
    """Where, and under which conditions, a piece of work runs.

    Attributes:
      index: the worker's task index.
      device: its CPU, in full.
      incarnation: a number that changes whenever what was on the worker is gone.
      cancellation: cancels the calls of this piece of work.
    """

    index: int
    device: str
    incarnation: int
    cancellation: CancellationManager


class PerWorkerResource:
    """A resource with one copy per worker.

    Args:
      name: for people.
      build: makes the copy for a worker; called on the worker's thread, inside its device scope.
    """

    def __init__(self, name: str, build: Callable[[WorkerContext], Any]) -> None:
        self.name = name
        self._build = build
        # With the incarnation that each was made for. Each entry is used by its worker's thread alone.
        self._copies: dict[int, tuple[int | None, Any]] = {}

    def value_on(self, context: WorkerContext) -> Any:
        """The copy of this worker, made now if need be.

        Raises:
          ClosureInputError: it could not be made; the cause says why.
        """
        incarnation, value = self._copies.get(context.index, (None, None))
        if incarnation == context.incarnation:
            return value
        self._copies.pop(context.index, None)
        try:
            with tf.device(context.device):
                value = self._build(context)
        except (ClosureInputError, ClosureCancelledError):
            raise
        except Exception as error:
            raise ClosureInputError(
                f"{self.name} could not be made on {context.device}: {type(error).__name__}: {error}"
            ) from error
        self._copies[context.index] = (context.incarnation, value)
        return value

    def make_anew_on(self, context: WorkerContext) -> None:
        """The copy of this worker is made again when it is next used; until then it is kept."""
        if context.index in self._copies:
            self._copies[context.index] = None, self._copies[context.index][1]

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"


class PerWorkerHandles:
    """Which tensors stand for per-worker resources.

    A table or per-worker variable also exists once on the client. A function that uses it captures the handle of that
    one, however deeply it is nested in other functions; when the function runs on a worker, the handle of the worker's
    copy is passed in its place.
    """

    def __init__(self) -> None:
        # By the identity of the table or variable: a table that is being loaded has no handle yet.
        self._handles_of_copies: dict[int, PerWorkerResource] = {}

    def add(self, owner: Any, handles_of_copies: PerWorkerResource) -> None:
        """From now on, and as long as it lives, a table or variable stands for its workers' copies."""
        self._handles_of_copies[id(owner)] = handles_of_copies
        weakref.finalize(owner, self._handles_of_copies.pop, id(owner), None)

    def resource_for(self, tensor: Any) -> PerWorkerResource | None:
        """What `tensor` stands for, if it is the handle of such a table or variable."""
        owner = tensorflow_internals.owner_of_handle(tensor)
        return self._handles_of_copies.get(id(owner)) if owner is not None else None
