"""One worker: a thread that takes closures from the queue and has the runtime run them.

    LIVE --its task is lost--> LOST --connected again--> LIVE
      \\______________ stop ______/________> STOPPED

A worker that is frozen is lost like one that died: the runtime sees to it that calls to a silent server fail.

Promises:
- A closure that was running when the worker was lost is handed back before anything else is done.
- One that is lost while it is idle is noticed too, within `Options.heartbeat_interval`; `IdleWatch` wakes it then.
- One that answers, but on which call after call fails without a fault of the function, is connected to anew.
- A lost worker's thread alone waits for its return; no other worker waits for it, nor it for another.
- The thread ends after `stop`, as soon as the call under way returns.
"""

import enum
import logging
import threading
import time
from collections.abc import Callable, Sequence

from coordinator.background_thread import BackgroundThread
from coordinator.closure_queue import ClosureQueue
from coordinator.errors import InvalidTransitionError, WorkerLost
from coordinator.fusing.fused_dispatch import FusedDispatch
from coordinator.options import Options
from coordinator.queueing.closure import Attempt
from coordinator.runtime import Failure, FailureKind, Runtime
from coordinator.statistics import WorkerStatistics
from coordinator.workers.recovery_loop import Recovery
from coordinator.workers.retry_rule import Decision, Reach, decide, final_error, is_hopeless, reach_of

_logger = logging.getLogger("coordinator")

# A connection may be at fault for what looks like bad luck: a server that let go of an earlier one late has been seen
# to take parts of the present one with it, so that nothing it computes reaches the client any more.
_TRANSIENT_FAILURES_UNTIL_RENEWAL = 5


class WorkerState(enum.Enum):
    """Whether a worker may be given closures."""

    LIVE = "live"
    LOST = "lost"
    STOPPED = "stopped"


_ALLOWED = {
    WorkerState.LIVE: {WorkerState.LOST, WorkerState.STOPPED},
    WorkerState.LOST: {WorkerState.LIVE, WorkerState.STOPPED},
    WorkerState.STOPPED: {WorkerState.STOPPED},
}


