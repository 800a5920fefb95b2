"""The base of the library's threads: each has a name, a guard and an end.

    start --> run --returns--> ended
               |  ^
               |  \\-- pause: 1, 2, 4, ... 60 s, which `stop` ends
               \\--raises--> logged and reported, then run again

Guarantees: an unexpected error never ends a thread or the thread's work silently. The guard logs the error with its
traceback, tells the thread's owner, and runs the work again after a pause. The guard catches `SystemExit` and
`KeyboardInterrupt` too, because a thread may call user code that raises them. Work of `start_once` does not run again:
`on_failure` tells the owner, which stops waiting for the work.

A process forked from the client has neither the client's threads nor the client's connections. A child that ends
normally, for example by `sys.exit`, exits the `with` blocks of its parent and runs inherited finalizers. `only_here`
and `refuse_forked` keep the child from touching the strategy, the servers and the client's markers.
"""

import logging
import os
import threading
import time
from collections.abc import Callable

_logger = logging.getLogger("coordinator")


def only_here(call: Callable[[], object]) -> Callable[[], None]:
    """Returns a function that calls `call` in this process, and does nothing in a process forked from this process."""
    owner = os.getpid()

    def guarded() -> None:
        if os.getpid() == owner:
            call()

    return guarded


def refuse_forked(owner: int, what: str) -> None:
    """Raises RuntimeError if this process was forked from the process `owner`, which made `what`."""
    if os.getpid() != owner:
        raise RuntimeError(
            f"{what} belongs to process {owner}, from which this process ({os.getpid()}) was forked without its "
            "threads and connections. Use it there; or start processes by `spawn`, with "
            'multiprocessing.get_context("spawn").'
        )


# Pauses in seconds. `_FIRST_PAUSE` follows the first error, and each further pause is twice as long, up to
# `_LONGEST_PAUSE`. An error of work that ran longer than `_LONGEST_PAUSE` counts as the first error.
_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 60.0


class BackgroundThread:
    """A daemon thread that runs its work until the work returns, and runs the work again after an unexpected error.

    Args:
      name: the thread's name; begins with `coordinator`.
      run: the work. The function checks `stopping`, and returns soon after `stop`. It is called again if it raises.
      on_failure: called on the thread with each unexpected error, before the pause.
      finish: called on the thread once, when the work has ended.
    """

    def __init__(
        self,
        name: str,
        run: Callable[[], object],
        on_failure: Callable[[BaseException], object] | None = None,
        finish: Callable[[], object] = lambda: None,
    ) -> None:
        self.stopping = threading.Event()
        self._run_once = run
        self._on_failure = on_failure
        self._finish = finish
        self.thread = threading.Thread(target=self._run_guarded, name=name, daemon=True)

    def start(self) -> None:
        self.thread.start()

    def stop(self) -> None:
        """Asks the thread to end."""
        self.stopping.set()

    def is_alive(self) -> bool:
        return self.thread.is_alive()

    def wait_stopped(self, timeout: float | None = None) -> bool:
        """Waits at most `timeout` seconds for the thread to end; returns whether the thread has ended."""
        # Joining a thread that was not started would raise.
        if self.is_alive():
            self.thread.join(timeout)
        return not self.is_alive()

    def _run_guarded(self) -> None:
        pause, is_over = _FIRST_PAUSE, False
        while not is_over:
            began = time.monotonic()
            try:
                self._run_once()
                is_over = True
            except BaseException as error:  # noqa: BLE001 - logged, reported, and the work goes on
                pause = _FIRST_PAUSE if time.monotonic() - began > _LONGEST_PAUSE else pause
                _report(self.thread.name, error, f"goes on after {pause:g} s", self._on_failure)
                is_over = self.stopping.wait(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
        try:
            self._finish()
        except BaseException:
            _logger.exception("The thread %s could not release what it used.", self.thread.name)


def start_once(
    name: str, work: Callable[[], object], on_failure: Callable[[BaseException], object] | None = None
) -> threading.Thread:
    """Starts a daemon thread that does some work once. An error is logged, and passed to `on_failure`."""

    def run() -> None:
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - logged and reported
            _report(name, error, "ends", on_failure)

    thread = threading.Thread(target=run, name=name, daemon=True)
    thread.start()
    return thread


def _report(
    name: str, error: BaseException, consequence: str, on_failure: Callable[[BaseException], object] | None
) -> None:
    _logger.error(
        "The thread %s met an unexpected %s and %s. This is a defect of coordinator, unless the traceback ends in code "
        "of the program; please report it with the traceback.",
        name,
        type(error).__name__,
        consequence,
        exc_info=error,
    )
    if on_failure is None:
        return
    try:
        on_failure(error)
    except BaseException:
        _logger.exception("The thread %s could not report its error.", name)
