"""The workers, the queue before them, and what they have done.

                 schedule                       take
    user's thread -------> ClosureQueue <--------------- Worker 0's thread --run--> Runtime --> task 0
                 <-------                 <------------- Worker 1's thread --run--> Runtime --> task 1
                   join      finish, fail, hand back

Promises: what `schedule` accepts is run at least once or its future says why not; after `join` every future is done;
workers may come and go meanwhile; `close` leaves no thread behind.
"""

import dataclasses
import inspect
import itertools
import logging
import threading
import time
import types
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

from coordinator.closure_queue import ClosureQueue
from coordinator.errors import ClosureInputError, WorkerLost
from coordinator.future import Future
from coordinator.idle_watch import IdleWatch
from coordinator.membership_watch import MembershipWatch, change_between
from coordinator.options import Options
from coordinator.queueing.closure import Closure
from coordinator.runtime import Runtime
from coordinator.statistics import ClusterStatistics
from coordinator.straggler_watch import StragglerWatch
from coordinator.workers.recovery_loop import Recovery
from coordinator.workers.retry_rule import Reach
from coordinator.workers.worker import Worker, WorkerState

_logger = logging.getLogger("coordinator")


class Cluster:
    """Runs closures on the workers of one runtime.

    Made by `ParameterServerStrategy`; users reach it as `strategy.cluster` to look at the workers and the counts, and
    to add and remove workers.
    """

    def __init__(self, runtime: Runtime, options: Options) -> None:
        self._runtime = runtime
        self._options = options
        self._numbers = itertools.count()
        self._queue = ClosureQueue(
            options.max_queued_closures, runtime.new_cancellation, self._report_stall, options.stall_report_interval
        )
        self._discard = self._queue.discard
        self.recovery = Recovery(runtime, self._queue, options)
        self._stragglers = StragglerWatch(self._queue)
        self._idle = IdleWatch(runtime, self._queue, options.heartbeat_interval)
        self._membership: MembershipWatch | None = None
        # Held while workers are added, moved and struck off, and never together with the queue's.
        self._membership_lock = threading.Lock()
        # Each gives a callback, or None when that is gone.
        self._on_rest: list[Any] = []
        # The indices of those that are being removed.
        self._leaving: set[int] = set()
        self._employ({index: self._new_worker(index) for index in runtime.worker_addresses})
        self._closed = False
        self._closing_thread: threading.Thread | None = None
        self.recovery.start()
        self._stragglers.start()
        self._idle.start()
        for worker in self._workers.values():
            worker.start()

    @property
    def workers(self) -> Sequence[Worker]:
        """The workers that there are now, in the order of their indices."""
        return tuple(worker for _, worker in sorted(self._workers.items()))

    def schedule(
        self,
        work: Any,
        name: str,
        *,
        worker: int | None = None,
        timeout: float | None = None,
        after: Sequence[Future] = (),
        origin: Any = None,
    ) -> Future:
        """Queues `work`; see `ClosureQueue.put` for what it raises.

        Args:
          work: what the runtime runs.
          name: of the function, for people.
          worker: the index of the only worker that may run it; None for any.
          timeout: in seconds; an attempt that takes longer is made on another worker too. None: as the options say.
          after: it is run when these have their results, and fails if one of them has none.
          origin: kept on the future.

        Raises:
          ValueError: there is no such worker, or a future is of another strategy.
        """
        self._refuse_worker_thread("schedule")
        if worker is not None:
            self._refuse_unknown(worker)
        needed = tuple(dict.fromkeys(after)) if after else ()
        closure = self._new_closure(
            work,
            name,
            origin,
            target=worker,
            timeout=self._options.closure_timeout if timeout is None else timeout,
            blockers=len(needed),
        )
        self._queue.put(closure, self._options.schedule_timeout)
        for future in needed:
            future.add_done_callback(lambda done: self._unblock(closure, done))
        self._fail_if_forsaken(closure)
        if closure.timeout is not None:
            self._stragglers.heed(closure.timeout)
        return closure.future

    def schedule_on(self, worker: int, work: Any, name: str) -> Future:
        """Queues `work` of the library's own for one worker, before all else; neither `join` nor `done` heeds it."""
        closure = self._new_closure(work, name, target=worker, is_internal=True)
        self._queue.put_internal(closure)
        self._fail_if_forsaken(closure)
        return closure.future

    def join(self, timeout: float | None = None) -> None:
        """Waits until every scheduled closure has finished; see `ClosureQueue.wait_settled` for what it raises."""
        self._refuse_worker_thread("join")
        self._queue.wait_settled(timeout)

    def done(self) -> bool:
        """Whether no scheduled closure is pending. Raises the error of an earlier closure, once."""
        self._refuse_worker_thread("done")
        return self._queue.is_settled()

    def add_worker(self, address: str) -> int:
        """Takes in one more worker, while training runs. It gets work as soon as it answers.

        It makes its own iterators, tables and per-worker variables when it first needs them.

        Args:
          address: `host:port` of a standard TensorFlow server that was started as a worker.

        Returns:
          Its index: the lowest that no worker has.

        Raises:
          ValueError: that is no address, or a task of the cluster has it already.
          StrategyClosedError: the strategy is closed.
        """
        with self._membership_lock:
            self._queue.refuse_stopped("A worker cannot be added")
            index = next(index for index in itertools.count() if index not in {*self._workers, *self._leaving})
            self._runtime.add_worker(index, address)
            self._queue.admit_worker(index)
            worker = self._new_worker(index)
            self._employ({**self._workers, index: worker})
            worker.start()
            return index

    def remove_worker(self, index: int, timeout: float | None = None) -> None:
        """Lets a worker go, while training runs.

        It finishes what it runs, or hands it back if that takes longer than `timeout`. Functions that only it may run
        fail with `WorkerLost`.

        Args:
          index: its index.
          timeout: in seconds; None stands for `Options.close_timeout`.

        Raises:
          ValueError: there is no such worker.
        """
        self._refuse_worker_thread("remove_worker")
        with self._membership_lock:
            self._refuse_unknown(index, " to remove")
            worker = self._workers[index]
            self._employ({other: kept for other, kept in self._workers.items() if other != index})
            self._leaving.add(index)
        try:
            self._queue.dismiss(index)
            worker.stop()
            if not worker.wait_stopped(self._options.close_timeout if timeout is None else timeout):
                self._queue.cancel_attempts_on(index)
                if not worker.wait_stopped(self._options.close_timeout):
                    _logger.warning("%s runs a call that cannot be cancelled; its thread is left behind.", worker)
            self._runtime.remove_worker(index)
        finally:
            with self._membership_lock:
                self._leaving.discard(index)
        for closure in self._queue.waiting_for(index):
            self._fail_if_forsaken(closure)

    def move_worker(self, index: int, address: str) -> None:
        """A worker is at another address from now on; what it runs now is handed back.

        Args:
          index: its index.
          address: `host:port` of the server.

        Raises:
          ValueError: there is no such worker, that is no address, or another task has it.
        """
        with self._membership_lock:
            self._refuse_unknown(index, " to move")
            self._runtime.move_worker(index, address)

    def follow(self, addresses: Callable[[], Collection[str]], interval: float) -> None:
        """Adds, removes and moves workers as a description of the cluster changes.

        Args:
          addresses: gives the addresses at which there are to be workers.
          interval: how often it is asked, in seconds.
        """
        assert self._membership is None, "one description is followed"
        self._membership = MembershipWatch(addresses, interval, self._bring_in_line)
        self._membership.start()

    def when_worker_rests(self, callback: Callable[[int], object]) -> None:
        """Has `callback` called with a worker's index when that worker has no closure any more after it had one.

        That is when nothing waits for it, when its closure failed, and when it was lost. It is called on the thread of
        that worker, which takes no other closure meanwhile. A method is called for as long as its object lives, which
        this does not keep alive.
        """
        is_method = inspect.ismethod(callback)
        self._on_rest.append(weakref.WeakMethod(callback, self._on_rest.remove) if is_method else lambda: callback)

    def statistics(self) -> ClusterStatistics:
        """A snapshot of the counts, each worker's too."""
        workers = tuple(worker.statistics() for worker in self.workers)
        return dataclasses.replace(self._queue.statistics(), workers=workers)

    def unhealthy(self) -> tuple[str, ...]:
        """The names of the workers that cannot be given closures now. Probes each."""
        return tuple(worker.device for worker in self.workers if not worker.healthy())

    def refuse_closed(self, what: str) -> None:
        """Raises StrategyClosedError, with words on what is refused, if the cluster was closed."""
        self._queue.refuse_stopped(what)

    def close(self) -> None:
        """Withdraws what waits, cancels what runs, ends the threads and lets the servers go. May be called again."""
        if self._closed:
            return
        self._closed = True
        # The queue first: a lost worker that stops waiting for its task must find nothing to take.
        self._closing_thread = threading.current_thread()
        self._queue.stop()
        self._closing_thread = None
        with self._membership_lock:
            workers = self.workers
        watches = (self._membership, self._stragglers, self._idle, self.recovery)
        parts = [part for part in (*watches, *workers) if part is not None]
        for part in parts:
            part.stop()
        deadline = time.monotonic() + self._options.close_timeout
        for part in parts:
            remaining = max(0.0, deadline - time.monotonic())
            if part.thread is not threading.current_thread() and not part.wait_stopped(remaining):
                _logger.warning("%s still runs a call that cannot be cancelled; its thread is left behind.", part)
        self._runtime.close()

    def __repr__(self) -> str:
        return f"<Cluster: {self.statistics()}>"

    def _new_worker(self, index: int) -> Worker:
        return Worker(
            index, self._runtime, self._queue, self.recovery, self._options, self._tell_of_rest, self._live_workers
        )

    def _live_workers(self) -> int:
        return sum(worker.state is WorkerState.LIVE for worker in self._workers.values())

    def _employ(self, workers: dict[int, Worker]) -> None:
        self._workers = workers
        self._worker_threads = frozenset(worker.thread for worker in workers.values())

    def _tell_of_rest(self, worker: int) -> None:
        for reference in tuple(self._on_rest):
            try:
                if (callback := reference()) is not None:
                    callback(worker)
            except Exception:
                _logger.exception("What is told that worker %d has no work any more raised.", worker)

    def _new_closure(self, work: Any, name: str, origin: Any = None, **settings: Any) -> Closure:
        number = next(self._numbers)
        future = Future(name, number, origin=origin)
        closure = Closure(work, name, number, future, **settings)
        # A partial call at half the weight of `functools.partial`'s: each closure that waits has one.
        future.on_cancel = types.MethodType(self._discard, closure)
        return closure

    def _unblock(self, closure: Closure, done: Any) -> None:
        """One of the futures that a closure waits for is done, well or not."""
        failed = done.cancelled() or done.exception() is not None
        if not failed:
            self._queue.unblock(closure)
            self._fail_if_forsaken(closure)
            return
        error = ClosureInputError(f"{closure} was not run, because its argument has no value: {done!r}.")
        error.__cause__ = None if done.cancelled() else done.exception()
        self._queue.fail_waiting(closure, error, Reach.FUTURE)

    def _fail_if_forsaken(self, closure: Closure) -> None:
        """Fails a closure for a worker that was removed, perhaps while the closure was being queued."""
        if closure.target is not None and closure.target not in self._workers:
            task = f"worker {closure.target}"
            message = f"{closure} may run on {task} alone, which was removed. Schedule it on another one."
            self._queue.fail_waiting(closure, WorkerLost(task, message), Reach.JOIN)

    def _bring_in_line(self, wanted: Collection[str]) -> None:
        lost = [worker.index for worker in self.workers if worker.state is WorkerState.LOST]
        change = change_between(self._runtime.worker_addresses, lost, wanted)
        for index, address in change.moved.items():
            _logger.warning("Worker %d is at %s now.", index, address)
            self.move_worker(index, address)
        for address in change.added:
            _logger.warning("A worker at %s joins as number %d.", address, self.add_worker(address))
        for index in change.removed:
            _logger.warning("Worker %d leaves.", index)
            self.remove_worker(index)

    def _refuse_unknown(self, index: int, purpose: str = "") -> None:
        if index not in self._workers:
            raise ValueError(f"There is no worker {index!r}{purpose}; there are {sorted(self._workers)}.")

    def _refuse_worker_thread(self, verb: str) -> None:
        thread = threading.current_thread()
        if thread is self._closing_thread or thread in self._worker_threads:
            raise RuntimeError(
                f"{verb} was called on a worker's thread, or on the one in close, for instance in a callback of a "
                "future, and would wait for itself. Set an event in the callback, and call it on a thread of your own."
            )

    def _report_stall(self, text: str) -> None:
        away = [f"{worker.device} (for {worker.away_seconds:.0f} s)" for worker in self.workers if worker.away_seconds]
        unreachable = f" Away: {', '.join(away)}." if away else ""
        _logger.warning("%s%s Cluster: %s", text, unreachable, self.statistics())
