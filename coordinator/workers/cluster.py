"""The workers of one strategy, which come and go while training runs (`strategy.cluster`).

A worker is a task of the cluster and a thread of the client, which passes closures from the queue to the runtime.

    LIVE --its task is lost--> LOST --reconnected--> LIVE
      \\______________ stop ______/________> STOPPED

A frozen worker is lost like a dead worker, because the heartbeat makes calls to a silent server fail.

Guarantees:
- A closure that was running when its worker was lost is requeued before anything else happens.
- The loss of an idle worker is noticed within `Options.heartbeat_interval`, because `IdleWatch` wakes its thread.
- A worker that answers is reconnected if several of its calls in a row have transient failures.
- Only a lost worker's own thread waits for its return.
- A worker's thread ends after `stop`, when its running call returns.
"""

import dataclasses
import enum
import functools
import inspect
import itertools
import logging
import math
import threading
import time
import weakref
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

from coordinator.background_thread import BackgroundThread
from coordinator.errors import InvalidTransitionError, StrategyClosedError, WorkerLost
from coordinator.future import Future
from coordinator.options import Options, check_integer
from coordinator.queueing.closure import Attempt, ErrorScope
from coordinator.queueing.closure_queue import ClosureQueue, Outside
from coordinator.queueing.waits import uninterrupted
from coordinator.runtime import Failure, FailureKind, Runtime, Servers
from coordinator.statistics import ClusterStatistics, WorkerStatistics
from coordinator.workers.background_threads import BuildThread, IdleWatch, LinkWatch, QueueThread, StragglerWatch
from coordinator.workers.fusion_size import FusionSizeModel
from coordinator.workers.parameter_server_recovery import RecoveryLoop
from coordinator.workers.retry_rule import error_scope, final_error, is_of_servers, may_retry, summary

_logger = logging.getLogger("coordinator")

# A connection may be broken although its server answers. A server that closed an earlier connection late was seen to
# drop parts of the present connection too, so that results no longer reached the client.
_TRANSIENT_FAILURES_UNTIL_RECONNECT = 5


# With more closures than this in a call, the client is the bottleneck. Runs of one closure have no such limit.
_MAX_CLOSURES = 64


class WorkerState(enum.Enum):
    """Whether a worker may receive closures."""

    LIVE = "live"
    LOST = "lost"
    STOPPED = "stopped"


_ALLOWED = {
    WorkerState.LIVE: {WorkerState.LOST, WorkerState.STOPPED},
    WorkerState.LOST: {WorkerState.LIVE, WorkerState.STOPPED},
    WorkerState.STOPPED: {WorkerState.STOPPED},
}


