"""The result of many runs of one function, before all of them have ended.

    RunsFuture    0 1 2 | 3 4 5 6 | 7 8     steps = 9, completed = 3
    RunsPart      done    running   waits   each in place of the future of a closure

The runs are divided while they run: a worker takes those of one call from those that wait. So all workers end at about
the same time, and only the runs of a call that failed are retried.
"""

import threading
from collections.abc import Callable, Sequence
from typing import Any

from coordinator.future import Future
from coordinator.runtime import FusionKey


class RunsFuture(Future):
    """A `Future` of many runs of one function with the same arguments.

    `result()` has each output of all runs, stacked along a new first axis in the order of the runs. It raises the
    error of the first run that fails, which cancels the others. `cancel()` cancels all runs that have not ended.

    Args:
      name: the function's name.
      number: the place in the order of scheduling.
      steps: the number of runs.
      concatenated: joins stacked results of consecutive runs.
      origin: the `TracedFunction` that was scheduled; identifies futures of this strategy and gives the result's specs.

    Attributes:
      steps: as given.
      fusion_key: of runs that were not tried before; None if each is a separate call. Set by the queue.
      parts: the closures whose runs have not ended, in order of creation.
      rest: the one of them whose runs no worker has taken; None if there is none.
      begun: how many runs have begun, those that are made again counted once. The queue's lock guards these three.
    """

    __slots__ = (
        *("_completed", "_concatenated", "_is_discarded", "_is_over", "_lock", "_results"),
        *("begun", "fusion_key", "parts", "rest", "steps"),
    )

    def __init__(
        self,
        name: str,
        number: int,
        steps: int,
        concatenated: Callable[[Sequence[Any]], Any],
        origin: Any = None,
    ) -> None:
        super().__init__(name, number, origin=origin)
        self.steps = steps
        self.fusion_key: FusionKey | None = None
        self.parts: dict[Any, None] = {}
        self.rest: Any = None
        self.begun = 0
        self._concatenated = concatenated
        # A leaf lock; guards what follows.
        self._lock = threading.Lock()
        self._results: list[tuple[int, Any]] = []
        self._completed = 0
        self._is_over = self._is_discarded = False

    @property
    def completed(self) -> int:
        """How many runs have a result."""
        return self._completed

    def discard(self) -> None:
        """Drops the results, now and later, since nothing is going to use them: `result()` returns None."""
        with self._lock:
            self._is_discarded = True
            self._results.clear()

    # The methods that follow are for the parts.

    def add(self, first: int, count: int, result: Any) -> None:
        """Adds the stacked results of `count` runs; `first` is the number of the first of them, from 0 on."""
        with self._lock:
            if self._is_over:
                return
            if not self._is_discarded:
                self._results.append((first, result))
            self._completed += count
            if self._completed < self.steps:
                return
            self._is_over = True
        if self._is_discarded:
            self.set_result(None)
            return
        self._results.sort(key=lambda each: each[0])
        try:
            result = self._concatenated([each for _, each in self._results])
        except Exception as error:  # noqa: BLE001 - raised by result()
            self.set_exception(error)
        else:
            self.set_result(result)
        self._results.clear()

    def end(self, error: BaseException | None) -> None:
        """Ends it with an error, or as cancelled by its user if that is None; does nothing if it has ended."""
        with self._lock:
            if self._is_over:
                return
            self._is_over = True
            self._results.clear()
        if error is None:
            self.set_cancelled()
        else:
            self.set_exception(error)


class RunsPart:
    """Consecutive runs of a `RunsFuture` that one closure makes; takes the place of the closure's future.

    Args:
      whole: the future.
      runs: how many there are.
      first: the number of the first run, from 0 on; -1 until they begin.

    Attributes:
      whole, first, runs: as given; the queue changes the last two, under its lock.
    """

    __slots__ = ("_is_done", "first", "runs", "whole")

    def __init__(self, whole: RunsFuture, runs: int, first: int = -1) -> None:
        self.whole = whole
        self.runs = runs
        self.first = first
        self._is_done = False

    # The same as of a `Future`.

    @property
    def is_started(self) -> bool:
        """Whether a worker has begun any of the runs."""
        return self.whole.is_started

    @is_started.setter
    def is_started(self, value: bool) -> None:
        self.whole.is_started |= value

    @property
    def worker(self) -> int | None:
        """The index of the worker that began runs, or ended some, last."""
        return self.whole.worker

    @worker.setter
    def worker(self, value: int) -> None:
        self.whole.worker = value

    @property
    def attempts(self) -> int:
        """How many attempts there were of the runs that were attempted most often."""
        return self.whole.attempts

    @attempts.setter
    def attempts(self, value: int) -> None:
        self.whole.attempts = max(self.whole.attempts, value)

    def done(self) -> bool:
        """Returns whether its outcome was set."""
        return self._is_done

    def set_result(self, result: Any) -> None:
        """Sets the stacked results of its runs."""
        self.whole.add(self.first, self.runs, result)
        self._is_done = True

    def set_exception(self, exception: BaseException) -> None:
        """Sets the error with which one of its runs, or of those of another part, has ended."""
        self.whole.end(exception)
        self._is_done = True

    def set_cancelled(self) -> None:
        """Records that the user cancelled the runs."""
        self.whole.end(None)
        self._is_done = True
