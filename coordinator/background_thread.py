"""A thread of the library's own: it has a name, begins with `start`, and ends soon after `stop`."""

import threading
from abc import ABC, abstractmethod


class BackgroundThread(ABC):
    """What runs on a thread of its own until it is stopped.

    Args:
      name: the thread's.

    Attributes:
      thread: that thread.
    """

    def __init__(self, name: str) -> None:
        self._stop = threading.Event()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self.thread.start()

    def stop(self) -> None:
        """Asks the thread to end."""
        self._stop.set()

    def wait_stopped(self, timeout: float) -> bool:
        """Waits at most `timeout` seconds for the thread to end; whether it did."""
        self.thread.join(timeout)
        return not self.thread.is_alive()

    @abstractmethod
    def _run(self) -> None:
        """Runs on the thread, until `_stop` is set."""
