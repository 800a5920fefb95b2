"""Waiting in a test for what only a look can tell."""

import threading
import time
from collections.abc import Callable

# No test of the core needs more than a moment; a wait that lasts this long, in seconds, has failed.
LIMIT = 30.0

_POLL_INTERVAL = 0.001


def wait_until(is_true: Callable[[], object]) -> None:
    """Looks again and again until `is_true()`, and fails when that takes longer than `LIMIT`."""
    deadline = time.monotonic() + LIMIT
    pause = threading.Event()
    while not is_true():
        assert time.monotonic() < deadline, f"Not within {LIMIT} s."
        pause.wait(_POLL_INTERVAL)
