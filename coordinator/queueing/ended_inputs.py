"""Which inputs of closures have ended on which workers, and which closures no worker can run therefore.

A worker's part of an input begins again when the worker is reconnected. So a lost worker whose part has not ended is
waited for, but not one whose part has ended.

A plain data structure, guarded by the queue's lock.
"""

from collections import Counter
from collections.abc import Callable
from typing import NamedTuple

from coordinator.queueing.closure import Closure, ErrorScope
from coordinator.runtime import FiniteInput


class Starved(NamedTuple):
    """Why no worker can run a closure: what creates the error that it ends with, and what this error affects."""

    new_error: Callable[[], BaseException]
    scope: ErrorScope


class EndedInputs:
    """Knows on which workers inputs have ended.

    Attributes:
      workers: the present workers.
      given_up: the workers that are not waited for any more, each with what creates the error that says so.
    """

    def __init__(self) -> None:
        self.workers: set[int] = set()
        self.given_up: dict[int, Callable[[], BaseException]] = {}
        self._reconnections: Counter[int] = Counter()
        self._scope = ErrorScope.END_OF_DATA

    def renew(self, worker: int) -> None:
        """Records that a worker is new or was reconnected, so that its parts of all inputs begin again."""
        self.workers.add(worker)
        self.given_up.pop(worker, None)
        self._reconnections[worker] += 1

    def end(self, ended: FiniteInput, worker: int, scope: ErrorScope) -> None:
        """Records that a worker's part of an input has ended.

        Args:
          ended: the input.
          worker: the worker's index.
          scope: what the error affects with which closures end once no worker can run them.
        """
        ended.ended[worker] = self._reconnections[worker]
        self._scope = scope

    def has_data(self, inputs: tuple[FiniteInput, ...], worker: int) -> bool:
        """Returns whether none of these inputs has ended on a worker."""
        reconnections = self._reconnections[worker]
        return all(each.ended.get(worker) != reconnections for each in inputs)

    def why_starved(self, closure: Closure) -> Starved | None:
        """Returns why no worker can run a closure; None if one can, or may when it returns."""
        for ended in closure.inputs:
            if ended.ended:
                break
        else:
            return None
        workers = self.workers if closure.target is None else {closure.target}
        awaited = [worker for worker in workers if self.has_data(closure.inputs, worker)]
        if (closure.target is not None and awaited) or any(worker not in self.given_up for worker in awaited):
            return None
        return Starved(self.given_up[awaited[0]] if awaited else ended.new_error, self._scope)
