"""Calls into TensorFlow that may never return, on threads that are abandoned in that case.

A call to a server needs threads of this process too, and all of these threads may be busy: each generator of
`tf.data.Dataset.from_generator` that waits occupies a thread.
"""

import concurrent.futures
import functools
import queue
import threading
from collections.abc import Callable, Collection
from typing import TypeVar

import tensorflow as tf

from coordinator.background_thread import start_once
from coordinator.ps_strategy.tensorflow_internals.functions import own_executor

# Raised by the client's own calls while a server cannot be reached. The server may answer again.
UNREACHED = (tf.errors.UnavailableError, tf.errors.AbortedError, tf.errors.DeadlineExceededError)

# Many threads cost little, because each server needs only a few short calls.
_MOST_THREADS = 16

Argument = TypeVar("Argument")
Result = TypeVar("Result")


class CallThread:
    """A daemon thread that makes calls in order, each with an executor that no other thread uses.

    The allocations of large calls stay in one arena of the C library's heap. The C library assigns arenas to new
    threads round robin, and an arena keeps the memory that it once needed. If each large call had its own thread, each
    of the first calls would add the memory of a call to the process, up to the number of arenas (8 per processor).
    """

    def __init__(self, name: str) -> None:
        self._lock = threading.Lock()
        self._is_ended = False
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        start_once(name, functools.partial(_make_calls, self._calls))

    def begin(self, call: Callable[[], Result]) -> concurrent.futures.Future[Result]:
        """Queues a call for the thread. Raises CancelledError after `end`."""
        future: concurrent.futures.Future[Result] = concurrent.futures.Future()

        def run() -> None:
            try:
                with own_executor():
                    result = call()
            except BaseException as error:  # noqa: BLE001 - the future raises it
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._lock:
            if self._is_ended:
                raise tf.errors.CancelledError(None, None, "The thread that makes this call has ended.")
            self._calls.put(run)
        return future

    def end(self) -> None:
        """Lets the thread end after the calls that were begun; does not wait for them."""
        with self._lock:
            self._is_ended = True
            self._calls.put(None)


def _make_calls(calls: "queue.SimpleQueue[Callable[[], None] | None]") -> None:
    while (call := calls.get()) is not None:
        call()
        # Frees arguments and results before the next call.
        del call


def on_own_thread(name: str, call: Callable[[], Result]) -> concurrent.futures.Future[Result]:
    """Calls a function on a new daemon thread with its own executor.

    An error stays in the new thread's executor. A call into TensorFlow that never returns blocks only the new thread.
    """
    thread = CallThread(name)
    future = thread.begin(call)
    thread.end()
    return future


def call_within(seconds: float, name: str, call: Callable[[], Result]) -> Result:
    """Calls a function on a new thread. Raises TimeoutError after `seconds`; the call then continues."""
    called = on_own_thread(name, call)
    if not concurrent.futures.wait([called], seconds).done:
        raise TimeoutError(f"A call into TensorFlow has not returned in {seconds:g} s.")
    return called.result()


def in_parallel(
    name: str, function: Callable[[Argument], Result], arguments: Collection[Argument]
) -> dict[Argument, Result]:
    """Calls a function with each argument, on several threads, and waits. Each call must return in bounded time."""
    with concurrent.futures.ThreadPoolExecutor(_MOST_THREADS, name) as threads:
        return dict(zip(arguments, threads.map(function, arguments), strict=True))
