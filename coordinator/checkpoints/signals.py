"""Saves a checkpoint when the process is told to end, as a scheduler does before it takes the machine away."""

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from types import FrameType

# In seconds.
_MOMENT = 0.01


@contextlib.contextmanager
def save_at_signals(
    save: Callable[[], object], signals: Collection[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1)
) -> Iterator[None]:
    """A scope in which a signal ends the program, after it has saved.

        with strategy, coordinator.checkpoints.save_at_signals(lambda: checkpoints.save(now=True)):
            train()

    The signal interrupts the main thread wherever it waits, as Ctrl-C does, but by `SystemExit`; `save` is called on
    the way out, and the exit code is 128 + the number of the signal, as for a program that the signal has killed.
    From then on, further signals are ignored. The main thread must enter the scope.

    Args:
      save: saves a checkpoint. A background save is complete when the strategy is closed.
      signals: SIGTERM is what Slurm and Kubernetes end a program with; SIGUSR1 what `sbatch --signal=USR1@60` sends
        60 s before the time limit.

    Raises:
      SystemExit: a signal arrived.
    """
    scope = _InterruptingSignals(signals)
    try:
        with scope:
            yield
    finally:
        if scope.received:
            save()
    if scope.received:
        # Something has ignored the exception.
        raise scope.exit()


class _InterruptingSignals:
    """A scope in which a signal raises SystemExit in the main thread. After one, further ones are ignored at its end.

    Args:
      signals: their numbers.

    Attributes:
      received: the numbers of those that have arrived.
    """

    def __init__(self, signals: Collection[signal.Signals]) -> None:
        self.received: list[int] = []
        self._signals = signals

    def exit(self) -> SystemExit:
        """Returns the exception for the first signal."""
        return SystemExit(128 + self.received[0])

    def __enter__(self) -> None:
        self._hook, sys.unraisablehook = sys.unraisablehook, self._on_unraisable
        self._handlers = {number: signal.signal(number, self._on_signal) for number in self._signals}
        self._interrupt = signal.signal(signal.SIGINT, self._on_interrupt)

    def __exit__(self, *_: object) -> None:
        signal.signal(signal.SIGINT, self._interrupt)
        for number, handler in self._handlers.items():
            # After a signal, another one would end the program before the strategy is closed.
            signal.signal(number, signal.SIG_IGN if self.received else handler)
        sys.unraisablehook = self._hook

    def _on_signal(self, number: int, _: FrameType | None) -> None:
        self.received.append(number)
        if number == signal.SIGINT:
            raise self.exit()
        # The queue postpones this one until a change is complete.
        signal.raise_signal(signal.SIGINT)

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self.received:
            raise self.exit()
        if callable(self._interrupt):
            self._interrupt(number, frame)

    def _on_unraisable(self, unraisable: "sys.UnraisableHookArgs") -> None:
        if not (self.received and isinstance(unraisable.exc_value, SystemExit)):
            self._hook(unraisable)
            return
        # Python ignores exceptions of finalizers; in a moment, the main thread is elsewhere.
        again = threading.Timer(_MOMENT, signal.pthread_kill, (threading.main_thread().ident, signal.SIGINT))
        again.name, again.daemon = "coordinator-signal", True
        again.start()
