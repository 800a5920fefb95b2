"""TensorFlow, loaded into a process that servers are to be forked from."""

import contextlib
import gc
import os
import select
import socket
import threading
import time
import traceback
from collections.abc import Iterator

from coordinator.launch.serve import load_tensorflow

# How long a thread that was joined may still be seen, in seconds.
_THREAD_END_TIMEOUT = 1.0
_POLL_INTERVAL = 0.001


def load_for_forking(control: socket.socket) -> bool:
    """Loads TensorFlow, and nothing that would make a fork of this process unsafe or large.

    Args:
      control: a socket; when its other end is closed meanwhile, this process ends at once.

    Returns:
      Whether this process may be forked to become a server: TensorFlow is loaded, and started no thread.
    """
    with _ended_with(control), _no_threads_for_linear_algebra():
        try:
            load_tensorflow(os.environ)
        except Exception:  # noqa: BLE001 - an installation may be broken in any way
            # Every server tries for itself then, and has this in its own log.
            traceback.print_exc()
            return False
    # What the collector does not look at is not written to, and stays one copy for all servers.
    gc.collect()
    gc.freeze()
    return _is_single_threaded()


@contextlib.contextmanager
def _ended_with(control: socket.socket) -> Iterator[None]:
    """Ends this process, at once, if the other end of the socket is closed meanwhile."""
    done = os.eventfd(0)

    def watch() -> None:
        poll = select.poll()
        # Only the end of the socket: there are requests in it.
        poll.register(control, 0)
        poll.register(done, select.POLLIN)
        if any(descriptor != done for descriptor, _ in poll.poll()):
            os._exit(0)

    watcher = threading.Thread(target=watch, name="coordinator-preload")
    watcher.start()
    try:
        yield
    finally:
        os.eventfd_write(done, 1)
        watcher.join()
        os.close(done)


@contextlib.contextmanager
def _no_threads_for_linear_algebra() -> Iterator[None]:
    """Keeps NumPy's linear algebra, which no server uses, from starting threads when it is loaded."""
    found = os.environ.get("OPENBLAS_NUM_THREADS")
    os.environ["OPENBLAS_NUM_THREADS"] = "1"
    try:
        yield
    finally:
        del os.environ["OPENBLAS_NUM_THREADS"]
        if found is not None:
            os.environ["OPENBLAS_NUM_THREADS"] = found


def _is_single_threaded() -> bool:
    """Whether this process has one thread. One that was joined is seen for a moment more, so this looks again."""
    deadline = time.monotonic() + _THREAD_END_TIMEOUT
    pause = threading.Event()
    while len(os.listdir("/proc/self/task")) > 1:
        if time.monotonic() > deadline:
            return False
        pause.wait(_POLL_INTERVAL)
    return True
