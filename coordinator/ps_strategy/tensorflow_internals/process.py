"""This process as a client: its environment, logs and errors, its connection to the cluster.

Each change of TensorFlow is a scope, or an object with `close`, so that the change ends with the strategy.
"""

import contextlib
import ctypes
import functools
import logging
import math
import os
import pathlib
import re
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import context, executor
from tensorflow.python.profiler.internal import _pywrap_profiler

from coordinator.versions import private_names_needed

_FATAL = 3
# Functions that TensorFlow creates, traces and drops at each save or restore of variables on several servers.
_TRACED_EACH_TIME = ("tf_function_save", "tf_function_restore")
# The longest lifetime of a silent client that TensorFlow accepts, in seconds.
_MOST_SECONDS = 2**31 - 1
# The device of a process that is not connected to a cluster.
_FORMER_DEVICE = "/job:localhost/"
_FORMER_ERROR = re.compile(rf"{_FORMER_DEVICE}\S* (unknown device|not found)")
MADE_BEFORE = (
    "It uses what was made before the strategy, such as a dataset, a variable, a layer, a lookup table or a random "
    "generator. Nothing but tensors can be used once the strategy has connected this process to a cluster: make it "
    "after the strategy."
)

_TOO_LARGE = (
    "A tensor of more than 2 GB cannot be sent from one process to another. Pass and return parts of it; divide a "
    "variable by a variable_partitioner of the strategy, or read rows of it by tf.gather."
)
NOT_CALLED_BACK = (
    "A server cannot call this program back, which runs a part of the function, such as tf.py_function. As `chief` in "
    "the cluster, give an address of this program that the servers reach, and let them through to its port."
)
_EXPLAINED: tuple[tuple[Any, re.Pattern[str], str], ...] = (
    # The name of the client's device changes when the process is connected.
    (tf.errors.InvalidArgumentError, _FORMER_ERROR, MADE_BEFORE),
    (tf.errors.InternalError, re.compile("exceeds the 2GB protobuf limit"), _TOO_LARGE),
    (
        tf.errors.UnavailableError,
        re.compile(r"(failed to connect|errors resolving)[^\n]*\nAdditional GRPC[^\n]* from remote target /job:chief/"),
        NOT_CALLED_BACK,
    ),
)

# TensorFlow reads these settings only from the environment.
_ENVIRONMENT = {
    # With streaming, the client does not wait for the answers to calls: calls to a dead worker would seem to succeed.
    "TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE": "False",
    # Without this setting, saving a checkpoint waits for the executors of all workers, including dead workers.
    "TF_PS_DISABLE_ASYNC_EXECUTOR_GLOBALLY": "True",
    # A call must fail without a delay if a server dies during the call, or while the server is being added to the
    # cluster. Otherwise everything waits for the server.
    "GRPC_FAIL_FAST": "true",
}
# The same, unless the user has set them.
_DEFAULTS = {
    # Empty means no proxy. Without the variable, gRPC would reach the servers through `http_proxy`, which many set.
    "grpc_proxy": "",
    # The default of newer releases of gRPC. With the former one, the listening socket may lose its entries in epoll
    # instances while it is replaced (`reached_only_at`), and no server can then call this program back.
    "GRPC_POLL_STRATEGY": "epoll1",
}


@contextlib.contextmanager
def quiet_logs() -> Iterator[None]:
    """A scope in which TensorFlow logs neither events that the library reports, nor advice that no user can follow.

    The library reports each event in one line of its logger `coordinator`. TensorFlow's C++ code writes pages about the
    same events to standard error, past Python's logging: each call to a server that is gone, with gRPC's details. So
    in the scope, the C++ code logs only its last words before it ends the process (`FATAL`). If the user has set
    `TF_CPP_MIN_LOG_LEVEL`, or the logger `coordinator` to the level DEBUG, the C++ code logs as usual.
    """
    logger = tf.get_logger()
    logger.addFilter(_is_for_users)
    level = _FATAL
    # Another build of TensorFlow may lack the functions. Then its logs are not silent, and everything else works.
    with contextlib.suppress(AttributeError, OSError, ValueError):
        level = minimum_level()
    is_debugged = logging.getLogger("coordinator").isEnabledFor(logging.DEBUG)
    is_changed = level < _FATAL and "TF_CPP_MIN_LOG_LEVEL" not in os.environ and not is_debugged
    try:
        if is_changed:
            set_minimum_level(_FATAL)
        yield
    finally:
        if is_changed:
            set_minimum_level(level)
        logger.removeFilter(_is_for_users)


def _is_for_users(record: logging.LogRecord) -> bool:
    """Returns False for the advice to avoid retracing, if the advice is about one of TensorFlow's own functions."""
    # Only advice is formatted: formatting fails for a message with wrong arguments, which Python's logging reports.
    is_advice = "triggered tf.function retracing" in str(record.msg)
    return not (is_advice and any(name in record.getMessage() for name in _TRACED_EACH_TIME))


def tensorflow_library(name: str) -> ctypes.CDLL:
    """Returns a library of TensorFlow's C++ code, "framework" or "cc". Raises OSError if another build lacks it."""
    return ctypes.CDLL(str(pathlib.Path(tf.sysconfig.get_lib()) / f"libtensorflow_{name}.so.2"))


def _function_of_absl(name: str) -> Any:
    """Returns a function of Abseil, whose names contain the release of Abseil that TensorFlow was built with."""
    options = pathlib.Path(tf.sysconfig.get_include()) / "absl" / "base" / "options.h"
    [release] = re.findall(r"#define ABSL_OPTION_INLINE_NAMESPACE_NAME (\w+)", options.read_text())
    return tensorflow_library("framework")[f"_ZN4absl{len(release)}{release}{name}"]


