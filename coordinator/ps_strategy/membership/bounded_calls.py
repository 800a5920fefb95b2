"""Calls into TensorFlow that may never return, on threads that are left behind then.

A call to a server needs threads of this process too, and all of them may be busy: each generator of
`tf.data.Dataset.from_generator` that waits takes one. So what must not wait for ever is called here.
"""

import concurrent.futures
import threading
from collections.abc import Callable
from typing import TypeVar

from coordinator.ps_strategy import tensorflow_internals

Result = TypeVar("Result")


def on_own_thread(name: str, call: Callable[[], Result]) -> concurrent.futures.Future[Result]:
    """Calls a function on a new daemon thread, with an executor that no other thread uses.

    An error stays with the executor of the thread that saw it. A call into TensorFlow that never returns keeps nothing
    but that thread.

    Args:
      name: of the thread.
      call: the function.

    Returns:
      A future of what it returns.
    """
    future: concurrent.futures.Future[Result] = concurrent.futures.Future()

    def run() -> None:
        try:
            with tensorflow_internals.own_executor():
                result = call()
        except BaseException as error:  # noqa: BLE001 - the future raises it
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future


def call_within(seconds: float, name: str, call: Callable[[], Result]) -> Result:
    """Calls a function on a new thread, and waits for it for a limited time.

    Args:
      seconds: how long.
      name: of the thread.
      call: the function.

    Returns:
      What it returns.

    Raises:
      TimeoutError: it has not returned in time. It goes on.
      BaseException: what it raises.
    """
    called = on_own_thread(name, call)
    if not concurrent.futures.wait([called], seconds).done:
        raise TimeoutError(f"A call into TensorFlow has not returned in {seconds:g} s.")
    return called.result()
