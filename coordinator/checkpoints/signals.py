"""Saves a checkpoint when the process is told to end, for example before a scheduler takes the machine away."""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from types import FrameType

from coordinator.background_thread import start_once

# The delay of `_interrupt_in_a_moment`, in seconds.
_MOMENT = 0.01


@contextlib.contextmanager
def save_at_signals(
    save: Callable[[], object], signals: Collection[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1)
) -> Iterator[None]:
    """Opens a scope in which a signal ends the program, after the program has saved a checkpoint.

        with strategy, coordinator.checkpoints.save_at_signals(lambda: checkpoints.save(now=True)):
            train()

    The signal interrupts the main thread wherever the thread waits, as Ctrl-C does, but raises `SystemExit`. `save` is
    called when the scope is left. The exit code is 128 + the number of the signal, as for a program that the signal has
    killed. Further signals are ignored until the process ends, so that `finally` blocks and the `close` of a strategy
    run to their end. Ctrl-C can still interrupt this code if SIGINT is not in `signals`. SIGKILL ends the process. The
    main thread must enter the scope.

    Args:
      save: a function that saves a checkpoint. A save in the background is complete when the strategy is closed.
      signals: the signals that end the program. Slurm and Kubernetes send SIGTERM. `sbatch --signal=USR1@60` sends
        SIGUSR1 60 s before the time limit.

    Raises:
      SystemExit: a signal arrived.
    """
    scope = _InterruptingSignals(signals)
    try:
        with scope:
            yield
    finally:
        if scope.received is not None:
            save()
    if scope.received is not None:
        # The code in the scope has caught `SystemExit`.
        raise scope.exit()


class _InterruptingSignals:
    """A scope in which a signal raises SystemExit in the main thread. Further signals are then ignored.

    `received` is the number of the first signal, or None.
    """

    def __init__(self, signals: Collection[signal.Signals]) -> None:
        self.received: int | None = None
        # Whether the next SIGINT must raise SystemExit.
        self._is_due = False
        self._signals = signals

    def exit(self) -> SystemExit:
        assert self.received is not None
        return SystemExit(128 + self.received)

    def __enter__(self) -> "_InterruptingSignals":
        self._hook, sys.unraisablehook = sys.unraisablehook, self._on_unraisable
        self._handlers = {number: signal.signal(number, self._on_signal) for number in self._signals}
        self._interrupt = signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._interrupt)
        for number, handler in self._handlers.items():
            # Another signal must not end the program before the strategy is closed.
            signal.signal(number, handler if self.received is None else signal.SIG_IGN)
        sys.unraisablehook = self._hook

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        if self.received is not None:
            return
        self.received = number
        if number == signal.SIGINT:
            raise self.exit()
        self._is_due = True
        # The exception is raised by SIGINT, which the closure queue postpones until a change of the queue is complete.
        signal.raise_signal(signal.SIGINT)

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._is_due:
            self._is_due = False
            raise self.exit()
        if callable(self._interrupt):
            self._interrupt(number, frame)

    def _on_unraisable(self, unraisable: "sys.UnraisableHookArgs") -> None:
        if not (self.received is not None and isinstance(unraisable.exc_value, SystemExit)):
            self._hook(unraisable)
            return
        # Python ignores exceptions of finalizers. SIGINT is sent again later, when the main thread is elsewhere.
        self._is_due = True
        start_once("coordinator-signal", _interrupt_in_a_moment)


def _interrupt_in_a_moment() -> None:
    threading.Event().wait(_MOMENT)
    main = threading.main_thread().ident
    assert main is not None
    signal.pthread_kill(main, signal.SIGINT)
