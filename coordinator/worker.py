"""One worker: a thread that takes closures from the queue and has the runtime run them.

    LIVE --its task is lost--> LOST --connected again--> LIVE
      \\______________ stop ______/________> STOPPED

Promises:
- A closure that was running when the worker was lost is handed back before anything else is done.
- One that is lost while it is idle is noticed too, within `Options.probe_interval`.
- A lost worker's thread alone waits for its return; no other worker waits for it, nor it for another.
- The thread ends after `stop`, as soon as the call under way returns.
"""

import enum
import logging
import threading
import time

from coordinator.closure import Closure
from coordinator.closure_queue import ClosureQueue
from coordinator.errors import InvalidTransitionError
from coordinator.options import Options
from coordinator.retry_rule import Decision, decide, final_error
from coordinator.runtime import FailureKind, Runtime
from coordinator.statistics import WorkerStatistics

_logger = logging.getLogger("coordinator")


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


class Worker:
    """A task that runs closures one at a time, and the client's thread for it.

    Attributes:
      index: its task index.
      device: its name, such as `/job:worker/replica:0/task:0`.
    """

    def __init__(self, index: int, runtime: Runtime, queue: ClosureQueue, options: Options) -> None:
        self.index = index
        self.device = runtime.worker_devices[index]
        self._runtime = runtime
        self._queue = queue
        self._options = options
        self._state = WorkerState.LIVE
        self._state_lock = threading.Lock()
        self._stop = threading.Event()
        self._finished = self._failed = self._retried = self._losses = self._reconnections = 0
        self._reconnecting_seconds = 0.0
        self._thread = threading.Thread(target=self._run, name=f"coordinator-worker-{index}", daemon=True)

    @property
    def state(self) -> WorkerState:
        """Whether it may be given closures."""
        return self._state

    def healthy(self) -> bool:
        """Whether the worker may be given closures and answers a probe now. Takes at most `Options.probe_timeout`."""
        return self._state is WorkerState.LIVE and self._runtime.is_reachable(self.index)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Asks the thread to end; the queue must be stopped too."""
        self._change(WorkerState.STOPPED)
        self._stop.set()

    def wait_stopped(self, timeout: float) -> bool:
        """Waits at most `timeout` seconds for the thread to end; whether it did."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def is_current_thread(self) -> bool:
        """Whether the caller runs on this worker's thread, as callbacks of futures do."""
        return threading.current_thread() is self._thread

    def statistics(self) -> WorkerStatistics:
        """What it has done so far."""
        return WorkerStatistics(
            index=self.index,
            device=self.device,
            state=self._state.value,
            finished=self._finished,
            failed=self._failed,
            retried=self._retried,
            losses=self._losses,
            reconnections=self._reconnections,
            reconnecting_seconds=self._reconnecting_seconds,
        )

    def __repr__(self) -> str:
        return f"<Worker {self.device}: {self._state.value}, {self._finished} closures finished>"

    def _run(self) -> None:
        self._runtime.bind_thread(self.index)
        if not self._runtime.is_reachable(self.index):
            self._lose("it did not answer when the strategy was made")
        while not self._queue.is_stopped:
            closure = self._queue.take(self.index, self._options.probe_interval)
            if closure is not None:
                self._attempt(closure)
            elif not self._queue.is_stopped and not self._runtime.is_reachable(self.index):
                self._lose("it did not answer a probe while it was idle")
            # Keeps nothing of the closure alive (its arguments may hold iterators) while waiting for the next one.
            del closure

    def _attempt(self, closure: Closure) -> None:
        assert closure.cancellation is not None
        if closure.attempts > 1 and not self._runtime.is_reachable(self.index):
            # Workers that die together must not count, one after the other, against the closure that finds them dead.
            self._retried += 1
            self._queue.hand_back(closure)
            self._lose("it did not answer a probe")
            return
        try:
            result = self._runtime.run(self.index, closure.work, closure.cancellation)
        except BaseException as error:  # noqa: BLE001 - the runtime sorts it
            self._settle_failure(closure, error)
        else:
            self._finished += 1
            self._queue.finish(closure, result)

    def _settle_failure(self, closure: Closure, error: BaseException) -> None:
        failure = self._runtime.classify(self.index, error)
        count = closure.record_failure(failure.kind)
        match decide(failure, count, self._options):
            case Decision.RETRY:
                self._retried += 1
                if failure.kind is FailureKind.TRANSIENT:
                    # What refused the call needs a moment to come round; at once, the retries would be used up before.
                    self._stop.wait(self._options.reconnect_interval)
                self._queue.hand_back(closure)
            case Decision.CANCEL:
                self._queue.cancel(closure)
            case Decision.FAIL:
                self._failed += 1
                self._queue.fail(closure, final_error(failure, closure, self.device))
        if failure.kind is FailureKind.WORKER_LOST:
            self._lose(str(error))

    def _lose(self, reason: str) -> None:
        """Waits until the worker is connected to again, or stopped."""
        self._losses += 1
        if not self._change(WorkerState.LOST):
            return
        _logger.warning("%s was lost; its work goes to other workers until it returns. (%s)", self.device, reason)
        lost_at = reported_at = time.monotonic()
        while not self._stop.is_set() and not self._reconnect():
            hopeless = self._runtime.lost_parameter_server()
            if hopeless is not None:
                self._queue.fail_waiting(hopeless)
            now = time.monotonic()
            if now - reported_at >= self._options.stall_report_interval:
                reported_at = now
                _logger.warning("%s has been away for %.0f s and is still awaited.", self.device, now - lost_at)
            self._stop.wait(self._options.reconnect_interval)
        if not self._stop.is_set() and self._change(WorkerState.LIVE):
            _logger.warning("%s is back after %.1f s.", self.device, time.monotonic() - lost_at)

    def _reconnect(self) -> bool:
        start = time.monotonic()
        connected = self._runtime.reconnect(self.index)
        if connected:
            self._reconnections += 1
            self._reconnecting_seconds += time.monotonic() - start
        return connected

    def _change(self, state: WorkerState) -> bool:
        """Changes the state; False if the worker was stopped meanwhile."""
        with self._state_lock:
            if self._state is WorkerState.STOPPED:
                return False
            if state not in _ALLOWED[self._state]:
                raise InvalidTransitionError(
                    f"{self.device} cannot go from {self._state.value} to {state.value}. This is a defect of "
                    "coordinator; please report it with this message."
                )
            self._state = state
            return True
