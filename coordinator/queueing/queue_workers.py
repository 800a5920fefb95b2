"""What a closure queue is told of each worker, and knows of it: `ClosureQueue.workers`."""

import dataclasses
import threading
from collections.abc import Callable

from coordinator.queueing.closure import Closure
from coordinator.queueing.idle_workers import IdleWorkers
from coordinator.queueing.queue_state import Effects, QueueState, WorkerCounts
from coordinator.runtime import Cancellation


class QueueWorkers:
    """The workers that take closures from a queue. All methods may be called from any thread.

    Args:
      lock: the queue's lock.
      state: the queue's state.
      idle: the workers that wait for a closure.
      unused_cancellations: of workers whose last `take` returned nothing.
      carry_out: carries out effects; called without the lock.
    """

    def __init__(
        self,
        lock: threading.Lock,
        state: QueueState,
        idle: IdleWorkers,
        unused_cancellations: dict[int, Cancellation],
        carry_out: Callable[[Effects], None],
    ) -> None:
        self._lock = lock
        self._state = state
        self._idle = idle
        self._unused_cancellations = unused_cancellations
        self._carry_out = carry_out

    def admit(self, worker: int) -> None:
        """Gives a new worker closures, and counts from 0 for it."""
        with self._lock:
            self._state.dismissed.discard(worker)
            self._state.worker_counts.pop(worker, None)
            self._state.waiting.inputs.renew(worker)

    def dismiss(self, worker: int) -> None:
        """Gives a worker no closure any more."""
        with self._lock:
            self._state.dismissed.add(worker)
            self._state.waiting.inputs.workers.discard(worker)
            effects = self._state.fail_starved(worker)
            self._idle.wake_empty(worker)
        self._unused_cancellations.pop(worker, None)
        self._carry_out(effects)

    def renew_inputs(self, worker: int) -> None:
        """Records that a worker was reconnected, so that its parts of all inputs begin again."""
        with self._lock:
            self._state.waiting.inputs.renew(worker)

    def give_up(self, worker: int, error: BaseException) -> None:
        """Stops waiting for a lost worker: fails the closures for which only such workers have data left."""
        with self._lock:
            self._state.waiting.inputs.missing[worker] = error
            effects = self._state.fail_starved(None)
        self._carry_out(effects)

    def interrupt(self, worker: int) -> None:
        """Makes `take` return nothing, if a worker waits in it."""
        with self._lock:
            self._idle.wake_empty(worker)

    def cancel_attempts(self, worker: int) -> None:
        """Cancels what a worker runs, which is then requeued."""
        with self._lock:
            effects = Effects(cancelled=[attempt for attempt in self._state.running if attempt.worker == worker])
        self._carry_out(effects)

    def waiting_for(self, worker: int) -> list[Closure]:
        """Returns the closures that only this worker may run."""
        with self._lock:
            return self._state.waiting.waiting_for(worker)

    def idle(self) -> list[int]:
        """Returns the workers that wait in `take`, longest first."""
        with self._lock:
            return list(self._idle.workers)

    def counts(self, worker: int) -> WorkerCounts:
        """Returns what the attempts on a worker came to."""
        with self._lock:
            return dataclasses.replace(self._state.worker_counts[worker])
