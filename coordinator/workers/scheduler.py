"""Schedules closures on the workers, and waits for them.

                 schedule                       take
    user's thread -------> ClosureQueue <--------------- Worker 0's thread --run--> Runtime --> task 0
                 <-------                 <------------- Worker 1's thread --run--> Runtime --> task 1
                   join     finish, fail, requeue

Guarantees: a scheduled closure runs at least once, or its future has an error. After `join` every future is done.
Workers may join and leave while closures run. `close` ends the threads, or logs which call cannot be cancelled.
"""

import contextlib
import functools
import itertools
import logging
import os
import threading
import types
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from coordinator.background_thread import refuse_forked
from coordinator.clock import SYSTEM_CLOCK, Clock
from coordinator.errors import ClosureInputError, StrategyClosedError
from coordinator.events.event_stream import log_event
from coordinator.events.trace import Listeners, Trace
from coordinator.future import Future
from coordinator.options import Options, check_integer
from coordinator.queueing.closure import Closure, ErrorScope, RunsClosure, RunsFuture, UncountedClosure
from coordinator.queueing.closure_queue import ClosureQueue
from coordinator.runtime import FiniteInput, FusionKey, Preparation, Runtime, Servers
from coordinator.workers.background_threads import QueueThread
from coordinator.workers.cluster import Cluster, WorkerState
from coordinator.workers.parameter_server_recovery import RecoveryLoop

_logger = logging.getLogger("coordinator")


# The wanted addresses of workers. The keys of a mapping are the workers' indices.
WorkerAddresses = Mapping[int, str] | Collection[str]


def change_between(
    present: Mapping[int, str], lost: Collection[int], wanted: WorkerAddresses
) -> tuple[dict[int, str], list[int], list[str]]:
    """Compares the present workers (addresses by index; `lost` of them are lost) with the wanted addresses.

    Without indices, a lost worker whose address is no longer wanted is assumed to have moved to a new address, if any.
    Returns the addresses of moved workers by index, the indices of workers to remove, and new workers' addresses.
    """
    if isinstance(wanted, Mapping):
        changed = {index: address for index, address in wanted.items() if present.get(index, address) != address}
        removed = [index for index in sorted(present) if index not in wanted]
        return changed, removed, [address for index, address in sorted(wanted.items()) if index not in present]
    added = [address for address in dict.fromkeys(wanted) if address not in present.values()]
    gone = [index for index, address in sorted(present.items()) if address not in wanted]
    lost_and_gone = [index for index in gone if index in lost]
    moved = dict(zip(lost_and_gone, added, strict=False))
    return moved, [index for index in gone if index not in moved], added[len(moved) :]


class MembershipWatch(QueueThread):
    """Asks for the workers' addresses repeatedly, and changes the workers while training runs.

    Addresses that cannot be read or applied change nothing, and are reported once. This thread calls `addresses`
    `interval` seconds after the last call returned. The call may block until the addresses change; `interrupt` ends it.
    """

    def __init__(
        self,
        cluster: Cluster,
        servers: Servers,
        addresses: Callable[[], WorkerAddresses],
        interval: float,
        interrupt: Callable[[], object] | None = None,
    ) -> None:
        super().__init__("coordinator-membership", self._follow, cluster.queue)
        self._cluster = cluster
        self._servers = servers
        self._addresses = addresses
        self._interval = interval
        self._interrupt = interrupt

    def stop(self) -> None:
        super().stop()
        if self._interrupt is not None:
            self._interrupt()

    def _follow(self) -> None:
        last_reason = ""
        while not self.stopping.wait(self._interval):
            try:
                self._apply(self._addresses())
                last_reason = ""
            except (Exception, SystemExit) as error:  # noqa: BLE001 - it comes from the user's own source of addresses
                reason = f"{type(error).__name__}: {error}"
                if reason != last_reason and not self.stopping.is_set():
                    last_reason = reason
                    _logger.warning(
                        "The workers stay as they are: the cluster's description cannot be read. %s", reason
                    )

    def _apply(self, wanted: WorkerAddresses) -> None:
        cluster = self._cluster
        lost = [worker.index for worker in cluster.workers if worker.state is WorkerState.LOST]
        moved, removed, added = change_between(self._servers.worker_addresses, lost, wanted)
        for index, address in moved.items():
            _logger.warning("Worker %d has moved to %s.", index, address)
            cluster.move_worker(index, address)
        indices = {address: index for index, address in wanted.items()} if isinstance(wanted, Mapping) else {}
        for address in added:
            index = cluster.add_worker(address, indices.get(address))
            _logger.warning("A worker at %s joined as worker %d.", address, index)
        for index in removed:
            _logger.warning("Worker %d is removed, since its address is not listed any more.", index)
            cluster.remove_worker(index)