class Worker(BackgroundThread):
    """A task that runs closures one at a time, and the client's thread for it.

    Args:
      index: its task index.
      runtime: runs its closures.
      queue: has them.
      recovery: told when a closure fails because a parameter server was lost.
      options: limits and times.
      on_rest: called with the index, on the worker's thread, when the worker has no closure any more after it had one:
        nothing waits for it, its closure failed, or it was lost.
      live_workers: tells how many workers share what waits, this one included.

    Attributes:
      index: its task index.
      device: its name, such as `/job:worker/replica:0/task:0`.
    """

    def __init__(
        self,
        index: int,
        runtime: Runtime,
        queue: ClosureQueue,
        recovery: Recovery,
        options: Options,
        on_rest: Callable[[int], None] = lambda _: None,
        live_workers: Callable[[], int] = lambda: 1,
    ) -> None:
        super().__init__(f"coordinator-worker-{index}")
        self.index = index
        self.device = runtime.worker_device(index)
        self._runtime = runtime
        self._queue = queue
        self._recovery = recovery
        self._options = options
        self._on_rest = on_rest
        self._dispatch = FusedDispatch(index, runtime, queue, options, live_workers)
        self._is_at_work = False
        self._state = WorkerState.LIVE
        self._state_lock = threading.Lock()
        self._finished = self._failed = self._retried = self._losses = self._reconnections = 0
        self._reconnecting_seconds = 0.0
        self._transient_failures_in_a_row = 0
        self._lost_at = 0.0

    @property
    def state(self) -> WorkerState:
        """Whether it may be given closures."""
        return self._state

    @property
    def away_seconds(self) -> float:
        """How long it has been lost; 0 if it is not."""
        return time.monotonic() - self._lost_at if self._state is WorkerState.LOST else 0.0

    def healthy(self) -> bool:
        """Whether the worker may be given closures and answers a probe now. Takes at most `Options.probe_timeout`."""
        return self._state is WorkerState.LIVE and self._runtime.is_reachable(self.index)

    def stop(self) -> None:
        """Asks the thread to end; the queue must be stopped too."""
        self._change(WorkerState.STOPPED)
        super().stop()

    def statistics(self) -> WorkerStatistics:
        """What it has done so far."""
        return WorkerStatistics(
            index=self.index,
            device=self.device,
            state=self._state.value,
            finished=self._finished,
            failed=self._failed,
            retried=self._retried,
            losses=self._losses,
            reconnections=self._reconnections,
            reconnecting_seconds=self._reconnecting_seconds,
        )

    def __repr__(self) -> str:
        return f"<Worker {self.device}: {self._state.value}, {self._finished} closures finished>"

    def _run(self) -> None:
        self._runtime.bind_thread(self.index)
        if not self._runtime.is_reachable(self.index):
            self._wait_connected("is not connected yet", "it does not answer")
        while not (self._stop.is_set() or self._queue.is_stopped):
            # One that rests has nobody to tell so: it sleeps until there is a closure, or its task seems to be lost.
            attempt = self._queue.take(self.index, self._options.heartbeat_interval if self._is_at_work else None)
            if attempt is not None:
                self._carry_out(attempt)
            elif not self._stop.is_set() and not self._is_there():
                self._lose("it did not answer while it was idle")
            else:
                self._rest()
            # Keeps nothing of the closure alive (its arguments may hold iterators) while waiting for the next one.
            del attempt
        if not self._queue.is_stopped:
            # It was removed; others may wait for it no more than for one that is idle.
            self._rest()

    def _rest(self) -> None:
        """Tells, once, that the worker has no closure any more."""
        if self._is_at_work:
            self._is_at_work = False
            self._on_rest(self.index)

    def _is_there(self) -> bool:
        return self._runtime.seems_reachable(self.index) or self._runtime.is_reachable(self.index)

    def _carry_out(self, attempt: Attempt) -> None:
        if attempt.number > 1 and not self._runtime.is_reachable(self.index):
            # Workers that die together must not count, one after the other, against the closure that finds them dead.
            self._hand_back(attempt)
            self._lose("it did not answer a probe")
            return
        self._is_at_work = True
        attempts = self._dispatch.gather(attempt)
        try:
            results = self._dispatch.run(attempts)
        except BaseException as error:  # noqa: BLE001 - the runtime sorts it
            self._settle_failure(attempts, error)
        else:
            self._transient_failures_in_a_row = 0
            for one, result in zip(attempts, results, strict=True):
                # Counted first here and below: whoever finds everything settled must find it counted.
                self._finished += 1
                self._finished -= not self._queue.finish(one, result)

    def _settle_failure(self, attempts: Sequence[Attempt], error: BaseException) -> None:
        failure = self._runtime.classify(self.index, error)
        lost_server = failure.kind is FailureKind.PARAMETER_SERVER_LOST
        may_recover = lost_server and self._recovery.begin(failure.error)
        if failure.kind is FailureKind.TRANSIENT:
            # What refused the call needs a moment to come round; at once, the retries would be used up before.
            self._stop.wait(self._options.reconnect_interval)
        if len(attempts) == 1:
            self._settle_failed_attempt(attempts[0], failure, may_recover)
        else:
            self._settle_failed_call(attempts, failure, may_recover)
        is_transient = failure.kind is FailureKind.TRANSIENT
        self._transient_failures_in_a_row = self._transient_failures_in_a_row + 1 if is_transient else 0
        if failure.kind is FailureKind.WORKER_LOST:
            self._lose(str(error))
        elif self._transient_failures_in_a_row == _TRANSIENT_FAILURES_UNTIL_RENEWAL:
            self._lose(f"it answers, but {_TRANSIENT_FAILURES_UNTIL_RENEWAL} calls in a row failed: {error}")
        else:
            self._rest()

    def _settle_failed_attempt(self, attempt: Attempt, failure: Failure, may_recover: bool) -> None:
        count = attempt.closure.record_failure(self.index, failure.kind)
        match decide(failure, count, self._options, may_recover=may_recover):
            case Decision.RETRY:
                error = failure.error
                text = "%s failed on %s and is run again: %s: %s"
                _logger.info(text, attempt.closure, self.device, type(error).__name__, error)
                self._hand_back(attempt)
            case Decision.FAIL:
                reach = reach_of(failure.kind, self._options)
                self._failed += 1
                self._failed -= not self._queue.fail(attempt, final_error(failure, attempt, self.device), reach)

    def _settle_failed_call(self, attempts: Sequence[Attempt], failure: Failure, may_recover: bool) -> None:
        """Has closures that ran in one call run again, each alone: whose failure it was is not known.

        What no other attempt can mend is told by the first of them, and the others are withdrawn like all that waits.
        """
        self._dispatch.note_failure(failure.kind)
        told = attempts[:1] if is_hopeless(failure, may_recover=may_recover) else ()
        if not told:
            name, error = attempts[0].closure.name, failure.error
            text = "%s: %d calls of %s in one failed and are run again, each alone: %s: %s"
            _logger.info(text, self.device, len(attempts), name, type(error).__name__, error)
        for attempt in reversed(attempts[len(told) :]):
            if failure.kind in (FailureKind.WORKER_LOST, FailureKind.TRANSIENT):
                attempt.closure.record_failure(self.index, failure.kind)
            self._hand_back(attempt)
        for attempt in told:
            self._settle_failed_attempt(attempt, failure, may_recover)

    def _hand_back(self, attempt: Attempt) -> None:
        self._retried += 1
        self._retried -= not self._queue.hand_back(attempt)

    def _lose(self, reason: str) -> None:
        self._losses += 1
        self._dispatch.begin_anew()
        self._transient_failures_in_a_row = 0
        self._wait_connected("was lost", reason)

    def _wait_connected(self, what: str, reason: str) -> None:
        """Waits until the worker is connected to, or stopped."""
        lost_at = reported_at = self._lost_at = time.monotonic()
        if not self._change(WorkerState.LOST):
            return
        _logger.warning("%s %s; its work goes to other workers until it returns. (%s)", self.device, what, reason)
        self._runtime.disconnect(self.index)
        self._rest()
        while not self._stop.is_set() and not self._reconnect():
            now = time.monotonic()
            self._give_up_waiting_closures(now - lost_at)
            if now - reported_at >= self._options.stall_report_interval:
                reported_at = now
                _logger.warning("%s has been away for %.0f s and is still awaited.", self.device, now - lost_at)
            self._stop.wait(self._options.reconnect_interval)
        if not self._stop.is_set() and self._change(WorkerState.LIVE):
            _logger.warning("%s is there after %.1f s.", self.device, time.monotonic() - lost_at)

    def _give_up_waiting_closures(self, away: float) -> None:
        """Fails the closures that only this worker may run and that have waited too long for its return."""
        limit = self._options.affinity_timeout
        if away < limit:
            return
        for closure in self._queue.waiting_for(self.index):
            if time.monotonic() - closure.waiting_since >= limit:
                message = (
                    f"{closure} may run on {self.device} alone, which has been away for {away:.0f} s. Start that "
                    "worker again, schedule it without worker=, or raise Options.affinity_timeout."
                )
                self._queue.fail_waiting(closure, WorkerLost(self.device, message), Reach.JOIN)

    def _reconnect(self) -> bool:
        start = time.monotonic()
        connected = self._runtime.reconnect(self.index)
        if connected:
            self._reconnections += 1
            self._reconnecting_seconds += time.monotonic() - start
        return connected

    def _change(self, state: WorkerState) -> bool:
        """Changes the state; False if the worker was stopped meanwhile."""
        with self._state_lock:
            if self._state is WorkerState.STOPPED:
                return False
            if state not in _ALLOWED[self._state]:
                raise InvalidTransitionError(
                    f"{self.device} cannot go from {self._state.value} to {state.value}. This is a defect of "
                    "coordinator; please report it with this message."
                )
            self._state = state
            return True
