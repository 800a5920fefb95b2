"""The workers of one strategy, which come and go while training runs: `strategy.cluster`."""

import dataclasses
import inspect
import itertools
import logging
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from coordinator.background_thread import BackgroundThread
from coordinator.errors import StrategyClosedError, WorkerLost
from coordinator.future import Future
from coordinator.options import Options, check_integer
from coordinator.queueing.closure import Attempt, ErrorScope
from coordinator.queueing.closure_queue import ClosureQueue
from coordinator.queueing.waits import uninterrupted
from coordinator.runtime import Runtime, Servers
from coordinator.statistics import ClusterStatistics
from coordinator.workers.background_threads import BuildThread, IdleWatch, LinkWatch, StragglerWatch
from coordinator.workers.recovery_loop import RecoveryLoop
from coordinator.workers.worker import Worker

_logger = logging.getLogger("coordinator")


class Cluster:
    """The servers of a strategy and their statistics; adds, moves and removes them while training runs.

    Users call `workers`, `statistics`, `schedule`, `add_worker`, `move_worker`, `remove_worker` and
    `move_parameter_server`. The other methods, and the constructor, are for the library.

    Attributes:
      threads: the threads on which nothing may wait for closures: the workers', and the one in `stop`.
      links: finds broken links between servers.
      queue: of the closures.
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
        self._stragglers = StragglerWatch(queue)
        self._watches: list[BackgroundThread] = [
            self._stragglers,
            IdleWatch(servers, queue, options.heartbeat_interval),
            links,
            BuildThread(runtime.builds, queue),
        ]
        # Held while workers are added, moved and removed, and never together with the queue's.
        self._lock = threading.Lock()
        # Each returns a callback, or None when its object is gone.
        self._idle_callbacks: list[Callable[[], Any]] = []
        # The workers that are being removed.
        self._leaving: set[int] = set()
        self._schedule: Callable[[], Callable[..., Future] | None] = lambda: None
        self._set_workers({index: self._new_worker(index) for index in servers.worker_addresses})
        for index, address in servers.worker_addresses.items():
            queue.admit(index)
            queue.events.record("worker_joined", f"worker {index}", detail=address)

    @property
    def workers(self) -> Sequence[Worker]:
        """The present workers, in the order of their indices."""
        return tuple(worker for _, worker in sorted(self._workers.items()))

    def statistics(self) -> ClusterStatistics:
        """Returns a snapshot of the counts, each server's too."""
        workers = tuple(worker.statistics() for worker in self.workers)
        servers = self._recovery.statistics()
        return dataclasses.replace(self.queue.statistics(), workers=workers, parameter_servers=servers)

    def schedule(self, fn: Any, args: Any = None, kwargs: Any = None, **limits: Any) -> Future:
        """Queues one call of `fn`; the same as `strategy.schedule`, whose arguments and errors it has."""
        schedule = self._schedule()
        if schedule is None:
            raise StrategyClosedError("The strategy of this cluster does not exist any more. Create a new one.")
        return schedule(fn, args, kwargs, **limits)

    def add_worker(self, address: str, index: int | None = None) -> int:
        """Adds a worker. It gets closures as soon as it answers.

        It creates its own iterators, tables and per-worker variables when it first needs them. A dataset function gets
        its own `InputContext` there: pipeline 2 of 3 for the worker that is added to two. The others keep theirs,
        unless `Options.reshard_inputs` divides the data again among all.

        Args:
          address: `host:port` of a standard TensorFlow server that was started as a worker.
          index: its index; None for the lowest that no worker has.

        Returns:
          Its index.

        Raises:
          ValueError: that is no address, or a task of the cluster has it already; or a worker has the index.
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
        """Removes a worker after it has finished what it runs, or after `timeout`; the closure is requeued then.

        Closures that only it may run fail with `WorkerLost`.

        Args:
          index: its index.
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
            # After Ctrl-C, too, which ends the wait: the worker cannot be removed a second time.
            try:
                self._servers.remove_worker(index)
            finally:
                with self._lock:
                    self._leaving.discard(index)
                self.queue.events.record("worker_left", f"worker {index}")
                self.fail_orphaned(index)

    def move_worker(self, index: int, address: str) -> None:
        """Changes the address of a worker, whose present closure is requeued.

        Args:
          index: its index.
          address: `host:port` of the server.

        Raises:
          ValueError: there is no such worker, that is no address, or another task has it.
        """
        with self._lock:
            self.refuse_unknown(index, " to move")
            self._servers.move_worker(index, address)

    def move_parameter_server(self, index: int, address: str) -> None:
        """Changes the address of a parameter server, for instance because its host will not come back.

        The server counts as lost: nothing runs until it answers at the new address, and all variables are then restored
        as `restore_from` says. Save a checkpoint before, if the former server still runs.

        Args:
          index: its index.
          address: `host:port` of the standard TensorFlow server that takes its place.

        Raises:
          ValueError: there is no such parameter server, that is no address, or another task has it.
          RuntimeError: `strategy.restore_from` was not called, so its variables could not be restored.
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

    # The methods that follow are for the library.

    def start(self) -> None:
        """Starts the threads."""
        for part in (*self._watches, *self._workers.values()):
            part.start()

    def schedule_with(self, schedule: Callable[..., Future]) -> None:
        """Sets what traces and queues functions: a method of the strategy, which this does not keep alive."""
        self._schedule = weakref.WeakMethod(schedule)

    def add_watch(self, watch: BackgroundThread) -> None:
        """Starts a thread that changes the workers, and is stopped before all others."""
        self._watches.insert(0, watch)
        watch.start()

    def stop(self) -> None:
        """Cancels what waits and runs, and ends all threads; part of `strategy.close()`."""
        # The queue first: a lost worker that stops waiting for its task must find no closure.
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
        """Has `callback` called with a worker's index whenever that worker, having had a closure, has none.

        That is when no closure waits for it, when its closure failed, when it was lost, and before a quiet period
        begins. The call comes on the worker's thread, which takes no other closure meanwhile. A method is called as
        long as its object lives; it does not keep the object alive.
        """
        is_method = inspect.ismethod(callback)
        self._idle_callbacks.append(
            weakref.WeakMethod(callback, self._idle_callbacks.remove) if is_method else lambda: callback
        )

    def fail_orphaned(self, index: int) -> None:
        """Fails the closures that only this worker may run, if it was removed, perhaps while they were being queued."""
        if index in self._workers:
            return
        for closure in self.queue.waiting_for(index):
            message = f"{closure} may run only on worker {index}, which was removed. Schedule it on another worker."
            self.queue.fail_waiting(closure, WorkerLost(f"worker {index}", message), ErrorScope.JOIN)

    def refuse_unknown(self, index: int, purpose: str = "") -> None:
        """Raises ValueError if there is no worker of this index."""
        if index not in self._workers:
            raise ValueError(f"There is no worker {index!r}{purpose}; there are {sorted(self._workers)}.")

    def refuse_worker_thread(self, verb: str) -> None:
        """Raises RuntimeError on a worker's thread, where the method of this name would wait for itself."""
        if threading.current_thread() in self.threads:
            raise RuntimeError(
                f"{verb} was called on a worker's thread, or on the one in close, for instance in a callback of a "
                "future, and would wait for itself. Set an event in the callback, and call it on another thread."
            )

    # The methods that follow are called on a worker's thread.

    def attempt_started(self, attempt: Attempt) -> None:
        """Tracks an attempt of a closure that has a timeout."""
        self._stragglers.track(attempt)

    def became_idle(self, worker: int) -> None:
        """Calls the idle callbacks."""
        for reference in tuple(self._idle_callbacks):
            try:
                if (callback := reference()) is not None:
                    callback(worker)
            except Exception:
                _logger.exception("A callback for idle workers raised an error for worker %d.", worker)

    @uninterrupted
    def _withdraw(self, index: int) -> Worker:
        """Takes a worker from the cluster; it stops after what it runs, and what waits for it alone fails."""
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
        self.fail_orphaned(index)
        return worker

    def _new_worker(self, index: int) -> Worker:
        return Worker(index, self._runtime, self._servers, self.queue, self._recovery, self._options, self)

    def _set_workers(self, workers: dict[int, Worker]) -> None:
        # Replaced as a whole, so that both may be read without a lock.
        self._workers = workers
        self._runtime.builds.workers = len(workers)
        self.threads = frozenset(worker.thread for worker in workers.values())