def minimum_level() -> int:
    """Returns the level below which C++ code logs nothing: 0 for INFO to 3 for FATAL."""
    # Private: TensorFlow reads TF_CPP_MIN_LOG_LEVEL only when it is loaded, and has no other switch.
    return int(_function_of_absl("11MinLogLevelEv")())


def set_minimum_level(level: int) -> None:
    # Private: see `minimum_level`.
    _function_of_absl("14SetMinLogLevelENS0_18LogSeverityAtLeastE")(level)


@contextlib.contextmanager
def client_environment() -> Iterator[None]:
    """A scope with the environment that the runtime needs, and quiet TensorFlow logs. Remote calls need the scope."""
    wanted = {**_ENVIRONMENT, **{name: os.environ.get(name, value) for name, value in _DEFAULTS.items()}}
    former = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        with quiet_logs():
            yield
    finally:
        for name, value in former.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextlib.contextmanager
def attribute_replaced(owner: Any, name: str, replacement: Any) -> Iterator[None]:
    """Replaces an attribute of a module, class or object in a scope. A value that other code sets there stays."""
    with private_names_needed():
        was_own, former = name in vars(owner), getattr(owner, name)
    setattr(owner, name, replacement)
    try:
        yield
    finally:
        if vars(owner).get(name) is replacement:
            if was_own:
                setattr(owner, name, former)
            else:
                delattr(owner, name)


@contextlib.contextmanager
def profiles_reported(report: Callable[[str], object]) -> Iterator[None]:
    """A scope in which `report` gets the folder of the first profile of this process, before the profile begins."""
    # Private: `tf.profiler.experimental.start`, `Profile`, `tf.summary.trace_on` and Keras all start this session.
    stock: Any = _pywrap_profiler.ProfilerSession
    reported: list[str] = []

    class ProfilerSession(stock):
        def start(self, logdir: Any, options: Any) -> Any:
            # If `logdir` is empty, TensorFlow only prepares for a profile.
            if logdir and not reported:
                reported.append(logdir)
                report(os.fspath(logdir))
            return super().start(logdir, options)

    with attribute_replaced(_pywrap_profiler, "ProfilerSession", ProfilerSession):
        yield


@contextlib.contextmanager
def errors_explained() -> Iterator[None]:
    """A scope in which some errors of TensorFlow that give no advice begin with a sentence of advice."""
    # The error classes are public. No other place sees the errors of all operations.
    with contextlib.ExitStack() as replaced:
        for error, pattern, sentence in _EXPLAINED:
            init = functools.partialmethod(_init_explained, error.__init__, pattern, sentence)
            replaced.enter_context(attribute_replaced(error, "__init__", init))
        yield


def _init_explained(
    self: Any, stock: Any, pattern: re.Pattern[str], sentence: str, node_def: Any, op: Any, message: str, *args: Any
) -> None:
    if pattern.search(message) and sentence not in message:
        message = f"{sentence} ({message})"
    stock(self, node_def, op, message, *args)


def is_from_before(tensor: tf.Tensor) -> bool:
    """Returns whether a resource or dataset is useless, because it was made before this process was connected."""
    return _FORMER_DEVICE in tensor.device


def current_server_def() -> Any | None:
    # Private: `tf.config.experimental_connect_to_cluster` sets the `ServerDef`, and no public function reads it.
    return context.get_server_def()


def set_server_def(server_def: Any) -> None:
    """Makes this process a task of a cluster, once in its life.

    Variables that this process created before are lost, because the name of their device changes.
    """
    # Private: the public call adds all tasks together and waits for dead tasks.
    context.context().set_server_def(server_def)
    context.ensure_initialized()


def update_server_def(server_def: Any, client_timeout: float) -> None:
    """Connects to tasks that were added or restarted, and disconnects from tasks that the `ServerDef` no longer has.

    A newly connected task frees this client's objects when it has not heard from the client for `client_timeout`
    seconds. TensorFlow sends no keep-alive to such tasks, so `ClientLease` does. Raises `tf.errors.OpError` if a task
    does not answer.
    """
    # Private: every public way to change the cluster makes all variables unreadable.
    context.context().update_server_def(server_def, keep_alive_secs=min(math.ceil(client_timeout), _MOST_SECONDS))


def leave_calls_to_parent() -> None:
    """Lets a process that was just forked delete TensorFlow's objects without waiting for calls of its parent.

    The forked process has no thread that would end such a call.
    """
    # Private: the deletion of an executor waits for its calls, and the deletion of the context for all calls.
    executor.Executor.__del__ = lambda self: None
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(context.context()._context_handle))


def context_id() -> int:
    """Returns the number that identifies this client on every server. The process keeps the number while it lives."""
    # Private: no public function returns this number.
    return int(pywrap_tfe.TFE_GetContextId(context.context()._context_handle)) % 2**64


@contextlib.contextmanager
def reset_watched(before: Callable[[], object], after: Callable[[], object]) -> Iterator[None]:
    """A scope in which `before` and `after` are called before and after each reset of TensorFlow by the program."""
    # Private: the function that resets TensorFlow is private itself, and has no hook.
    stock = context._reset_context

    @functools.wraps(stock)
    def reset() -> None:
        before()
        stock()
        after()

    with attribute_replaced(context, "_reset_context", reset):
        yield