class FusedDispatch:
    """Decides which closures a worker runs in one call: the taken one, and closures with an equal key right behind it.

    waiting   a1 a2 a3 a4 b1 a5 ...      a: closures with equal fusion keys; two workers are live
    worker 0  [a1 a2]                    its fair share, if the size model says that fusing pays
    worker 1  [a3 a4]

    A closure with many runs is split in the same way: the worker takes as many runs as pay off in a call, and the rest
    wait. Only the worker's thread uses this object.

    Guarantees:
    - A call never waits for closures that are not queued yet.
    - No worker takes more than a fair share of the waiting closures, so workers stay balanced.
    - A closure that was tried before runs alone, which shows which closure of a call kills its worker or raises an
      error. A function that failed in a call of several steps runs alone afterwards: the whole call had to run again.
    - Without `Options.steps_per_dispatch`, calls are fused only when measurements show a gain, and only in sizes that
      are built. Other sizes are built in the background, so that no worker's thread holds closures during a build.
      With the option, up to that many steps are always fused, and a size is built when it is needed.
    """

    def __init__(self, worker: int, runtime: Runtime, queue: ClosureQueue, options: Options) -> None:
        self._worker = worker
        self._task = f"worker {worker}"
        self._runtime = runtime
        self._queue = queue
        self._limit = options.steps_per_dispatch
        # The loss of a fused call counts as a failed attempt of each of its closures. This attempt must not be the last
        # of a closure, so calls are fused only if the options allow a second attempt.
        self._is_allowed = self._limit != 1 and options.max_attempts > 1 and options.transient_retries > 0
        self._model = FusionSizeModel(self._limit)
        # The function of the latest call, if its duration is recorded.
        self._function: Hashable | None = None
        # Size of the last gathered call, in closures or in runs of one closure.
        self._count = 1

    def reset(self) -> None:
        """Notes that the worker is a new process, in which no function has run."""
        self._model.restart()

    def gather(self, attempt: Attempt) -> list[Attempt]:
        """Returns the attempts to run in one call, `attempt` first."""
        self._count = 1
        closure = attempt.closure
        key = closure.fusion_key if self._is_allowed else None
        self._function = None if key is None else key.function
        if closure.whole is not None:
            self._gather_runs(attempt)
            return [attempt]
        if key is None:
            return [attempt]
        share = self._queue.share_with(closure)
        if share < 2:
            return [attempt]
        most = min(self._runtime.most_fused(self._worker, attempt.work), self._limit or _MAX_CLOSURES)
        if most < 2:
            self._function = None
            return [attempt]
        share = min(share, most)
        function, ready = self._function, self._ready(attempt)
        limit = self._model.steps(function, share, ready)
        wanted = self._model.wanted(function, share)
        if ready is not None and wanted > limit:
            like = self._queue.work_like(closure)
            if like is not None:
                self._runtime.prepare(self._worker, attempt.work, like, wanted)
        if limit == 1:
            return [attempt]
        # The queue calls the model with its lock held.
        attempts = self._queue.take_batch(
            attempt, limit, lambda available: self._model.steps(function, available, ready)
        )
        self._count = len(attempts)
        return attempts

    def _gather_runs(self, attempt: Attempt) -> None:
        """Decides how many runs of a closure of many runs the call makes; leaves the other runs to all workers."""
        function = self._function
        most = 1 if function is None else self._runtime.most_fused(self._worker, attempt.work)
        if most < 2:
            self._function = None
            self._count = self._queue.begin_runs(attempt, lambda _: 1)
            return
        ready = self._ready(attempt)

        def possible(available: int) -> int:
            share = available if attempt.closure.target is not None else self._queue.share(available)
            return min(share + self._model.beyond_share(function), available, most)

        wanted = self._model.wanted(function, possible(self._queue.available_runs(attempt)))
        if ready is not None and wanted > 1 and wanted not in ready:
            self._runtime.prepare(self._worker, attempt.work, attempt.work, wanted)
        self._count = self._queue.begin_runs(
            attempt, lambda available: self._model.steps(function, possible(available), ready)
        )

    def _ready(self, attempt: Attempt) -> Mapping[int, float] | None:
        """Returns the built sizes; None for any size, because a size that the user sets is built when it is needed."""
        if self._limit is not None:
            return None
        ready = self._runtime.ready(self._worker, attempt.work)
        if ready is not None:
            self._model.note_ready(self._function, ready)
        return ready

    def run(self, attempts: Sequence[Attempt]) -> Sequence[Any]:
        """Runs the attempts that were gathered last; returns their results. Raises the errors of the runtime."""
        first, count = attempts[0], self._count
        closure, work = first.closure, first.work
        waited = first.started - closure.waiting_since
        self._queue.events.record("closures_started", self._task, closure.name, count, waited)
        start = time.monotonic()
        results: Sequence[Any]
        if closure.whole is not None:
            results = (self._runtime.run_steps(self._worker, work, count, first.cancellation),)
        elif count == 1:
            results = (self._runtime.run(self._worker, work, first.cancellation),)
        else:
            works = [attempt.work for attempt in attempts]
            results = self._runtime.run_fused(self._worker, works, first.call_cancellation)
        if self._function is not None:
            self._model.record(self._function, count, time.monotonic() - start)
        return results

    def record_failure(self, kind: FailureKind) -> None:
        """Records that the latest call, which had several closures or runs, failed."""
        if self._function is not None and kind in (FailureKind.USER, FailureKind.INPUT, FailureKind.END_OF_DATA):
            self._model.record_error(self._function)


