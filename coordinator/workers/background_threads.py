"""The threads that watch closures and workers, and the base class of these threads and of the workers' threads."""

import logging
import math
import threading
from collections.abc import Callable, Collection, Mapping

from coordinator.background_thread import BackgroundThread
from coordinator.options import Options
from coordinator.queueing.closure import Attempt
from coordinator.queueing.closure_queue import ClosureQueue
from coordinator.runtime import Builds, Servers

_logger = logging.getLogger("coordinator")


class QueueThread(BackgroundThread):
    """A background thread of one strategy. The queue records an unexpected error as an event `thread_failed`."""

    def __init__(self, name: str, run: Callable[[], object], queue: ClosureQueue) -> None:
        super().__init__(name, run, self._record_failure)
        self._queue = queue

    def _record_failure(self, error: BaseException) -> None:
        detail = f"{type(error).__name__}: {error}"
        self._queue.events.record("thread_failed", name=self.thread.name, detail=detail)


class IdleWatch(QueueThread):
    """Wakes idle workers whose servers seem lost, every `interval` seconds, so that idle workers need not poll."""

    def __init__(self, servers: Servers, queue: ClosureQueue, interval: float) -> None:
        super().__init__("coordinator-idle-workers", self._watch, queue)
        self._servers = servers
        self._interval = interval

    def _watch(self) -> None:
        while not self.stopping.wait(self._interval):
            for worker in self._queue.idle_workers():
                if not self._servers.seems_reachable(worker):
                    self._queue.interrupt(worker)


class StragglerWatch(QueueThread):
    """Starts closures that exceed their timeout on another worker as well. Sleeps until the earliest deadline."""

    def __init__(self, queue: ClosureQueue) -> None:
        super().__init__("coordinator-stragglers", self._watch, queue)
        self._lock = threading.Lock()
        self._deadline = math.inf
        # Set when the deadline becomes earlier.
        self._is_sooner = threading.Event()

    def track(self, attempt: Attempt) -> None:
        """Tracks a started attempt of a closure that has a timeout."""
        assert attempt.closure.timeout is not None
        self._wake_at(attempt.started + attempt.closure.timeout)

    def stop(self) -> None:
        super().stop()
        self._wake_at(-math.inf)

    def _wake_at(self, deadline: float) -> None:
        with self._lock:
            if deadline < self._deadline:
                self._deadline = deadline
                self._is_sooner.set()

    def _watch(self) -> None:
        # After an error the deadline is unknown.
        clock = self._queue.clock
        self._wake_at(-math.inf)
        while not self.stopping.is_set():
            with self._lock:
                self._is_sooner.clear()
                remaining = self._deadline - clock.now()
                is_due = remaining <= 0
                if is_due:
                    self._deadline = math.inf
            if not is_due:
                clock.wait(self._is_sooner, min(remaining, threading.TIMEOUT_MAX))
            elif (following := self._queue.requeue_overdue()) is not None:
                self._wake_at(following)


class BuildThread(QueueThread):
    """Calls the builds that workers have requested, in order."""

    def __init__(self, builds: Builds, queue: ClosureQueue) -> None:
        super().__init__("coordinator-build", self._build, queue)
        self._builds = builds

    def stop(self) -> None:
        super().stop()
        self._builds.end()

    def _build(self) -> None:
        while (build := self._builds.next()) is not None and not self.stopping.is_set():
            build()
            # Frees the build's objects before the wait for the next build.
            del build


class LinkWatch(QueueThread):
    """Checks whether calls do not end because a link between two servers is broken, and ends such calls.

    A worker that does not reach a parameter server counts as lost. If parameter servers do not reach each other, every
    worker has the same problem. Long calls are cancelled, and no closure runs until the link works, so checkpoints can
    be saved.

    A worker whose call is older than a fifth of `Options.heartbeat_timeout` is asked about its links: at most once per
    timeout, and at growing intervals while the same call runs.

    Attributes:
      separation: which parameter servers do not reach each other, in words; "" if all do, or were not asked.
    """

    def __init__(self, servers: Servers, queue: ClosureQueue, options: Options) -> None:
        super().__init__("coordinator-links", self._watch, queue)
        self._servers = servers
        self._options = options
        # Guards `_reported`, because workers' threads call `find_broken` too.
        self._lock = threading.Lock()
        self.separation = self._reported = ""

    def find_broken(self, workers: Collection[int]) -> Mapping[int, str]:
        """Returns the workers that do not reach a parameter server, with a description.

        If not all `workers` have a broken link, also asks the parameter servers, and sets `separation`.
        """
        broken = self._servers.broken_links(workers)
        if workers and broken.keys() >= set(workers):
            return broken
        separation = self._servers.separation()
        with self._lock:
            before, self._reported = self._reported, separation
        # The log line is written before functions run again.
        if separation and not before:
            _logger.warning("%s; functions wait until they reach each other again.", separation)
        elif before and not separation:
            _logger.warning("The parameter servers reach each other again.")
        self.separation = separation
        return broken

    def _watch(self) -> None:
        timeout = self._options.heartbeat_timeout
        # Worker -> when the worker was last asked, and when the call that the question was about had begun.
        asked: dict[int, tuple[float, float]] = {}
        while not self.stopping.wait(self._options.heartbeat_interval):
            now = self._queue.clock.now()
            begun = {attempt.worker: attempt.started for attempt in self._queue.attempts()}
            workers = set()
            for worker, started in begun.items():
                asked_at, asked_about = asked.get(worker, (-math.inf, started))
                pause = max(timeout, asked_at - started) if asked_about == started else timeout
                if now - started >= timeout / 5 and now - asked_at >= pause:
                    workers.add(worker)
                    asked[worker] = now, started
            if not workers and not self.separation:
                continue
            broken = self.find_broken(workers)
            for worker, why in broken.items():
                self._servers.give_up(worker, why)
            if self.separation:
                for worker in workers - broken.keys():
                    self._queue.cancel_attempts(worker)
