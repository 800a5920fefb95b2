"""One worker: a thread that takes closures from the queue and has the runtime run them.

    LIVE --its task is lost--> LOST --reconnected--> LIVE
      \\______________ stop ______/________> STOPPED

A frozen worker is lost like one that died: the servers' heartbeat makes calls to a silent server fail.

Guarantees:
- A closure that was running when the worker was lost is requeued before anything else is done.
- The loss of an idle worker is noticed too, within `Options.heartbeat_interval`; `IdleWatch` wakes its thread then.
- A worker that answers, but on which call after call fails without a fault of the function, is reconnected.
- Only a lost worker's own thread waits for its return.
- The thread ends after `stop`, as soon as the call that runs returns.
"""

import dataclasses
import enum
import functools
import logging
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from coordinator.errors import ClosureQuarantined, InvalidTransitionError, WorkerLost
from coordinator.events.event_stream import Kind
from coordinator.future import Future
from coordinator.options import Options
from coordinator.queueing.closure import Attempt, ErrorScope
from coordinator.queueing.closure_queue import ClosureQueue
from coordinator.runtime import Failure, FailureKind, Runtime, Servers
from coordinator.statistics import WorkerStatistics
from coordinator.workers.background_threads import QueueThread
from coordinator.workers.fused_dispatch import FusedDispatch
from coordinator.workers.recovery_loop import RecoveryLoop

if TYPE_CHECKING:
    from coordinator.workers.cluster import Cluster

_logger = logging.getLogger("coordinator")

# Kinds of failures whose errors are TensorFlow's about its servers.
_OF_SERVERS = (
    FailureKind.WORKER_LOST,
    FailureKind.PARAMETER_SERVER_LOST,
    FailureKind.LINK_LOST,
    FailureKind.TRANSIENT,
)


def may_retry(
    failure: Failure,
    failures_of_kind: int,
    options: Options,
    *,
    may_recover: bool = False,
    may_go_elsewhere: Callable[[], bool] = lambda: False,
) -> bool:
    """Decides whether a closure is run again.

    Args:
      failure: of the latest attempt.
      failures_of_kind: how many attempts of the closure failed in this way, the latest included.
      options: the limits.
      may_recover: whether lost parameter servers are being recovered.
      may_go_elsewhere: asked when a closure was lost with its worker as often as it may be: returns whether that was
        always the same worker, and another one can run it. Then not the closure but the worker is at fault.
    """
    match failure.kind:
        case FailureKind.CANCELLED | FailureKind.LINK_LOST:
            # Of a cancelled one: if the user did it, its outcome is decided already; if the library did, it is to run
            # later. A broken link is no fault of the closure, and nothing runs there before it is whole.
            return True
        case FailureKind.PARAMETER_SERVER_LOST:
            return may_recover
        case FailureKind.WORKER_LOST:
            return failures_of_kind < options.max_attempts or (options.max_attempts > 1 and may_go_elsewhere())
        case FailureKind.TRANSIENT:
            return failures_of_kind <= options.transient_retries
        case _:
            return False


def error_scope(kind: FailureKind, options: Options) -> ErrorScope:
    """Returns what the error of a closure that is not retried affects."""
    match kind:
        case FailureKind.PARAMETER_SERVER_LOST:
            return ErrorScope.ALL_CLOSURES
        case FailureKind.WORKER_LOST:
            return ErrorScope.JOIN
        case FailureKind.END_OF_DATA:
            return ErrorScope.END_OF_DATA if options.stop_on_error else ErrorScope.FUTURE
        case _:
            return ErrorScope.ALL_CLOSURES if options.stop_on_error else ErrorScope.FUTURE


