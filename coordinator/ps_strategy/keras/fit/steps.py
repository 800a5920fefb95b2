"""The steps of a model as functions to schedule, and the calls of them that have not finished."""

import logging
import queue
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from coordinator.future import Future

_logger = logging.getLogger("coordinator")

Step = Callable[[Any], Any]

# In seconds.
_STALL_REPORT_INTERVAL = 60.0


class ModelSteps:
    """Functions that run one or several steps of a model, each retraced only for new types of arguments.

    Args:
      step: takes a batch, nested as the data is, and returns tensors: `model.train_step`, `test_step`, `predict_step`.
      steps_per_call: number of batches that `of_next` and `of_next_if_any` take from their iterator.
    """

    def __init__(self, step: Step, steps_per_call: int) -> None:
        self._step = step
        self.steps_per_call = steps_per_call
        # Without AutoGraph, as Keras' own loop traces its steps and those that override them.
        function = tf.function(autograph=False, reduce_retracing=True)
        self.last_of = function(self._last_of)
        self.all_of = function(self._all_of)
        self.of_next = function(self._of_next)
        self.of_next_if_any = function(self._of_next_if_any)

    def _repeatable(self, times: int) -> Step:
        """Returns the step, as a function if it is called several times, so that it is traced once."""
        return self._step if times == 1 else tf.function(self._step, autograph=False)

    def _all_of(self, batches: Sequence[Any]) -> list[Any]:
        """Runs a step with each of the batches and returns the results of all."""
        step = self._repeatable(len(batches))
        return [step(batch) for batch in batches]

    def _last_of(self, batches: Sequence[Any]) -> Any:
        """Runs a step with each of the batches and returns the result of the last."""
        return self._all_of(batches)[-1]

    def _of_next(self, iterator: Any) -> Any:
        """Runs steps with the next batches and returns the result of the last.

        Raises:
          tf.errors.OutOfRangeError: fewer than `steps_per_call` batches are left.
        """
        step = self._repeatable(self.steps_per_call)
        return [step(next(iterator)) for _ in range(self.steps_per_call)][-1]

    def _of_next_if_any(self, iterator: Any) -> tuple[Any, Any]:
        """Runs steps with the next batches, fewer than `steps_per_call` if the data ends.

        Returns:
          The number of batches, an int32 scalar, and the result of the last step, zeros if there was none.
        """
        step = tf.function(self._step, autograph=False)
        spec = step.get_concrete_function(iterator.element_spec).structured_outputs
        count: Any = tf.constant(0)
        outputs = tf.nest.map_structure(lambda output: tf.zeros([n or 0 for n in output.shape], output.dtype), spec)
        for _ in range(self.steps_per_call):
            batch = iterator.get_next_as_optional()
            count, outputs = tf.cond(
                batch.has_value(),
                lambda count=count, batch=batch: (count + 1, step(batch.get_value())),
                lambda count=count, outputs=outputs: (count, outputs),
            )
        return count, outputs


class StepsInFlight:
    """Limits and collects the calls of one loop: enough to keep all workers busy, few enough that logs are recent.

    Used by one thread.

    Args:
      strategy: the strategy that the calls are scheduled on.
      per_worker: maximum number of unfinished calls per worker.

    Attributes:
      newest_result: the result of the call that finished last, or None.
    """

    def __init__(self, strategy: Any, per_worker: int = 4) -> None:
        self._strategy = strategy
        self._per_worker = per_worker
        self._finished: queue.SimpleQueue[Future] = queue.SimpleQueue()
        self._workers: dict[Future, int | None] = {}
        self.newest_result: Any = None

    def __len__(self) -> int:
        return len(self._workers)

    def add(self, future: Future, worker: int | None = None) -> None:
        """Adds a call, for any worker or for a given one."""
        self._workers[future] = worker
        future.add_done_callback(self._finished.put)  # type: ignore[arg-type]  # it passes this very future

    def count_by_worker(self) -> Counter[int | None]:
        """Returns the number of unfinished calls by worker."""
        return Counter(self._workers.values())

    def wait_room(self) -> None:
        """Waits until another call may be added and at least one result is known.

        Raises:
          Exception: what a call raised.
        """
        while len(self) >= self._per_worker * len(self._strategy.cluster.workers):
            self.wait_one()
        while not self._finished.empty() or (self.newest_result is None and self._workers):
            self.wait_one()

    def wait_one(self) -> tuple[Any, int | None]:
        """Waits for the next call to finish.

        Returns:
          Its result, and the worker that it was added for.

        Raises:
          Exception: what the call raised.
        """
        future = self._next_finished()
        worker = self._workers.pop(future)
        if future.cancelled() or future.exception() is not None:
            self._workers.clear()
            # Raises the first error, which may be that of another call.
            self._strategy.join()
            future.result()
        self.newest_result = future.result()
        return self.newest_result, worker

    def wait_finished(self) -> None:
        """Waits for all calls, then forgets their results.

        Raises:
          Exception: what a call raised.
        """
        while self._workers:
            self.wait_one()
        self.newest_result = None

    def _next_finished(self) -> Future:
        began = time.monotonic()
        while True:
            try:
                return self._finished.get(timeout=_STALL_REPORT_INTERVAL)
            except queue.Empty:
                _logger.warning(
                    "No step has finished for %.0f s, %d are scheduled: %s.",
                    time.monotonic() - began,
                    len(self),
                    self._strategy.cluster.statistics(),
                )
