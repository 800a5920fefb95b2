"""The workers of a closure queue: which there are, what they run, and what data they have left."""

import dataclasses
import threading
import time
from collections.abc import Callable
from typing import Any

from coordinator.queueing.closure import Attempt, Closure, ClosureState, ErrorScope
from coordinator.queueing.effects import Effects
from coordinator.queueing.interrupts import uninterrupted
from coordinator.queueing.queue_state import QueueState
from coordinator.queueing.waiting_closures import Apart
from coordinator.runtime import Cancellation, Failure, FailureKind, FiniteInput
from coordinator.statistics import WorkerCounts

# No number of reconnections.
_NEVER = -1


class QueueWorkers:
    """The workers that take closures from a queue. All methods may be called from any thread.

    Args:
      lock: the queue's lock.
      state: the queue's state.
      unused_cancellations: of workers whose last `take` returned nothing.
      carry_out: carries out effects; called without the lock.
    """

    def __init__(
        self,
        lock: threading.Lock,
        state: QueueState,
        unused_cancellations: dict[int, Cancellation],
        carry_out: Callable[[Effects], None],
    ) -> None:
        self._lock = lock
        self._state = state
        self._unused_cancellations = unused_cancellations
        self._carry_out = carry_out

    def admit(self, worker: int) -> None:
        """Gives a new worker closures, and counts from 0 for it."""
        with self._lock:
            self._state.dismissed.discard(worker)
            self._state.waiting.away.discard(worker)
            self._state.worker_counts.pop(worker, None)
            self._state.waiting.inputs.renew(worker)

    def dismiss(self, worker: int) -> None:
        """Gives a worker no closure any more."""
        with self._lock:
            self._state.dismissed.add(worker)
            self._state.waiting.inputs.workers.discard(worker)
            self._state.interrupt(worker)
            # It may have been the last one that closures waited for which were lost on the others.
            self._state.wake()
        self._unused_cancellations.pop(worker, None)
        self.fail_starved(worker)

    def set_away(self, worker: int, *, is_away: bool) -> None:
        """Records that a worker was lost, or has returned. What avoids other workers may then run there, or here."""
        with self._lock:
            (self._state.waiting.away.add if is_away else self._state.waiting.away.discard)(worker)
            self._state.wake()

    def await_another(self, closure: Closure) -> bool:
        """Has a closure that was lost on one worker wait for any other one; returns False if there is no other."""
        waiting = self._state.waiting
        with self._lock:
            apart = Apart(closure.inputs, closure.lost_on, needs_another=True)
            was_always_one = len(closure.lost_on) == 1 and closure.target is None
            closure.needs_another = was_always_one and waiting.has_other(apart, is_present=False)
            return closure.needs_another

    def renew_inputs(self, worker: int) -> None:
        """Records that a worker was reconnected, so that its parts of all inputs begin again."""
        with self._lock:
            # One that was removed meanwhile would be waited for as long as it has data left: for ever.
            if worker not in self._state.dismissed:
                self._state.waiting.inputs.renew(worker)

    def renew_input(self, renewed: FiniteInput) -> None:
        """Records that the parts of an input have not ended any more: they are at earlier positions."""
        with self._lock:
            # Not emptied: closures that wait for it stay where they are.
            renewed.ended = dict.fromkeys(renewed.ended, _NEVER)
            for inputs in [each for each in self._state.ends if renewed in each]:
                del self._state.ends[inputs]
            self._state.wake()

    def give_up(self, worker: int, new_error: Callable[[], BaseException]) -> None:
        """Stops waiting for a lost worker: fails the closures for which only such workers have data left."""
        with self._lock:
            self._state.waiting.inputs.given_up[worker] = new_error
        self.fail_starved(None)

    def end_input(self, attempt: Attempt, failure: Failure, scope: ErrorScope) -> None:
        """Records that an input has ended on an attempt's worker; its closure waits for a worker that has data left.

        Args:
          attempt: the attempt.
          failure: names the input, and has the error with which closures end once it has ended on all workers.
          scope: what that error affects.
        """
        with self._lock:
            effects = self._end_input(attempt, failure, scope)
            self._state.wake()
        self._carry_out(effects)
        self.fail_starved(attempt.worker)

    @uninterrupted
    def fail_starved(self, worker: int | None) -> None:
        """Fails the closures that no worker can run; of those for one worker, only those for `worker`."""
        while True:
            with self._lock:
                starved = self._state.waiting.starved(worker)
            if not starved:
                return
            _, reason = starved[0]
            error = reason.new_error()
            with self._lock:
                effects = self._fail_starved(worker, reason.new_error, error)
            self._carry_out(effects)

    def requeue_overdue(self) -> float | None:
        """Puts each closure that exceeded its timeout at the front, to be tried beside its latest attempt.

        Returns:
          When the next one will exceed its timeout, on the `time.monotonic` clock; None if none can.
        """
        state, now = self._state, time.monotonic()
        deadlines = []
        with self._lock:
            for attempt in list(state.running):
                closure = attempt.closure
                if closure.timeout is None or closure.has_ended or closure.is_queued or closure.live[-1] is not attempt:
                    continue
                deadline = attempt.started + closure.timeout
                if deadline > now:
                    deadlines.append(deadline)
                elif not state.is_unwanted(closure):
                    state.waiting.add(closure, at_front=True)
                    state.wake(closure.target)
        return min(deadlines, default=None)

    def interrupt(self, worker: int) -> None:
        """Makes `take` return nothing, if a worker waits in it."""
        with self._lock:
            self._state.interrupt(worker)

    def attempts_on(self, worker: int) -> list[Attempt]:
        """Returns what a worker runs."""
        return [attempt for attempt in self.attempts() if attempt.worker == worker]

    def attempts(self) -> list[Attempt]:
        """Returns what runs."""
        with self._lock:
            return list(self._state.running)

    def cancel_attempts(self, worker: int) -> None:
        """Cancels what a worker runs, which is then requeued."""
        self._carry_out(Effects(cancelled=self.attempts_on(worker)))

    def waiting_for(self, worker: int) -> list[Closure]:
        """Returns the closures that only this worker may run."""
        with self._lock:
            return self._state.waiting.waiting_for(worker)

    def waiting_with(self, closure: Closure) -> int:
        """Returns how many closures wait where a running one for all workers did; some may have been cancelled."""
        return len(self._state.waiting.queue_with(closure))

    def work_like(self, closure: Closure) -> Any:
        """Returns the work of the next closure, if it has the fusion key of a running one that was for all workers."""
        with self._lock:
            others = (each for each in self._state.waiting.queue_with(closure) if each.is_queued)
            found = next(others, None)
            return found.work if found is not None and found.fusion_key == closure.fusion_key else None

    def idle(self) -> list[int]:
        """Returns the workers that wait in `take`, longest first."""
        with self._lock:
            return list(self._state.idle)

    def counts(self, worker: int) -> WorkerCounts:
        """Returns what the attempts on a worker came to."""
        with self._lock:
            return dataclasses.replace(self._state.worker_counts[worker])

    def _end_input(self, attempt: Attempt, failure: Failure, scope: ErrorScope) -> Effects:
        """Ends an attempt, without an outcome unless no worker has data left."""
        state, ended = self._state, failure.ended
        assert ended is not None
        state.waiting.end_input(ended, attempt.worker, scope)
        starved = state.waiting.inputs.why_starved(attempt.closure)
        if starved is None or starved.new_error is not ended.new_error:
            return state.requeue(attempt, FailureKind.END_OF_DATA.value)
        state.end_attempt(attempt)
        effects = state.decide(attempt, ClosureState.FAILED, failure.error, scope)
        effects.ended = attempt
        effects.outcomes += self._fail_starved(attempt.worker, ended.new_error, failure.error).outcomes
        return effects

    def _fail_starved(
        self, worker: int | None, new_error: Callable[[], BaseException], error: BaseException
    ) -> Effects:
        """Ends the closures that no worker can run.

        Args:
          worker: of those for one worker, only those for this one.
          new_error: only those whose errors it creates.
          error: has been created by it.
        """
        state, effects = self._state, Effects()
        for closure, starved in state.waiting.starved(worker):
            if starved.new_error is not new_error or closure.has_ended:
                continue
            if closure.live:
                state.waiting.remove(closure)
            else:
                effects.outcomes += state.end(closure, ClosureState.FAILED, error, starved.scope).outcomes
        return effects