def final_error(failure: Failure, attempt: Attempt, task: str) -> BaseException:
    """Returns the exception that a closure ends with: of its last attempt, with notes that say which, where and when.

    The task is the name of the worker that made the attempt.
    """
    error, closure = failure.error, attempt.closure
    if failure.kind is FailureKind.WORKER_LOST:
        alone = f" No worker but {task} could run it." if len(closure.lost_on) == 1 else ""
        error = ClosureQuarantined(
            f"{closure} was lost with its worker too often ({closure.history()}) and is not run again.{alone} See in "
            "the workers' logs whether it kills them (memory is the usual cause), or raise Options.max_attempts if "
            "machines are preempted this often."
        )
        error.original_exception = failure.error
    error.add_note(f"coordinator: {closure} failed on {task}, attempt {attempt.number}: {failure.kind.value}.")
    return error


def summary(failure: Failure) -> str:
    """Returns why an attempt failed: the first line of its error, or the class of an error about servers."""
    name = type(failure.error).__name__
    if failure.kind in _OF_SERVERS:
        return f"{failure.kind.value} ({name})"
    return f"{name}: {str(failure.error).partition(chr(10))[0]}"


# A connection may be broken although its server answers: a server that dropped an earlier connection late has been seen
# to drop parts of the present one with it, so that no result reaches the client any more.
_TRANSIENT_FAILURES_UNTIL_RECONNECT = 5


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