class Worker(QueueThread):
    """A task that runs closures one call at a time, and the client's thread for the task. Only the library creates it.

    Attributes:
      index: the worker's task index.
      device: the worker's name, such as `/job:worker/replica:0/task:0`.
      loss: the cause of the worker's last loss; "" if the worker was never lost.
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
        self._outside = Outside(queue, index)
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
        """Whether the worker may receive closures."""
        return self._state

    @property
    def away_seconds(self) -> float:
        """How long the worker has been lost, in seconds; 0 if it is not lost."""
        return self._queue.clock.now() - self._lost_at if self._state is WorkerState.LOST else 0.0

    def healthy(self) -> bool:
        """Returns whether the worker may have closures and answers a probe. Takes at most `Options.probe_timeout`."""
        return self._state is WorkerState.LIVE and self._servers.is_reachable(self.index)

    def schedule(self, fn: Any, args: Any = None, kwargs: Any = None, **limits: Any) -> Future:
        """Queues one call of `fn` for this worker only, like `strategy.schedule(..., worker=worker.index)`."""
        return self._cluster.schedule(fn, args, kwargs, worker=self.index, **limits)

    def stop(self) -> None:
        """Asks the thread to end. The queue must be stopped too."""
        self._change(WorkerState.STOPPED)
        super().stop()

    def statistics(self) -> WorkerStatistics:
        """Returns a snapshot of the worker's counts."""
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
        self._queue.begin_consequences(index)
        self._runtime.bind_thread(index)
        if self._state is WorkerState.LOST:
            # An unexpected error has ended the wait for the worker's return.
            self._wait_returned(self._lost_at)
        elif not servers.is_reachable(index):
            self._wait_reconnected(is_new=True)
        links, heartbeat_interval = self._cluster.links, self._options.heartbeat_interval
        while not self.stopping.is_set():
            if links.separation:
                self._wait_linked()
            # After its report that it is idle, the worker sleeps until there is a closure or its server seems lost.
            attempt = self._queue.take(index, heartbeat_interval if self._queue.is_active(index) else None)
            if attempt is not None:
                self._run_attempt(attempt)
            elif not (self.stopping.is_set() or servers.seems_reachable(index) or servers.is_reachable(index)):
                self._reconnect_lost()
            else:
                self._report_idle()
                if self._queue.is_stopped:
                    break
            # Frees the closure's arguments, which may hold iterators, during the wait for the next closure.
            del attempt
        if not self._queue.is_stopped:
            # The worker was removed.
            self._report_idle()
            self._queue.fail_orphaned(self.index)
        self._queue.end_consequences(index)

    def _record_failure(self, error: BaseException) -> None:
        """Records an unexpected error of the thread, whose closures run again as after a transient failure."""
        try:
            super()._record_failure(error)
            for attempt in self._queue.attempts(self.index):
                self._settle_failed_attempt(attempt, Failure(FailureKind.TRANSIENT, error), may_recover=False)
            self._report_idle()
        finally:
            self._queue.end_consequences(self.index)

    def _report_idle(self) -> None:
        if self._queue.is_active(self.index):
            self._cluster.became_idle(self.index)
            self._queue.report_idle(self.index)

    def _run_attempt(self, attempt: Attempt) -> None:
        if attempt.closure.timeout is not None:
            self._cluster.stragglers.track(attempt)
        if attempt.number > 1 and not self._servers.is_reachable(self.index):
            # Without this check, workers that die at the same time would each count as a failure of the same closure.
            self._queue.requeue(attempt, FailureKind.WORKER_LOST.value)
            self._reconnect_lost()
            return
        attempts = self._dispatch.gather(attempt)
        try:
            with self._outside:
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
            # The cause of the refusal needs time to go away; immediate retries would all fail.
            self._pause()
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
        """Gives a transient failure the kind LINK_LOST if a link is broken; gives up a worker if its own link is."""
        why = self._cluster.links.find_broken([self.index]).get(self.index)
        if why is not None:
            self._servers.give_up(self.index, why)
        is_link = why is not None or self._cluster.links.separation
        return dataclasses.replace(failure, kind=FailureKind.LINK_LOST) if is_link else failure

    def _wait_linked(self) -> None:
        while self._cluster.links.separation and not self.stopping.is_set():
            self._report_idle()
            self._pause()

    def _pause(self) -> None:
        with self._outside:
            self.stopping.wait(self._options.reconnect_interval)

    def _settle_failed_attempt(self, attempt: Attempt, failure: Failure, may_recover: bool) -> None:
        if failure.kind is FailureKind.END_OF_DATA:
            # The closure has not failed: it runs on a worker with data left.
            _logger.info("%s found no data left on %s.", attempt.closure, self.device)
            # The traceback's frames would keep the data alive until a garbage collection.
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
                self._queue.events.record("function_quarantined", self._task, closure.name, detail=closure.history())
            scope = error_scope(failure.kind, self._options)
            self._queue.fail(attempt, final_error(failure, attempt, self.device), scope)

    def _settle_failed_call(self, attempts: Sequence[Attempt], failure: Failure, may_recover: bool) -> None:
        """Requeues the closures of a failed call, to run each one alone, because it is unknown which one failed.

        If no further attempt can avoid the error, the first closure reports the error, which cancels the rest.
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

    def _wait_reconnected(self, reason: str | None = None, *, is_new: bool = False) -> None:
        """Waits until the worker is connected or stopped. Without `reason`, the servers describe the loss."""
        lost_at = self._lost_at = self._queue.clock.now()
        # `set_away` comes first: code that sees the worker as lost must find that it has no share of the closures.
        self._queue.set_away(self.index, is_away=True)
        if not self._change(WorkerState.LOST, losses=not is_new):
            return
        if not is_new:
            self._report_loss(reason or self._servers.describe_loss(self.index))
        self._servers.disconnect(self.index)
        self._report_idle()
        self._wait_returned(lost_at, is_new=is_new)

    def _wait_returned(self, lost_at: float, *, is_new: bool = False) -> None:
        reported_at = -math.inf if is_new else lost_at
        text = ("%s is not connected after" if is_new else "%s has been lost for") + " %.0f s; still trying. (%s)"
        while not self.stopping.is_set() and not self._reconnect():
            now = self._queue.clock.now()
            # Preparations that wait for this worker would block the preparations of other workers.
            for closure in self._queue.waiting_for(self.index):
                if not closure.runs:
                    self._queue.cancel(closure)
            self._fail_waiting_closures(now - lost_at)
            if now - reported_at >= self._options.stall_report_interval:
                reported_at = now
                _logger.warning(text, self.device, now - lost_at, self._servers.describe_loss(self.index))
            self._pause()
        if self.stopping.is_set():
            return
        text = "%s connected after %.1f s." if is_new else "%s reconnected after %.1f s."
        _logger.warning(text, self.device, self._queue.clock.now() - lost_at)
        self._queue.set_away(self.index, is_away=False)
        self._change(WorkerState.LIVE)

    def _report_loss(self, cause: str) -> None:
        self.loss = cause
        self._queue.events.record("worker_lost", self._task, detail=cause)
        text = "%s was lost; its work goes to other workers until it returns. (%s)"
        if not self._queue.live_workers:
            text = "%s was lost; no worker is left, and functions wait until one returns. Start one again. (%s)"
        _logger.warning(text, self.device, cause)

    def _fail_waiting_closures(self, lost_for: float) -> None:
        """Fails the closures that only this worker can run and that have waited too long for the worker."""
        limit = self._options.affinity_timeout
        if lost_for < limit:
            return
        for closure in self._queue.waiting_for(self.index):
            if self._queue.clock.now() - closure.waiting_since >= limit:
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
        start = self._queue.clock.now()
        with self._outside:
            connected = self._servers.reconnect(self.index)
        if connected:
            self._queue.renew_inputs(self.index)
            self._reconnections += 1
            now = self._queue.clock.now()
            self._queue.events.record("worker_returned", self._task, seconds=now - self._lost_at)
            self._reconnecting_seconds += now - start
        return connected

    def _change(self, state: WorkerState, losses: int = 0) -> bool:
        with self._state_lock:
            if self._state is WorkerState.STOPPED:
                return False
            if state not in _ALLOWED[self._state]:
                raise InvalidTransitionError(
                    f"{self.device} cannot go from {self._state.value} to {state.value}. This is a defect of "
                    "coordinator; please report it with this message."
                )
            # The count is changed first, so that code that sees the loss finds it counted.
            self._losses += losses
            self._state = state
            return True


class Cluster:
    """The servers of a strategy and their statistics. Workers can be added, moved and removed while training runs.

    Users call `workers`, `statistics`, `schedule`, `add_worker`, `move_worker`, `remove_worker` and
    `move_parameter_server`. The other methods, and the constructor, are for the library.

    Attributes:
      threads: the workers' threads and the thread in `stop`, which must not wait for closures.
      links: finds broken links between servers.
      stragglers: watches attempts of closures that have a timeout.
      queue: the queue of closures.
    """

    def __init__(
        self, runtime: Runtime, servers: Servers, queue: ClosureQueue, recovery: RecoveryLoop, options: Options
    ) -> None:
        self._runtime = runtime
        self._servers = servers
        self.queue = queue
        self._recovery = recovery
        self._options = options
        self.links = links = LinkWatch(servers, queue, options)
        self.stragglers = StragglerWatch(queue)
        self._watches: list[BackgroundThread] = [
            self.stragglers,
            IdleWatch(servers, queue, options.heartbeat_interval),
            links,
            BuildThread(runtime.builds, queue),
        ]
        # Held while workers are added, moved and removed. Never taken while the queue's lock is held.
        self._lock = threading.Lock()
        # Functions that return a callback, or None if the callback's object was freed.
        self._idle_callbacks: list[Callable[[], Any]] = []
        self._leaving: set[int] = set()
        self._schedule: Callable[[], Callable[..., Future] | None] = lambda: None
        self._set_workers({index: self._new_worker(index) for index in servers.worker_addresses})
        for index, address in servers.worker_addresses.items():
            queue.admit(index)
            queue.events.record("worker_joined", f"worker {index}", detail=address)

    @property
    def workers(self) -> Sequence[Worker]:
        """The present workers, in index order."""
        return tuple(worker for _, worker in sorted(self._workers.items()))

    def statistics(self) -> ClusterStatistics:
        """Returns a snapshot of the counts, with the statistics of each server."""
        workers = tuple(worker.statistics() for worker in self.workers)
        servers = self._recovery.statistics()
        return dataclasses.replace(self.queue.statistics(), workers=workers, parameter_servers=servers)

    def schedule(self, fn: Any, args: Any = None, kwargs: Any = None, **limits: Any) -> Future:
        """Queues one call of `fn`; for arguments and errors see `strategy.schedule`."""
        schedule = self._schedule()
        if schedule is None:
            raise StrategyClosedError("The strategy of this cluster does not exist any more. Create a new one.")
        return schedule(fn, args, kwargs, **limits)

    def add_worker(self, address: str, index: int | None = None) -> int:
        """Adds a worker, which receives closures as soon as it answers.

        The worker creates its own iterators, tables and per-worker variables on first use. A dataset function has
        another `InputContext` there: pipeline 2 of 3 for a worker that is added to two. The other workers keep their
        contexts if `Options.reshard_inputs` does not divide the data again among all workers.

        Args:
          address: `host:port` of a standard TensorFlow server that was started as a worker.
          index: the worker's index; None for the lowest free index.

        Returns:
          The worker's index.

        Raises:
          ValueError: `address` is not an address or belongs to a task of the cluster, or a worker has the index.
          StrategyClosedError: the strategy is closed.
        """
        with self._lock:
            self.queue.refuse_stopped("A worker cannot be added")
            taken = {*self._workers, *self._leaving}
            index = next(i for i in itertools.count() if i not in taken) if index is None else index
            check_integer("index", index, 0)
            if index in taken:
                raise ValueError(f"There is a worker {index} already; there are {sorted(taken)}.")
            self._servers.add_worker(index, address)
            self.queue.admit(index)
            self.queue.events.record("worker_joined", f"worker {index}", detail=address)
            worker = self._new_worker(index)
            self._set_workers({**self._workers, index: worker})
            worker.start()
            return index

    def remove_worker(self, index: int, timeout: float | None = None) -> None:
        """Removes a worker when its running call has ended. After `timeout`, cancels the call and requeues its closure.

        Closures that only this worker may run fail with `WorkerLost`.

        Args:
          index: the worker's index.
          timeout: in seconds; None for `Options.close_timeout`.

        Raises:
          ValueError: there is no such worker.
        """
        self.refuse_worker_thread("remove_worker")
        worker = self._withdraw(index)
        try:
            if not worker.wait_stopped(self._options.close_timeout if timeout is None else timeout):
                self.queue.cancel_attempts(index)
                if not worker.wait_stopped(self._options.close_timeout):
                    _logger.warning("%s runs a call that cannot be cancelled; its thread is left behind.", worker)
        finally:
            # Ctrl-C ends the wait, but the removal is completed, because a worker cannot be removed a second time.
            try:
                self._servers.remove_worker(index)
            finally:
                with self._lock:
                    self._leaving.discard(index)
                self.queue.events.record("worker_left", f"worker {index}")
                self.queue.fail_orphaned(index)

    def move_worker(self, index: int, address: str) -> None:
        """Changes the address of a worker, whose running closure is requeued.

        Args:
          index: the worker's index.
          address: `host:port` of the server.

        Raises:
          ValueError: there is no such worker, `address` is not an address, or another task has it.
        """
        with self._lock:
            self.refuse_unknown(index, " to move")
            self._servers.move_worker(index, address)

    def move_parameter_server(self, index: int, address: str) -> None:
        """Changes the address of a parameter server, for example because its host will not come back.

        The server counts as lost: no closure runs until the server answers at the new address and all variables are
        restored as `restore_from` says. If the former server still runs, save a checkpoint first.

        Args:
          index: the parameter server's index.
          address: `host:port` of the standard TensorFlow server that replaces the former server.

        Raises:
          ValueError: there is no such parameter server, `address` is not an address, or another task has it.
          RuntimeError: `strategy.restore_from` was not called, so the server's variables could not be restored.
        """
        count = len(self._servers.parameter_server_devices)
        if index not in range(count):
            raise ValueError(f"There is no parameter server {index!r} to move; there are {list(range(count))}.")
        if not self._recovery.can_recover:
            raise RuntimeError("A parameter server cannot be moved before strategy.restore_from has been called.")
        self._servers.move_parameter_server(index, address)
        self._recovery.begin_if_lost()

    def __repr__(self) -> str:
        return f"<Cluster: {self.statistics()}>"

    # The following methods are for the library.

    def start(self) -> None:
        """Starts the threads."""
        for part in (*self._watches, *self._workers.values()):
            part.start()

    def schedule_with(self, schedule: Callable[..., Future]) -> None:
        """Sets the strategy's method that traces and queues functions, by a weak reference."""
        self._schedule = weakref.WeakMethod(schedule)

    def add_watch(self, watch: BackgroundThread) -> None:
        """Starts a thread that changes the workers. `stop` stops this thread before all other threads."""
        self._watches.insert(0, watch)
        watch.start()

    def stop(self) -> None:
        """Cancels all closures, and ends all threads; part of `strategy.close()`."""
        # The queue is stopped first, because a lost worker that stops waiting for its task must find no closure.
        with self._lock:
            self.threads |= {threading.current_thread()}
        self.queue.stop()
        with self._lock:
            self._set_workers(self._workers)
            parts = (*self._watches, self._recovery, *self._workers.values())
        for part in parts:
            part.stop()
        deadline = time.monotonic() + self._options.close_timeout
        for part in parts:
            remaining = max(0.0, deadline - time.monotonic())
            if part.thread is not threading.current_thread() and not part.wait_stopped(remaining):
                _logger.warning("%s still runs a call that cannot be cancelled; its thread is left behind.", part)

    def add_idle_callback(self, callback: Callable[[int], object]) -> None:
        """Calls `callback` with a worker's index whenever a worker that has had a closure becomes idle.

        A worker becomes idle when no closure waits for it, its closure failed, it was lost, or a quiet period begins.
        The callback runs on the worker's thread, which takes no closure until the callback returns. A method is
        referenced weakly, and no longer called when its object was freed.
        """
        is_method = inspect.ismethod(callback)
        self._idle_callbacks.append(
            weakref.WeakMethod(callback, self._idle_callbacks.remove) if is_method else lambda: callback
        )

    def refuse_unknown(self, index: int, purpose: str = "") -> None:
        """Raises ValueError if there is no worker of this index."""
        if index not in self._workers:
            raise ValueError(f"There is no worker {index!r}{purpose}; there are {sorted(self._workers)}.")

    def refuse_worker_thread(self, verb: str) -> None:
        """Raises RuntimeError on a worker's thread, where the method `verb` would wait for itself."""
        if threading.current_thread() in self.threads:
            raise RuntimeError(
                f"{verb} was called on a worker's thread, or on the one in close, for instance in a callback of a "
                "future, and would wait for itself. Set an event in the callback, and call it on another thread."
            )

    def became_idle(self, worker: int) -> None:
        """Calls the idle callbacks, on the worker's thread. An unreachable server is no error of a callback."""
        for reference in tuple(self._idle_callbacks):
            try:
                if (callback := reference()) is not None:
                    callback(worker)
            except Exception as error:
                failure = self._runtime.classify(None, error)
                if is_of_servers(failure):
                    _logger.debug("Worker %d is idle, and %s.", worker, summary(failure), exc_info=error)
                else:
                    _logger.exception("A callback for idle workers raised an error for worker %d.", worker)

    @uninterrupted
    def _withdraw(self, index: int) -> Worker:
        """Takes a worker out of the cluster. The worker stops after its running call, and closures only for it fail."""
        with self._lock:
            self.refuse_unknown(index, " to remove")
            worker = self._workers[index]
            self._set_workers({other: kept for other, kept in self._workers.items() if other != index})
            self._leaving.add(index)
            is_last = not self._workers
        self.queue.dismiss(index)
        worker.stop()
        if is_last:
            _logger.warning("%s is removed; no worker is left, and functions wait until one is added.", worker.device)
        self.queue.fail_orphaned(index)
        return worker

    def _new_worker(self, index: int) -> Worker:
        return Worker(index, self._runtime, self._servers, self.queue, self._recovery, self._options, self)

    def _set_workers(self, workers: dict[int, Worker]) -> None:
        # `_workers` and `threads` are replaced as a whole, so both may be read without a lock.
        self._workers = workers
        self._runtime.builds.workers = len(workers)
        self.threads = frozenset(worker.thread for worker in workers.values())