class Scheduler:
    """Runs closures on the workers of one runtime.

    `concatenated` joins the results of consecutive `Runtime.run_steps`, which are lists by default. The limits of
    closures, workers and recoveries are by `clock`. Users have `cluster` as `strategy.cluster`. `queue.events` records
    events, which `listeners` pass to callbacks and traces.
    """

    def __init__(
        self,
        runtime: Runtime,
        servers: Servers,
        options: Options,
        concatenated: Callable[[Sequence[Any]], Any] = lambda results: [*itertools.chain.from_iterable(results)],
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.servers = servers
        self._options = options
        self._numbers = itertools.count()
        self.queue = queue = ClosureQueue(
            options.max_queued_closures,
            runtime.new_cancellation,
            self._report_stall,
            options.stall_report_interval,
            clock,
        )
        self._cancel = queue.cancel
        self._concatenated = concatenated
        self.recovery = RecoveryLoop(servers, queue, options)
        self.cluster = Cluster(runtime, servers, queue, self.recovery, options)
        self.listeners = Listeners(queue.events, options.close_timeout)
        if options.log_format == "json":
            self.listeners.on_event(log_event)
        self._closed = False
        self._process = os.getpid()
        # The reference is weak, because a bound method would keep the scheduler alive as long as the runtime.
        runtime.builds.schedule = functools.partial(_schedule_preparation, weakref.ref(self))
        try:
            self.recovery.start()
            self.cluster.start()
        except BaseException:
            # For example, no more threads can be started.
            self.close()
            raise

    @property
    def stops_on_error(self) -> bool:
        """Whether the error of a closure cancels all other closures."""
        return self._options.stop_on_error

    def schedule(  # noqa: PLR0913 - what is known of a closure, each a keyword
        self,
        work: Any,
        name: str,
        *,
        steps: int | None = None,
        worker: int | None = None,
        timeout: float | None = None,
        after: Sequence[Future] = (),
        origin: Any = None,
        fusion_key: FusionKey | None = None,
        inputs: tuple[FiniteInput, ...] = (),
        followers: Sequence[Callable[[Future], object]] = (),
    ) -> Future:
        """Queues `work`; see `ClosureQueue.put` for its errors.

        Args:
          work: what the runtime runs.
          name: the function's name, for messages.
          steps: how often the work runs, with one `RunsFuture`; None for once, with a `Future`.
          worker: the index of the only worker that may run the work; None for any worker.
          timeout: in seconds; a longer attempt is started on another worker too. None for `Options.closure_timeout`.
          after: the work runs when these futures have results, and fails if one of the futures fails.
          origin: an object that the future keeps, such as the traced function; opaque to the core.
          fusion_key: works with equal keys may share a call; None for work that runs alone.
          inputs: the work's inputs that may end; the work runs only on workers where no input has ended.
          followers: functions that are called with the future before the closure can run.

        Raises:
          ValueError: there is no such worker, or `steps` or `timeout` is not positive.
        """
        if timeout is not None and not timeout > 0:
            raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}.")
        if threading.current_thread() in self.cluster.threads or os.getpid() != self._process:
            self._refuse_caller("schedule")
        if worker is not None:
            self.cluster.refuse_unknown(worker)
        needed = tuple(dict.fromkeys(after)) if after else ()
        number = next(self._numbers)
        timeout = self._options.closure_timeout if timeout is None else timeout
        future: Future
        if steps is None:
            future = Future(name, number, origin=origin)
            closure = Closure(work, name, number, future, target=worker, timeout=timeout, blockers=len(needed))
            if worker is None and timeout is None:
                closure.fusion_key = fusion_key
            # A bound method takes half the memory of a `functools.partial`, and each waiting closure has one.
            future.on_cancel = types.MethodType(self._cancel, closure)
        else:
            check_integer("steps", steps, 1)
            future = runs = RunsFuture(name, number, steps, self._concatenated, origin)
            closure = RunsClosure(work, name, number, runs, target=worker, timeout=timeout, blockers=len(needed))
            closure.prepare(fusion_key)
            future.on_cancel = types.MethodType(self.queue.cancel_runs, runs)
        closure.inputs = inputs
        if followers or needed:
            self._put_among_others(closure, future, followers, needed)
        else:
            self.queue.put(closure, self._options.schedule_timeout)
        if worker is not None:
            self.queue.fail_orphaned(worker)
        return future

    def schedule_internal(self, worker: int, work: Any, name: str, *, is_counted: bool = True) -> Future:
        """Queues internal `work` for one worker, before all other closures. `join` and `done` ignore internal work.

        Uncounted work appears in no statistics, and is not retried.
        """
        number = next(self._numbers)
        future = Future(name, number)
        new_closure = Closure if is_counted else UncountedClosure
        closure = new_closure(work, name, number, future, target=worker, is_internal=True)
        future.on_cancel = types.MethodType(self._cancel, closure)
        self.queue.put(closure)
        self.queue.fail_orphaned(worker)
        return future

    def join(self, timeout: float | None = None) -> None:
        """Waits until every scheduled closure has finished; see `ClosureQueue.wait_settled` for its errors."""
        self._refuse_caller("join")
        if threading.current_thread() is self.recovery.thread:
            raise RuntimeError(
                "join was called in on_rollback, or in the function that restores a checkpoint, and would wait for "
                "itself: functions run again after it has returned."
            )
        self.queue.wait_settled(timeout)

    def wait_for_room(self, unless: Callable[[], bool]) -> None:
        """Waits until `schedule` would not wait, or until `unless()`; see `ClosureQueue.wait_for_room`."""
        self.queue.wait_for_room(self._options.schedule_timeout, unless)

    def done(self) -> bool:
        """Returns whether no scheduled closure is pending. Raises the error of an earlier closure, once."""
        self._refuse_caller("done")
        return self.queue.is_settled()

    def settled(self, timeout: float | None = None) -> None:
        """Waits until all that follows from ended closures is done; see `ParameterServerStrategy.settled`."""
        self._refuse_caller("settled")
        self.queue.wait_consequences(timeout)

    def quiet(self, timeout: float | None = None, *, verb: str = "quiet") -> contextlib.AbstractContextManager[None]:
        """Returns a scope in which no scheduled closure runs; see `ClosureQueue.quiet`. `verb` is the user's method."""
        self._refuse_caller(verb)
        self.queue.refuse_stopped("A quiet period cannot begin")
        return self.queue.quiet(timeout)

    def cancel_all(self) -> None:
        """Cancels every scheduled closure and waits until none runs; see `ParameterServerStrategy.cancel_all`."""
        self._refuse_caller("cancel_all")
        self.queue.refuse_stopped("Nothing is left to cancel")
        for attempt in self.queue.cancel_all(self._options.close_timeout):
            _logger.warning(
                "The call of %s on worker %d was cancelled, but does not end; its worker runs nothing else meanwhile.",
                attempt.closure,
                attempt.worker,
            )

    def follow(
        self, addresses: Callable[[], WorkerAddresses], interval: float, interrupt: Callable[[], object] | None = None
    ) -> None:
        """Adds, removes and moves workers as their addresses change; see `MembershipWatch`."""
        self.cluster.add_watch(MembershipWatch(self.cluster, self.servers, addresses, interval, interrupt))

    def trace(self, path: str | os.PathLike[str], busy: Callable[[], Mapping[str, float]] = dict) -> Trace:
        """Begins a trace with a track for each server; see `ParameterServerStrategy.trace`, and `Trace` for `busy`."""

        def sample() -> tuple[int, int]:
            statistics = self.queue.statistics()
            return statistics.waiting, statistics.running

        tasks = [("ps", index) for index in range(len(self.servers.parameter_server_devices))]
        tasks += [("worker", worker.index) for worker in self.cluster.workers]
        return self.listeners.trace(path, ["client", *(f"{job} {index}" for job, index in tasks)], sample, busy)

    def close(self) -> None:
        """Cancels all closures, ends the threads and disconnects from the servers. A second call does nothing."""
        if self._closed:
            return
        self._closed = True
        self.cluster.stop()
        self.servers.close()
        self.listeners.close()

    def __repr__(self) -> str:
        return f"<Scheduler: {self.cluster.statistics()}>"

    def _refuse_caller(self, verb: str) -> None:
        refuse_forked(self._process, "The strategy")
        self.cluster.refuse_worker_thread(verb)

    def _put_among_others(
        self,
        closure: Closure,
        future: Future,
        followers: Sequence[Callable[[Future], object]],
        needed: Sequence[Future],
    ) -> None:
        try:
            for follow in followers:
                follow(future)
            self.queue.put(closure, self._options.schedule_timeout)
            for other in needed:
                other.add_done_callback(lambda done: self._unblock(closure, done))
        except BaseException:
            # After Ctrl-C, the followers would wait without end, or the closure would wait for a result that exists.
            future.cancel()
            raise

    def _unblock(self, closure: Closure, done: Any) -> None:
        failed = done.cancelled() or done.exception() is not None
        if not failed:
            self.queue.unblock(closure)
            if closure.target is not None:
                self.queue.fail_orphaned(closure.target)
            return
        error = ClosureInputError(f"{closure} was not run, because its argument has no value: {done!r}.")
        error.__cause__ = None if done.cancelled() else done.exception()
        self.queue.fail_waiting(closure, error, ErrorScope.FUTURE)

    def _report_stall(self, text: str) -> None:
        lost = [
            f"{worker.device} (for {worker.away_seconds:.0f} s: {worker.loss})"
            for worker in self.cluster.workers
            if worker.away_seconds
        ]
        causes = f" Lost: {', '.join(lost)}." if lost else ""
        if separation := self.cluster.links.separation:
            causes += f" {separation}."
        _logger.warning("%s%s Cluster: %s", text, causes, self.cluster.statistics())


def _schedule_preparation(scheduler: "weakref.ref[Scheduler]", preparation: Preparation) -> Future | None:
    present = scheduler()
    if present is None or present.queue.is_stopped:
        return None
    with contextlib.suppress(StrategyClosedError):
        return present.schedule_internal(preparation.worker, preparation.work, preparation.name, is_counted=False)
    return None
