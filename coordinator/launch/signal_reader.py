"""Signals as calls on a separate thread.

Python runs a signal handler in its main thread, between two steps of Python code: a signal that arrives just before the
thread begins to wait, or while it runs TensorFlow, is not handled until then. It promises that a signal is handled at
once, whatever the main thread is doing.
"""

import os
import signal
from collections.abc import Callable, Collection

from coordinator.background_thread import BackgroundThread


class SignalReader:
    """A context manager for the main thread, which restores the handlers of the signals on leaving.

    Args:
      numbers: the signals. One that is ignored stays so: `nohup`, and shells in the background, set that.
      on_signal: gets each signal that arrives, in the reader's thread.
    """

    def __init__(self, numbers: Collection[signal.Signals], on_signal: Callable[[signal.Signals], None]):
        self._numbers = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
        self._on_signal = on_signal
        self._thread = BackgroundThread("coordinator-signals", self._read)

    def __enter__(self) -> "SignalReader":
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        self._thread.start()
        self._found_descriptor = signal.set_wakeup_fd(self._writing)
        # Python writes a signal's number to the descriptor only if the signal has a handler.
        self._found_handlers = {number: signal.signal(number, lambda *_: None) for number in self._numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._found_handlers.items():
            signal.signal(number, handler)
        signal.set_wakeup_fd(self._found_descriptor)
        self._thread.stop()
        os.close(self._writing)
        self._thread.wait_stopped()
        os.close(self._reading)

    def _read(self) -> None:
        while received := os.read(self._reading, 64):
            for number in received:
                if number in self._numbers:
                    self._on_signal(signal.Signals(number))