class Worker(QueueThread):
    """A task that runs closures one call at a time, and the client's thread for it.

    The library creates it: `recovery` begins when a closure fails because a parameter server was lost; methods of the
    `cluster` to which it belongs are called on the worker's thread.

    Attributes:
      index: its task index.
      device: its name, such as `/job:worker/replica:0/task:0`.
      loss: why it was lost last; empty if it never was.
    """

    def __init__(
        self,
        index: int,
        runtime: Runtime,
        servers: Servers,
        queue: ClosureQueue,
        recovery: RecoveryLoop,
        options: Options,
        cluster: "Cluster",
    ) -> None:
        super().__init__(f"coordinator-worker-{index}", self._serve, queue)
        self.index = index
        self._task = f"worker {index}"
        self.device = servers.worker_device(index)
        self._runtime = runtime
        self._servers = servers
        self._recovery = recovery
        self._options = options
        self._cluster = cluster
        self._dispatch = FusedDispatch(index, runtime, queue, options)
        self._state = WorkerState.LIVE
        self._state_lock = threading.Lock()
        self._losses = self._reconnections = self._transient_failures_in_a_row = 0
        self._reconnecting_seconds = self._lost_at = 0.0
        self.loss = ""

    @property
    def state(self) -> WorkerState:
        """Whether it may be given closures."""
        return self._state

    @property
    def away_seconds(self) -> float:
        """How long it has been lost, in seconds; 0 if it is not."""
        return time.monotonic() - self._lost_at if self._state is WorkerState.LOST else 0.0

    def healthy(self) -> bool:
        """Returns whether it may be given closures and answers a probe. Takes at most `Options.probe_timeout`."""
        return self._state is WorkerState.LIVE and self._servers.is_reachable(self.index)

    def schedule(self, fn: Any, args: Any = None, kwargs: Any = None, **limits: Any) -> Future:
        """Queues one call of `fn` for this worker alone; the same as `strategy.schedule(..., worker=worker.index)`."""
        return self._cluster.schedule(fn, args, kwargs, worker=self.index, **limits)

    def stop(self) -> None:
        """Asks the thread to end; the queue must be stopped too."""
        self._change(WorkerState.STOPPED)
        super().stop()

    def statistics(self) -> WorkerStatistics:
        """Returns a snapshot of what it has done so far."""
        counts = self._queue.worker_counts(self.index)
        return WorkerStatistics(
            index=self.index,
            device=self.device,
            state=self._state.value,
            finished=counts.finished,
            failed=counts.failed,
            retried=counts.retried,
            losses=self._losses,
            reconnections=self._reconnections,
            reconnecting_seconds=self._reconnecting_seconds,
        )

    def __repr__(self) -> str:
        return f"<Worker {self.device}: {self._state.value}, {self.statistics().finished} closures finished>"

    def _serve(self) -> None:
        index, servers = self.index, self._servers
        self._runtime.bind_thread(index)
        if self._state is WorkerState.LOST:
            # An unexpected error has ended the wait for its return.
            self._wait_returned(self._lost_at)
        elif not servers.is_reachable(index):
            self._wait_reconnected(is_new=True)
        links, heartbeat_interval = self._cluster.links, self._options.heartbeat_interval
        while not self.stopping.is_set():
            if links.separation:
                self._wait_linked()
            # Once it has reported that it is idle, it sleeps until there is a closure or its server seems lost.
            attempt = self._queue.take(index, heartbeat_interval if self._queue.is_active(index) else None)
            if attempt is not None:
                self._run_attempt(attempt)
            elif not (self.stopping.is_set() or servers.seems_reachable(index) or servers.is_reachable(index)):
                self._reconnect_lost()
            else:
                self._report_idle()
                if self._queue.is_stopped:
                    break
            # Keeps nothing of the closure alive (its arguments may hold iterators) while waiting for the next one.
            del attempt
        if not self._queue.is_stopped:
            # The worker was removed. Report it idle, and fail the closures pinned to it.
            self._report_idle()
            self._cluster.fail_orphaned(self.index)

    def _record_failure(self, error: BaseException) -> None:
        """Records an unexpected error of the thread; what the worker ran is run again, like after a transient error."""
        super()._record_failure(error)
        for attempt in self._queue.attempts(self.index):
            self._settle_failed_attempt(attempt, Failure(FailureKind.TRANSIENT, error), may_recover=False)
        self._report_idle()

    def _report_idle(self) -> None:
        if self._queue.is_active(self.index):
            self._cluster.became_idle(self.index)
            self._queue.report_idle(self.index)

    def _run_attempt(self, attempt: Attempt) -> None:
        """Runs an attempt that has started, alone or in one call with others, and settles them."""
        if attempt.closure.timeout is not None:
            self._cluster.attempt_started(attempt)
        if attempt.number > 1 and not self._servers.is_reachable(self.index):
            # Otherwise workers that die at the same time would each count as a failure of the same closure.
            self._queue.requeue(attempt, FailureKind.WORKER_LOST.value)
            self._reconnect_lost()
            return
        attempts = self._dispatch.gather(attempt)
        try:
            results = self._dispatch.run(attempts)
        except BaseException as error:  # noqa: BLE001 - the runtime classifies it
            self._settle_failure(attempts, error)
        else:
            self._transient_failures_in_a_row = 0
            self._queue.finish(attempts, results)

    def _settle_failure(self, attempts: Sequence[Attempt], error: BaseException) -> None:
        failure = self._runtime.classify(self.index, error)
        _logger.debug("A call failed on %s: %s.", self.device, failure.kind.value, exc_info=error)
        lost_server = failure.kind is FailureKind.PARAMETER_SERVER_LOST
        may_recover = lost_server and self._recovery.begin(failure.error)
        is_transient = failure.kind is FailureKind.TRANSIENT
        if is_transient:
            # What refused the call needs a moment; retries at once would all fail.
            self.stopping.wait(self._options.reconnect_interval)
            failure = self._blamed_on_links(failure)
        if sum(attempt.closure.runs for attempt in attempts) <= 1:
            self._settle_failed_attempt(attempts[0], failure, may_recover)
        else:
            self._settle_failed_call(attempts, failure, may_recover)
        self._transient_failures_in_a_row = self._transient_failures_in_a_row + 1 if is_transient else 0
        if failure.kind is FailureKind.WORKER_LOST or (
            failure.kind is FailureKind.LINK_LOST and not self._servers.seems_reachable(self.index)
        ):
            self._reconnect_lost()
        elif self._transient_failures_in_a_row == _TRANSIENT_FAILURES_UNTIL_RECONNECT:
            count = _TRANSIENT_FAILURES_UNTIL_RECONNECT
            self._reconnect_lost(
                f"it answers, but {count} calls in a row failed on the network: {type(error).__name__}"
            )
        else:
            self._report_idle()

    def _blamed_on_links(self, failure: Failure) -> Failure:
        """Returns a transient failure as a lost link if a link is broken; gives the worker up if it is the worker's."""
        why = self._cluster.links.find_broken([self.index]).get(self.index)
        if why is not None:
            self._servers.give_up(self.index, why)
        is_link = why is not None or self._cluster.links.separation
        return dataclasses.replace(failure, kind=FailureKind.LINK_LOST) if is_link else failure

    def _wait_linked(self) -> None:
        """Waits until the parameter servers reach each other."""
        while self._cluster.links.separation and not self.stopping.is_set():
            self._report_idle()
            self.stopping.wait(self._options.reconnect_interval)

    def _settle_failed_attempt(self, attempt: Attempt, failure: Failure, may_recover: bool) -> None:
        if failure.kind is FailureKind.END_OF_DATA:
            # Not a failure of the closure: it is run where there is data left.
            _logger.info("%s found no data left on %s.", attempt.closure, self.device)
            # The frames of its traceback would keep the data alive until the garbage collector runs.
            error = final_error(failure, attempt, self.device).with_traceback(None)
            scope = error_scope(failure.kind, self._options)
            self._queue.end_input(attempt, dataclasses.replace(failure, error=error), scope)
            return
        closure = attempt.closure
        count = closure.record_failure(self.index, failure.kind)

        may_go_elsewhere = functools.partial(self._queue.await_another, closure)
        if closure.runs and may_retry(
            failure, count, self._options, may_recover=may_recover, may_go_elsewhere=may_go_elsewhere
        ):
            where = " on another worker, none of which may be there now" if closure.needs_another else ""
            _logger.info("%s failed on %s and is run again%s: %s", closure, self.device, where, summary(failure))
            self._queue.requeue(attempt, failure.kind.value)
        else:
            if failure.kind is FailureKind.WORKER_LOST and closure.runs:
                self._record("function_quarantined", closure.name, detail=closure.history())
            scope = error_scope(failure.kind, self._options)
            self._queue.fail(attempt, final_error(failure, attempt, self.device), scope)

    def _settle_failed_call(self, attempts: Sequence[Attempt], failure: Failure, may_recover: bool) -> None:
        """Requeues closures that ran in one call, each to run alone, since it is not known which of them failed.

        The first of them reports an error that no further attempt can avoid, which cancels the others.
        """
        self._dispatch.record_failure(failure.kind)
        is_final = failure.kind is FailureKind.PARAMETER_SERVER_LOST and not may_recover
        failed = attempts[:1] if is_final else ()
        if not failed:
            name, text = attempts[0].closure.name, "%s: %d calls of %s in one failed and are run again, each alone: %s"
            _logger.info(text, self.device, sum(attempt.closure.runs for attempt in attempts), name, summary(failure))
        for attempt in reversed(attempts[len(failed) :]):
            if failure.kind in (FailureKind.WORKER_LOST, FailureKind.TRANSIENT):
                attempt.closure.record_failure(self.index, failure.kind)
            self._queue.requeue(attempt, failure.kind.value)
        for attempt in failed:
            self._settle_failed_attempt(attempt, failure, may_recover)

    def _reconnect_lost(self, reason: str | None = None) -> None:
        self._dispatch.reset()
        self._transient_failures_in_a_row = 0
        self._wait_reconnected(reason)

    def _record(self, kind: Kind, name: str = "", count: int = 1, seconds: float = 0.0, detail: str = "") -> None:
        self._queue.events.record(kind, self._task, name, count, seconds, detail)

    def _wait_reconnected(self, reason: str | None = None, *, is_new: bool = False) -> None:
        """Waits until the worker is connected or stopped. The reason of its loss is asked for if it is None."""
        lost_at = self._lost_at = time.monotonic()
        if not self._change(WorkerState.LOST, losses=not is_new):
            return
        self._queue.set_away(self.index, is_away=True)
        if not is_new:
            self._report_loss(reason or self._servers.describe_loss(self.index))
        self._servers.disconnect(self.index)
        self._report_idle()
        self._wait_returned(lost_at, is_new=is_new)

    def _wait_returned(self, lost_at: float, *, is_new: bool = False) -> None:
        """Tries to connect until the worker is connected or stopped."""
        reported_at = -math.inf if is_new else lost_at
        text = ("%s is not connected after" if is_new else "%s has been lost for") + " %.0f s; still trying. (%s)"
        while not self.stopping.is_set() and not self._reconnect():
            now = time.monotonic()
            self._cancel_preparations()
            self._fail_waiting_closures(now - lost_at)
            if now - reported_at >= self._options.stall_report_interval:
                reported_at = now
                _logger.warning(text, self.device, now - lost_at, self._servers.describe_loss(self.index))
            self.stopping.wait(self._options.reconnect_interval)
        if not self.stopping.is_set() and self._change(WorkerState.LIVE):
            self._queue.set_away(self.index, is_away=False)
            text = "%s connected after %.1f s." if is_new else "%s reconnected after %.1f s."
            _logger.warning(text, self.device, time.monotonic() - lost_at)

    def _report_loss(self, cause: str) -> None:
        self.loss = cause
        self._record("worker_lost", detail=cause)
        text = "%s was lost; its work goes to other workers until it returns. (%s)"
        if not self._queue.live_workers:
            text = "%s was lost; no worker is left, and functions wait until one returns. Start one again. (%s)"
        _logger.warning(text, self.device, cause)

    def _cancel_preparations(self) -> None:
        """Cancels preparations for the worker: other workers would wait with theirs."""
        for closure in self._queue.waiting_for(self.index):
            if not closure.runs:
                self._queue.cancel(closure)

    def _fail_waiting_closures(self, lost_for: float) -> None:
        """Fails the closures that only this worker can run and that have waited too long for its return."""
        limit = self._options.affinity_timeout
        if lost_for < limit:
            return
        for closure in self._queue.waiting_for(self.index):
            if time.monotonic() - closure.waiting_since >= limit:
                message = (
                    f"{closure} may run on {self.device} alone, which has been lost for {lost_for:.0f} s. Start that "
                    "worker again, schedule it without worker=, or raise Options.affinity_timeout."
                )
                self._queue.fail_waiting(closure, WorkerLost(self.device, message), ErrorScope.JOIN)
        message = (
            f"Data is left on {self.device} alone, which has been lost for {lost_for:.0f} s. Start that worker again, "
            "remove it with strategy.cluster.remove_worker, or raise Options.affinity_timeout."
        )
        self._queue.give_up(self.index, functools.partial(WorkerLost, self.device, message))

    def _reconnect(self) -> bool:
        start = time.monotonic()
        connected = self._servers.reconnect(self.index)
        if connected:
            self._queue.renew_inputs(self.index)
            self._reconnections += 1
            self._record("worker_returned", seconds=time.monotonic() - self._lost_at)
            self._reconnecting_seconds += time.monotonic() - start
        return connected

    def _change(self, state: WorkerState, losses: int = 0) -> bool:
        """Changes the state, and adds to the losses; returns False if the worker was stopped meanwhile."""
        with self._state_lock:
            if self._state is WorkerState.STOPPED:
                return False
            if state not in _ALLOWED[self._state]:
                raise InvalidTransitionError(
                    f"{self.device} cannot go from {self._state.value} to {state.value}. This is a defect of "
                    "coordinator; please report it with this message."
                )
            # In this order: who sees that it is lost finds the loss counted.
            self._losses += losses
            self._state = state
            return True
