"""Brings the cluster back after a parameter server was lost: holds the closures, recovers, lets them go on.

    noticed --> hold: nothing is taken, what runs is cancelled and handed back
                  |
                  +--> try to recover, until the servers answer --> release: everything goes on
                  \\--> too long, or impossible --> release, and the error is raised by `schedule` or `join`

Promises: without a way to recover, a lost parameter server is an error at once; with one, no closure is lost, and the
user's program sees nothing but the time that it takes. There is one thread, and it ends with `stop`.
"""

import logging
import threading
import time
from collections.abc import Callable

from coordinator.background_thread import BackgroundThread
from coordinator.closure_queue import ClosureQueue
from coordinator.errors import ParameterServerLost
from coordinator.options import Options
from coordinator.runtime import Runtime

_logger = logging.getLogger("coordinator")


class Recovery(BackgroundThread):
    """Watches the parameter servers, and sees to their recovery.

    Args:
      runtime: tells when one is lost.
      queue: is held meanwhile.
      options: limits and times.
    """

    def __init__(self, runtime: Runtime, queue: ClosureQueue, options: Options) -> None:
        super().__init__("coordinator-recovery")
        self._runtime = runtime
        self._queue = queue
        self._options = options
        self._recover: Callable[[], bool] | None = None
        self._begun = threading.Event()
        self._changed = threading.Condition()

    def stop(self) -> None:
        """Asks the thread to end."""
        super().stop()
        self._begun.set()
        with self._changed:
            self._changed.notify_all()

    def recover_with(self, recover: Callable[[], bool]) -> None:
        """From now on a lost parameter server is recovered.

        Args:
          recover: tries once to bring all parameter servers back; False if one of them does not answer yet. Raises
            what makes it impossible. Called on the thread of this class, while no closure runs.
        """
        self._recover = recover

    def begin(self, error: BaseException) -> bool:
        """A parameter server is lost, as somebody noticed: nothing is to be run until it is recovered.

        Returns:
          Whether it will be recovered, so that what failed for it is worth another attempt.
        """
        if self._recover is None or self._stop.is_set():
            return False
        if not self._begun.is_set():
            self._begun.set()
            self._queue.hold(str(error))
        return True

    def wait_recovered(self, timeout: float | None = None) -> bool:
        """Waits for the end of a recovery that is under way or about to begin.

        Args:
          timeout: in seconds; None stands for `Options.parameter_server_timeout`.

        Returns:
          Whether every parameter server is there.
        """
        lost = self._runtime.lost_parameter_server()
        if lost is not None:
            self.begin(lost)
        timeout = self._options.parameter_server_timeout if timeout is None else timeout
        with self._changed:
            over = self._changed.wait_for(lambda: not self._begun.is_set() or self._stop.is_set(), timeout)
        return over and not self._stop.is_set() and self._runtime.lost_parameter_server() is None

    def _run(self) -> None:
        while not self._stop.is_set():
            if not self._begun.wait(self._options.heartbeat_interval):
                self._look()
            if self._begun.is_set() and not self._stop.is_set():
                self._carry_out()

    def _look(self) -> None:
        """Notices a loss that no closure has run into, or that makes closures hang."""
        if self._runtime.seem_parameter_servers_reachable():
            return
        lost = self._runtime.lost_parameter_server()
        if lost is not None and not self.begin(lost):
            self._queue.fail_all(lost, if_idle=False)

    def _carry_out(self) -> None:
        lost_at = time.monotonic()
        _logger.warning("Nothing is run until the parameter servers are recovered.")
        error = self._recover_in_time(lost_at)
        if self._stop.is_set():
            return
        if error is not None:
            self._queue.fail_all(error, if_idle=True)
        else:
            _logger.warning("The parameter servers are back after %.1f s.", time.monotonic() - lost_at)
        # In this order: a loss that is noticed between the two is noticed again, and none is left without a hold.
        self._queue.release()
        with self._changed:
            self._begun.clear()
            self._changed.notify_all()

    def _recover_in_time(self, lost_at: float) -> BaseException | None:
        """Tries until it succeeds; what made it fail for good otherwise."""
        assert self._recover is not None
        reported_at = lost_at
        while not self._stop.is_set():
            try:
                # A call that does not end although it was cancelled is none of those that could be run again.
                if self._queue.wait_quiet(self._options.reconnect_interval) and self._recover():
                    return None
            except Exception as error:  # noqa: BLE001 - whatever it is, the user's thread is to raise it
                return error
            now = time.monotonic()
            lost = self._runtime.lost_parameter_server()
            if now - lost_at > self._options.parameter_server_timeout:
                return lost or ParameterServerLost("/job:ps", "The parameter servers could not be recovered in time.")
            if now - reported_at > self._options.stall_report_interval:
                reported_at = now
                _logger.warning("Recovery has waited for %.0f s: %s", now - lost_at, lost or "calls that do not end")
            self._stop.wait(self._options.reconnect_interval)
        return None
