"""The workers of one strategy, which come and go while training runs."""

import inspect
import itertools
import logging
import threading
import weakref
from collections.abc import Callable, Collection, Sequence
from typing import Any

from coordinator.options import Options
from coordinator.queueing.closure import Attempt
from coordinator.queueing.closure_queue import ClosureQueue
from coordinator.runtime import Runtime, Servers
from coordinator.workers.background_threads import IdleWatch, MembershipWatch, StragglerWatch, change_between
from coordinator.workers.recovery_loop import RecoveryLoop
from coordinator.workers.worker import Worker, WorkerState

_logger = logging.getLogger("coordinator")


class WorkerPool:
    """Starts, adds, moves and removes workers; implements `coordinator.workers.worker.WorkerEvents`.

    Args:
      runtime: runs calls.
      servers: know the cluster's tasks.
      queue: has the closures.
      recovery: recovers parameter servers.
      options: limits and times.

    Attributes:
      workers: the present workers by index. Replaced as a whole, so that it may be read without a lock.
      threads: the threads of all workers, likewise.
    """

    def __init__(
        self, runtime: Runtime, servers: Servers, queue: ClosureQueue, recovery: RecoveryLoop, options: Options
    ) -> None:
        self._runtime = runtime
        self._servers = servers
        self._queue = queue
        self._recovery = recovery
        self._options = options
        self._stragglers = StragglerWatch(queue)
        self._watches = [self._stragglers, IdleWatch(servers, queue, options.heartbeat_interval)]
        # Held while workers are added, moved and removed, and never together with the queue's.
        self._lock = threading.Lock()
        # Each returns a callback, or None when its object is gone.
        self._idle_callbacks: list[Callable[[], Any]] = []
        # The indices of workers that are being removed.
        self._leaving: set[int] = set()
        self._set_workers({index: self._new_worker(index) for index in servers.worker_addresses})

    def start(self) -> None:
        """Starts the threads."""
        for part in (*self._watches, *self.workers.values()):
            part.start()

    def add_worker(self, address: str) -> int:
        """Adds a worker; see `Cluster.add_worker`."""
        with self._lock:
            self._queue.refuse_stopped("A worker cannot be added")
            index = next(index for index in itertools.count() if index not in {*self.workers, *self._leaving})
            self._servers.add_worker(index, address)
            self._queue.admit(index)
            worker = self._new_worker(index)
            self._set_workers({**self.workers, index: worker})
            worker.start()
            return index

    def remove_worker(self, index: int, timeout: float | None = None) -> None:
        """Removes a worker; see `Cluster.remove_worker`."""
        with self._lock:
            self.refuse_unknown(index, " to remove")
            worker = self.workers[index]
            self._set_workers({other: each for other, each in self.workers.items() if other != index})
            self._leaving.add(index)
        try:
            self._queue.dismiss(index)
            worker.stop()
            if not worker.wait_stopped(self._options.close_timeout if timeout is None else timeout):
                self._queue.cancel_attempts_on(index)
                if not worker.wait_stopped(self._options.close_timeout):
                    _logger.warning("%s runs a call that cannot be cancelled; its thread is left behind.", worker)
            self._servers.remove_worker(index)
        finally:
            with self._lock:
                self._leaving.discard(index)

    def move_worker(self, index: int, address: str) -> None:
        """Changes a worker's address; see `Cluster.move_worker`."""
        with self._lock:
            self.refuse_unknown(index, " to move")
            self._servers.move_worker(index, address)

    def follow(
        self, addresses: Callable[[], Collection[str]], interval: float, remove: Callable[[int], object]
    ) -> None:
        """Adds, removes and moves workers as a description of the cluster changes.

        Args:
          addresses: returns the addresses at which workers are wanted.
          interval: between two calls of it, in seconds.
          remove: removes a worker by its index.
        """

        def apply(wanted: Collection[str]) -> None:
            lost = [index for index, worker in self.workers.items() if worker.state is WorkerState.LOST]
            change = change_between(self._servers.worker_addresses, lost, wanted)
            for index, address in change.moved.items():
                _logger.warning("Worker %d has moved to %s.", index, address)
                self.move_worker(index, address)
            for address in change.added:
                _logger.warning("A worker at %s joined as worker %d.", address, self.add_worker(address))
            for index in change.removed:
                _logger.warning("Worker %d is removed, since its address is not listed any more.", index)
                remove(index)

        watch = MembershipWatch(addresses, interval, apply)
        self._watches.insert(0, watch)
        watch.start()

    def add_idle_callback(self, callback: Callable[[int], object]) -> None:
        """Has `callback` called with a worker's index whenever that worker, having had a closure, has none any more.

        That is when no closure waits for it, when its closure failed, and when it was lost. The call comes on the
        worker's thread, which takes no other closure meanwhile. A method is called as long as its object lives; it does
        not keep the object alive.
        """
        is_method = inspect.ismethod(callback)
        self._idle_callbacks.append(
            weakref.WeakMethod(callback, self._idle_callbacks.remove) if is_method else lambda: callback
        )

    def attempt_started(self, attempt: Attempt) -> None:
        """Tracks the timeout of an attempt."""
        self._stragglers.track(attempt)

    def became_idle(self, worker: int) -> None:
        """Calls the idle callbacks."""
        for reference in tuple(self._idle_callbacks):
            try:
                if (callback := reference()) is not None:
                    callback(worker)
            except Exception:
                _logger.exception("A callback for idle workers raised an error for worker %d.", worker)

    def live_workers(self) -> int:
        """Returns how many workers are live."""
        return sum(worker.state is WorkerState.LIVE for worker in self.workers.values())

    def refuse_unknown(self, index: int, purpose: str = "") -> None:
        """Raises ValueError if there is no worker of this index."""
        if index not in self.workers:
            raise ValueError(f"There is no worker {index!r}{purpose}; there are {sorted(self.workers)}.")

    def threads_to_stop(self) -> Sequence[Any]:
        """Returns all that has a thread, in the order in which to stop them."""
        with self._lock:
            return (*self._watches, self._recovery, *self.workers.values())

    def _new_worker(self, index: int) -> Worker:
        return Worker(index, self._runtime, self._servers, self._queue, self._recovery, self._options, self)

    def _set_workers(self, workers: dict[int, Worker]) -> None:
        self.workers = workers
        self.threads = frozenset(worker.thread for worker in workers.values())
