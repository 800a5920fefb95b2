"""The time by which the library's own threads wait and judge, which a test may replace by a time that it lets pass.

On an asyncio loop, the loop's own time has this part: the heartbeat's process asks it.
"""

import threading
import time


class Clock:
    """The time of this machine, in seconds."""

    def now(self) -> float:
        """Returns the time since an arbitrary moment; it never goes back."""
        return time.monotonic()

    def wait(self, event: threading.Event, timeout: float) -> bool:
        """Waits at most `timeout` seconds for an event; returns whether it is set."""
        return event.wait(timeout)


SYSTEM_CLOCK = Clock()
