"""What a test left running: threads of the library, and child processes.

A server that was started again, and a thread that took the place of one that ended, are no leftovers: things are told
apart by what they are (a thread's name, a process's command line), and what counts is how many there are of a kind.
"""

import threading
import time
from collections import Counter

import psutil

# Threads of other libraries (TensorFlow's, gRPC's) live as long as the process, which is no fault of a test.
THREAD_PREFIX = "coordinator"

_POLL_INTERVAL = 0.05


class Leftovers:
    """Compares what runs now with what ran when this was made."""

    def __init__(self) -> None:
        self._before = _running()

    def wait_gone(self, timeout: float) -> list[str]:
        """Waits until nothing runs that did not run before.

        Args:
          timeout: how long what is ending may take to end, in seconds.

        Returns:
          What still runs then, in words; an empty list when nothing does.
        """
        deadline = time.monotonic() + timeout
        pause = threading.Event()
        while (left := _running() - self._before) and time.monotonic() < deadline:
            pause.wait(_POLL_INTERVAL)
        return [f"{count} x {kind}" for kind, count in left.items()]


def _running() -> Counter[str]:
    """Counts the library's threads and this process's living descendants by what they are."""
    running = Counter(
        f"thread {thread.name}" for thread in threading.enumerate() if thread.name.startswith(THREAD_PREFIX)
    )
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != psutil.STATUS_ZOMBIE:
                running[f"process {' '.join(process.cmdline())}"] += 1
        except psutil.NoSuchProcess:
            continue
    return running
