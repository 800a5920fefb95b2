"""The workers, the queue before them, and what they have done.

                 schedule                       take
    user's thread -------> ClosureQueue <--------------- Worker 0's thread --run--> Runtime --> task 0
                 <-------                 <------------- Worker 1's thread --run--> Runtime --> task 1
                   join      finish, fail, hand back

Promises: what `schedule` accepts is run at least once or its future says why not; after `join` every future is done;
`close` leaves no thread behind.
"""

import dataclasses
import itertools
import logging
import threading
from collections.abc import Sequence
from typing import Any

from coordinator.closure import Closure
from coordinator.closure_queue import ClosureQueue
from coordinator.future import Future
from coordinator.options import Options
from coordinator.runtime import Runtime
from coordinator.statistics import ClusterStatistics
from coordinator.worker import Worker

_logger = logging.getLogger("coordinator")


class Cluster:
    """Runs closures on the workers of one runtime.

    Made by `ParameterServerStrategy`; users reach it as `strategy.cluster` to look at the workers and the counts.
    """

    def __init__(self, runtime: Runtime, options: Options) -> None:
        self._runtime = runtime
        self._options = options
        self._numbers = itertools.count()
        self._queue = ClosureQueue(
            options.max_queued_closures, runtime.new_cancellation, self._report_stall, options.stall_report_interval
        )
        self._workers = tuple(
            Worker(index, runtime, self._queue, options) for index in range(len(runtime.worker_devices))
        )
        self._closed = False
        self._closing_thread: threading.Thread | None = None
        for worker in self._workers:
            worker.start()

    @property
    def workers(self) -> Sequence[Worker]:
        """The workers, by index."""
        return self._workers

    def schedule(self, work: Any, name: str) -> Future:
        """Queues `work` for any worker; see `ClosureQueue.put` for what it raises."""
        self._refuse_worker_thread("schedule")
        closure = self._new_closure(work, name, None)
        self._queue.put(closure, self._options.schedule_timeout)
        return closure.future

    def schedule_on(self, worker: int, work: Any, name: str) -> Future:
        """Queues `work` for one worker, before all else; neither `join` nor `done` heeds it."""
        closure = self._new_closure(work, name, worker)
        self._queue.put_targeted(closure)
        return closure.future

    def join(self, timeout: float | None = None) -> None:
        """Waits until every scheduled closure has finished; see `ClosureQueue.wait_settled` for what it raises."""
        self._refuse_worker_thread("join")
        self._queue.wait_settled(timeout)

    def done(self) -> bool:
        """Whether no scheduled closure is pending. Raises the error of an earlier closure, once."""
        self._refuse_worker_thread("done")
        return self._queue.is_settled()

    def statistics(self) -> ClusterStatistics:
        """A snapshot of the counts, each worker's too."""
        workers = tuple(worker.statistics() for worker in self._workers)
        return dataclasses.replace(self._queue.statistics(), workers=workers)

    def unhealthy(self) -> tuple[str, ...]:
        """The names of the workers that cannot be given closures now. Probes each."""
        return tuple(worker.device for worker in self._workers if not worker.healthy())

    def close(self) -> None:
        """Withdraws what waits, cancels what runs, ends the threads and lets the servers go. May be called again."""
        if self._closed:
            return
        self._closed = True
        # The queue first: a lost worker that stops waiting for its task must find nothing to take.
        self._closing_thread = threading.current_thread()
        self._queue.stop()
        self._closing_thread = None
        for worker in self._workers:
            worker.stop()
        for worker in self._workers:
            if not worker.is_current_thread() and not worker.wait_stopped(self._options.close_timeout):
                _logger.warning("%s still runs a call that cannot be cancelled; its thread is left behind.", worker)
        self._runtime.close()

    def __repr__(self) -> str:
        return f"<Cluster: {self.statistics()}>"

    def _new_closure(self, work: Any, name: str, target: int | None) -> Closure:
        number = next(self._numbers)
        future = Future(name, number, on_cancel=lambda: self._queue.discard(closure))
        closure = Closure(work, name, number, future, target)
        return closure

    def _refuse_worker_thread(self, verb: str) -> None:
        is_closing = threading.current_thread() is self._closing_thread
        if is_closing or any(worker.is_current_thread() for worker in self._workers):
            raise RuntimeError(
                f"{verb} was called on a worker's thread, or on the one in close, for instance in a callback of a "
                "future, and would wait for itself. Set an event in the callback, and call it on a thread of your own."
            )

    def _report_stall(self, text: str) -> None:
        _logger.warning("%s Cluster: %s", text, self.statistics())
