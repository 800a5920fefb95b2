"""Recovers from the loss of a parameter server: pauses the closures, restores the variables, resumes.

    noticed --> pause: no closure starts, what runs is cancelled and requeued
                  |
                  +--> try to recover, until the servers answer --> resume: everything continues
                  |--> too long --> resume, and the error is raised by `schedule` or `join`
                  \\--> impossible --> the same, but no closure starts: what is scheduled begins another attempt

Guarantees: without a call of `recover_with`, a lost parameter server is an error immediately. With a call, no closure
is lost, and the program notices only a delay. No closure uses partly restored variables.
"""

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable

from coordinator.errors import ParameterServerLost, Rollback
from coordinator.events.event_stream import task_of_device
from coordinator.options import Options
from coordinator.queueing.closure_queue import ClosureQueue
from coordinator.runtime import Servers
from coordinator.statistics import ParameterServerStatistics
from coordinator.workers.background_threads import QueueThread

_logger = logging.getLogger("coordinator")


class RecoveryLoop(QueueThread):
    """Watches the parameter servers and recovers them while the queue is paused."""

    def __init__(self, servers: Servers, queue: ClosureQueue, options: Options) -> None:
        super().__init__("coordinator-recovery", self._watch, queue)
        self._servers = servers
        self._options = options
        self._clock = queue.clock
        self._recover: Callable[[], Rollback | bool] | None = None
        self._missing: Callable[[], ParameterServerLost | None] = servers.lost_parameter_server
        self._meanwhile: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext
        # How many recoveries were given up.
        self._failures = 0
        # The loss that began the recovery.
        self._loss: BaseException | None = None
        # The name of a missing parameter server in events -> when its loss was noticed.
        self._away: dict[str, float] = {}
        self._statistics = {
            task_of_device(device): ParameterServerStatistics(index, device, "live")
            for index, device in enumerate(servers.parameter_server_devices)
        }
        self._begun = threading.Event()
        # Threads enter this lock: a signal could interrupt the condition's `__enter__`, Python code, and leave it
        # locked.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)

    def stop(self) -> None:
        super().stop()
        self._begun.set()
        with self._lock:
            self._changed.notify_all()

    def recover_with(
        self,
        recover: Callable[[], Rollback | bool],
        meanwhile: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        missing: Callable[[], ParameterServerLost | None] | None = None,
    ) -> None:
        """Sets how lost parameter servers are recovered.

        Args:
          recover: a function that tries once to restore all parameter servers. It returns the rollback, True if nothing
            was rolled back, or False if a server does not answer yet. It raises an error if recovery is impossible.
            Called on this thread while no closure runs.
          meanwhile: returns a scope for all attempts of a recovery, because a failed attempt may leave half a state.
          missing: returns the error that names a lost server or one with lost variables. None looks for lost servers
            only.
        """
        self._recover, self._meanwhile = recover, meanwhile
        self._missing = missing or self._servers.lost_parameter_server

    def statistics(self) -> tuple[ParameterServerStatistics, ...]:
        with self._lock:
            return tuple(self._statistics.values())

    @property
    def can_recover(self) -> bool:
        """Whether `recover_with` was called."""
        return self._recover is not None

    def begin_if_lost(self) -> None:
        missing = self._missing()
        if missing is not None:
            self.begin(missing)

    def begin(self, error: BaseException) -> bool:
        """Begins the recovery of the parameter server that `error` names. The queue is paused until the recovery ends.

        Returns whether the server will be recovered. If so, closures that failed for this reason may be tried again.
        """
        self._record_loss(error)
        if self._recover is None or self.stopping.is_set():
            return False
        with self._lock:
            if not self._begun.is_set():
                self._queue.begin_consequences(self.thread)
                self._loss = error
                self._begun.set()
        return True

    def wait_recovered(self, timeout: float | None = None) -> bool:
        """Waits for a recovery that runs or is about to begin; returns whether all servers are reachable.

        `timeout` is in seconds; None for `Options.parameter_server_timeout`.
        """
        deadline = self._clock.now() + (self._options.parameter_server_timeout if timeout is None else timeout)
        failures = self._failures
        while True:
            self.begin_if_lost()
            with self._lock:
                remaining = max(0.0, deadline - self._clock.now())
                over = self._changed.wait_for(lambda: not self._begun.is_set() or self.stopping.is_set(), remaining)
            if not over or self.stopping.is_set():
                return False
            is_back = self._missing() is None
            if is_back or self._recover is None or self._failures > failures:
                return is_back
            # A server was lost again just after the recovery.

    def _watch(self) -> None:
        try:
            self._watch_until_stopped()
        finally:
            self._queue.end_consequences(self.thread)

    def _watch_until_stopped(self) -> None:
        if self._queue.is_paused:
            # An unexpected error has ended a recovery that had paused the queue.
            self._begun.set()
        while not self.stopping.is_set():
            if not self._begun.wait(self._options.heartbeat_interval):
                self._check()
            if self._begun.is_set() and not self.stopping.is_set():
                self._recover_and_resume()

    def _check(self) -> None:
        """Notices a loss that no closure has met, or that makes closures hang."""
        if self._servers.seem_parameter_servers_reachable():
            if not self._away or self._begun.is_set():
                return
            missing = self._missing()
            if missing is None:
                self._record_return(None)
            elif self._queue.is_paused and self._queue.statistics().waiting:
                # Variables could not be restored. The program has seen the error and goes on.
                self.begin(missing)
            return
        lost = self._servers.lost_parameter_server()
        if lost is not None and not self.begin(lost):
            self._queue.fail_all(lost, if_idle=False)

    def _recover_and_resume(self) -> None:
        lost_at, loss = self._clock.now(), self._loss
        # Only this thread pauses and resumes the queue, so a pause and a resume cannot overtake each other.
        self._queue.pause(str(loss))
        text = "%s was lost; no function runs until it answers again and the variables are restored, at most %g s."
        lost = loss.task if isinstance(loss, ParameterServerLost) else "A parameter server"
        _logger.warning(text, lost, self._options.parameter_server_timeout)
        self._queue.end_consequences(self.thread)
        error, rollback = self._recover_in_time(lost_at)
        self._queue.begin_consequences(self.thread)
        if self.stopping.is_set():
            return
        if error is not None:
            self._failures += 1
            self._queue.fail_all(error, if_idle=True)
        else:
            _logger.warning("The parameter servers are back after %.1f s.", self._clock.now() - lost_at)
            self._record_return(rollback)
        # `_begun` is cleared before `resume`: a loss that is noticed from here on begins another recovery.
        self._begun.clear()
        if error is None or self._missing() is None or self._servers.lost_parameter_server() is not None:
            self._queue.resume()
        with self._lock:
            self._changed.notify_all()
            if not self._begun.is_set():
                self._queue.end_consequences(self.thread)

    def _recover_in_time(self, lost_at: float) -> tuple[BaseException | None, Rollback | None]:
        """Tries until success or timeout; returns the error that ended the recovery, and what was rolled back."""
        try:
            with self._meanwhile():
                return self._try_in_time(lost_at)
        except BaseException as error:  # noqa: BLE001 - the user's thread is to raise it
            return error, None

    def _try_in_time(self, lost_at: float) -> tuple[BaseException | None, Rollback | None]:
        assert self._recover is not None
        reported_at = lost_at
        while not self.stopping.is_set():
            try:
                # `wait_idle` comes first, because a cancelled call that has not ended may still write variables.
                if self._queue.wait_idle(self._options.reconnect_interval) and (done := self._recover()):
                    return None, done if isinstance(done, Rollback) else None
            except BaseException as error:  # noqa: BLE001 - the user's thread is to raise it
                return error, None
            now = self._clock.now()
            lost = self._servers.lost_parameter_server()
            if lost is not None:
                self._record_loss(lost)
            if now - reported_at > self._options.stall_report_interval:
                reported_at = now
                _logger.warning("Recovery has waited for %.0f s: %s", now - lost_at, lost or "calls that do not end")
            if now - lost_at > self._options.parameter_server_timeout:
                text = "The parameter servers could not be recovered in time."
                return lost or ParameterServerLost("/job:ps", text), None
            self._clock.wait(self.stopping, self._options.reconnect_interval)
        return None, None

    def _record_loss(self, error: BaseException) -> None:
        with self._queue.consequences():
            self._count_loss(error)

    def _count_loss(self, error: BaseException) -> None:
        task = task_of_device(error.task if isinstance(error, ParameterServerLost) else "/job:ps")
        with self._lock:
            is_new = task not in self._away
            self._away.setdefault(task, self._clock.now())
            if is_new and (known := self._statistics.get(task)):
                self._statistics[task] = dataclasses.replace(known, state="lost", losses=known.losses + 1)
        if is_new:
            self._queue.events.record("parameter_server_lost", task, detail=str(error))

    def _record_return(self, rollback: Rollback | None) -> None:
        now = self._clock.now()
        with self._lock:
            away, self._away = {task: now - lost_at for task, lost_at in self._away.items()}, {}
            for task, seconds in away.items():
                if known := self._statistics.get(task):
                    self._statistics[task] = dataclasses.replace(
                        known,
                        state="live",
                        recoveries=known.recoveries + 1,
                        away_seconds=known.away_seconds + seconds,
                    )
        path, steps = (rollback.checkpoint or "", rollback.steps_lost or 0) if rollback is not None else ("", 0)
        for task, seconds in away.items():
            self._queue.events.record("parameter_server_recovered", task, path, steps, seconds)
