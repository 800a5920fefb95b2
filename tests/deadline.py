"""Waiting in a test by polling, for conditions without an event."""

import threading
import time
from collections.abc import Callable

# In seconds; far more than any test of the core needs.
LIMIT = 30.0

# In seconds. Most conditions query a server, so the interval grows while nothing happens.
_FIRST_INTERVAL, _LONGEST_INTERVAL = 0.001, 0.02


def wait_until(is_true: Callable[[], object], limit: float = LIMIT) -> None:
    """Polls until `is_true()`, and fails when that takes longer than `limit` seconds."""
    deadline = time.monotonic() + limit
    pause, interval = threading.Event(), _FIRST_INTERVAL
    while not is_true():
        assert time.monotonic() < deadline, f"Not within {limit} s."
        pause.wait(interval)
        interval = min(1.2 * interval, _LONGEST_INTERVAL)
