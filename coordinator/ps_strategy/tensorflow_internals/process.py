"""This process as a client: what it is connected to, and what its threads run calls with."""

import contextlib
import math
import os
from collections.abc import Iterator
from typing import Any

from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import context, executor

_MOST_SECONDS = 2**31 - 1


def prepare_process() -> None:
    """Sets what the runtime reads from the environment; to be called before the first remote call."""
    # Streaming sends each call without waiting for its answer, so that calls to a dead worker seem to succeed.
    os.environ["TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE"] = "False"
    # Otherwise saving a checkpoint waits for the executors of all workers, dead ones included.
    os.environ["TF_PS_DISABLE_ASYNC_EXECUTOR_GLOBALLY"] = "True"
    # A server that dies while it is called, or while it is being named, must make that fail at once: otherwise it is
    # waited for, by everybody.
    os.environ["GRPC_FAIL_FAST"] = "true"


def current_server_def() -> Any | None:
    """The `tf.train.ServerDef` that this process is connected by, or None."""
    # Private: `tf.config.experimental_connect_to_cluster` sets it, and nothing public tells it.
    return context.get_server_def()


def set_server_def(server_def: Any) -> None:
    """Makes this process a task of a cluster, for the first time in its life.

    Variables made on this process before are lost to it: their device changes its name.
    """
    # Private: the public call adds every task at once and waits for the dead ones.
    context.context().set_server_def(server_def)
    context.ensure_initialized()


def update_server_def(server_def: Any, client_timeout: float) -> None:
    """Connects to the tasks that were added or restarted, and lets go of those that are no longer named.

    Args:
      server_def: the `tf.train.ServerDef` that names the tasks.
      client_timeout: a task that is connected to now frees what we make there when it has not heard of us for so many
        seconds. TensorFlow says nothing to such tasks by itself; see `client_lease`.

    Raises:
      tf.errors.OpError: a named task does not answer.
    """
    # Private: nothing public changes the membership without making every variable unreadable.
    context.context().update_server_def(server_def, keep_alive_secs=min(math.ceil(client_timeout), _MOST_SECONDS))


def bind_executor() -> Any:
    """Gives the calling thread an executor of its own, which runs each call before it returns.

    The thread has it for as long as the caller keeps what is returned; then it falls back to the one that all share.
    On that one, the failure of a call poisons what else is under way, on whichever worker, and connecting to a worker
    waits for all of it. Entering `executor_scope` for each call would couple the threads too: leaving it waits for the
    default executor, which waits for handles to be destroyed on every worker, frozen ones too.
    """
    # Private: the public API has no executors.
    bound = executor.new_executor(enable_async=False)
    context.context().executor = bound
    return bound


@contextlib.contextmanager
def own_executor() -> Iterator[None]:
    """A scope in which the calling thread has an executor of its own, so that an error stays in it and goes with it.

    For threads that have none of their own already.
    """
    # Held until the end: the thread has it for as long.
    bound = bind_executor()
    try:
        yield
    finally:
        bound.clear_error()


def context_id() -> int:
    """The number by which every server knows what this client makes there; it is one for the process's whole life."""
    # Private: nothing public tells it.
    return int(pywrap_tfe.TFE_GetContextId(context.context()._context_handle)) % 2**64
