"""Saves a checkpoint when the process is told to end, as a scheduler does before it takes the machine away."""

import contextlib
import signal
from collections.abc import Callable, Collection, Iterator
from types import FrameType


@contextlib.contextmanager
def save_at_signals(
    save: Callable[[], object], signals: Collection[signal.Signals] = (signal.SIGTERM, signal.SIGUSR1)
) -> Iterator[None]:
    """A scope in which a signal ends the program, after it has saved.

        with strategy, coordinator.checkpoints.save_at_signals(lambda: checkpoints.save(now=True)):
            train()

    The signal interrupts the main thread wherever it waits, as Ctrl-C does, but by `SystemExit`; `save` is called on
    the way out, and the exit code is 128 + the number of the signal, as for a program that the signal has killed.
    Further signals are ignored from then on. The main thread must enter the scope.

    Args:
      save: saves a checkpoint. A background save is complete when the strategy is closed.
      signals: SIGTERM is what Slurm and Kubernetes end a program with; SIGUSR1 what `sbatch --signal=USR1@60` sends
        60 s before the time limit.

    Raises:
      SystemExit: a signal arrived.
    """
    received: list[int] = []

    def leave(number: int, _: FrameType | None) -> None:
        for each in found:
            signal.signal(each, signal.SIG_IGN)
        received.append(number)
        raise SystemExit(128 + number)

    found = {number: signal.signal(number, leave) for number in signals}
    try:
        yield
    except SystemExit:
        if received:
            save()
        raise
    finally:
        # Not after a signal: another one would end the program before the strategy is closed.
        if not received:
            for number, handler in found.items():
                signal.signal(number, handler)
