"""This process as a client: its environment, logs and errors, its connection to the cluster, its threads' executors.

Each change of TensorFlow is a scope, or an object with `close`: it ends with the strategy.
"""

import collections
import contextlib
import ctypes
import functools
import logging
import math
import os
import pathlib
import re
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python import pywrap_tfe
from tensorflow.python.eager import context, executor
from tensorflow.python.profiler.internal import _pywrap_profiler

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
    # The client's device has another name since the process was connected.
    (tf.errors.InvalidArgumentError, _FORMER_ERROR, MADE_BEFORE),
    (tf.errors.InternalError, re.compile("exceeds the 2GB protobuf limit"), _TOO_LARGE),
    (
        tf.errors.UnavailableError,
        re.compile(r"(failed to connect|errors resolving)[^\n]*\nAdditional GRPC[^\n]* from remote target /job:chief/"),
        NOT_CALLED_BACK,
    ),
)

# TensorFlow reads these from the environment and has no other switch for them.
_ENVIRONMENT = {
    # Streaming does not wait for the answers to calls: calls to a dead worker would seem to succeed.
    "TF_ENABLE_EAGER_CLIENT_STREAMING_ENQUEUE": "False",
    # Otherwise saving a checkpoint waits for the executors of all workers, dead ones included.
    "TF_PS_DISABLE_ASYNC_EXECUTOR_GLOBALLY": "True",
    # Calls must fail without a delay if a server dies during a call, or while it is added to the cluster. Otherwise
    # everything waits for the server.
    "GRPC_FAIL_FAST": "true",
}
# Empty for no proxy. Otherwise gRPC asks `http_proxy`, which many sites set, for the servers.
_PROXY = "grpc_proxy"


@contextlib.contextmanager
def quiet_logs() -> Iterator[None]:
    """A scope in which TensorFlow logs neither events that the library reports, nor advice that no user can follow.

    The library reports each event in one line of its logger `coordinator`. TensorFlow's C++ code writes pages about the
    same events to standard error, past Python's logging: each call to a server that is gone, with gRPC's details. So it
    is silent in the scope, except for its last words before it ends the process (`FATAL`), unless the user has set
    `TF_CPP_MIN_LOG_LEVEL`, or the logger `coordinator` to the level DEBUG.
    """
    logger = tf.get_logger()
    logger.addFilter(_is_for_users)
    level = _FATAL
    # Another build of TensorFlow may lack the functions: its logs are not silent then; everything else works.
    with contextlib.suppress(AttributeError, OSError):
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
    """Returns False for the advice to avoid retracing if the function is TensorFlow's own."""
    # Other messages are not formatted: formatting fails if a message has wrong arguments, which Python reports.
    is_advice = "triggered tf.function retracing" in str(record.msg)
    return not (is_advice and any(name in record.getMessage() for name in _TRACED_EACH_TIME))


def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(pathlib.Path(tf.sysconfig.get_lib()) / "libtensorflow_framework.so.2"))


def minimum_level() -> int:
    """Returns the level below which C++ code logs nothing: 0 for INFO to 3 for FATAL."""
    # Private: TensorFlow reads TF_CPP_MIN_LOG_LEVEL when it is loaded, and has no other switch.
    return int(_library()["_ZN4absl12lts_2025081411MinLogLevelEv"]())


def set_minimum_level(level: int) -> None:
    # Private: as above.
    _library()["_ZN4absl12lts_2025081414SetMinLogLevelENS0_18LogSeverityAtLeastE"](level)


@contextlib.contextmanager
def client_environment() -> Iterator[None]:
    """A scope with the environment that the runtime needs, and quiet TensorFlow logs. Enter it before remote calls."""
    wanted = {**_ENVIRONMENT, _PROXY: os.environ.get(_PROXY, "")}
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
    """A scope in which a module, class or object has another attribute. An attribute that is set again in it stays."""
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
    # Private: `tf.profiler.experimental.start`, `Profile`, `tf.summary.trace_on` and Keras all begin with it.
    stock: Any = _pywrap_profiler.ProfilerSession
    reported: list[str] = []

    class ProfilerSession(stock):
        def start(self, logdir: Any, options: Any) -> Any:
            # Without a folder, TensorFlow only prepares for a profile.
            if logdir and not reported:
                reported.append(logdir)
                report(os.fspath(logdir))
            return super().start(logdir, options)

    with attribute_replaced(_pywrap_profiler, "ProfilerSession", ProfilerSession):
        yield


@contextlib.contextmanager
def errors_explained() -> Iterator[None]:
    """A scope in which a sentence with advice is put before some errors of TensorFlow that give none."""
    # The classes are public; no other place sees the errors of all operations.
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
    """Returns whether a resource or dataset was made before this process was connected: it is useless now."""
    return _FORMER_DEVICE in tensor.device


def current_server_def() -> Any | None:
    # Private: `tf.config.experimental_connect_to_cluster` sets it, and there is no public way to read it.
    return context.get_server_def()


def set_server_def(server_def: Any) -> None:
    """Makes this process a task of a cluster, once in its life.

    Variables that this process created before are lost: the name of their device changes.
    """
    # Private: the public call adds all tasks together and waits for dead ones.
    context.context().set_server_def(server_def)
    context.ensure_initialized()


def update_server_def(server_def: Any, client_timeout: float) -> None:
    """Connects to tasks that were added or restarted, and disconnects from tasks that the `ServerDef` no longer has.

    A newly connected task frees this client's objects when it has not heard from the client for `client_timeout`
    seconds. TensorFlow by itself sends nothing to such tasks; see `ClientLease`. Raises `tf.errors.OpError` if a task
    does not answer.
    """
    # Private: every public way to change the cluster makes all variables unreadable.
    context.context().update_server_def(server_def, keep_alive_secs=min(math.ceil(client_timeout), _MOST_SECONDS))


def bind_executor() -> Any:
    """Gives the calling thread its own executor, which runs each call before it returns.

    The thread has it as long as the caller keeps the returned object. Then the thread falls back to the default
    executor, which all threads share. There, a failed call also fails other calls in progress, on any worker, and
    connecting to a worker waits for all of them. Entering `executor_scope` for each call would couple the threads, too:
    leaving it waits for the default executor, which waits for handles to be destroyed on every worker, frozen or not.
    """
    # Private: the public API has no executors.
    bound = executor.new_executor(enable_async=False)
    context.context().executor = bound
    return bound


@contextlib.contextmanager
def own_executor() -> Iterator[None]:
    """A scope in which a thread without an executor has its own: an error does not outlive the scope."""
    # Keeping the object keeps the thread's executor.
    bound = bind_executor()
    try:
        yield
    finally:
        bound.clear_error()


def leave_calls_to_parent() -> None:
    """Has a process that was just forked wait for no call of its parent when it deletes TensorFlow's objects.

    The process has no thread that would end such a call.
    """
    # Private: an executor waits for its calls when it is deleted, and the context for all executors' calls.
    executor.Executor.__del__ = lambda self: None
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(context.context()._context_handle))


def forget_error() -> None:
    """Has the calling thread's executor forget the error of a call, which the next call would raise again."""
    # Private, as in `bind_executor`.
    context.context().executor.clear_error()


def context_id() -> int:
    """Returns the number that identifies this client on every server; it does not change while the process lives."""
    # Private: nothing public returns it.
    return int(pywrap_tfe.TFE_GetContextId(context.context()._context_handle)) % 2**64


class PresentContext:
    """TensorFlow's context of this process and its servers, at the time when this object is made.

    A program that resets TensorFlow, as test suites do between two tests, replaces the context by one that is connected
    to no server. TensorFlow ends the process if the new context disconnects, or reads a variable of the former one.
    """

    def __init__(self) -> None:
        self._context = weakref.ref(context.context())

    @property
    def is_replaced(self) -> bool:
        """Whether TensorFlow was reset after this object was made."""
        # Private: nothing public tells one context from another.
        return context.context() is not self._context()


@contextlib.contextmanager
def reset_watched(before: Callable[[], object], after: Callable[[], object]) -> Iterator[None]:
    """A scope in which two functions are called before and after the program resets TensorFlow."""
    # Private: the function that resets TensorFlow is, and there is no hook.
    stock = context._reset_context

    @functools.wraps(stock)
    def reset() -> None:
        before()
        stock()
        after()

    with attribute_replaced(context, "_reset_context", reset):
        yield


class FunctionRegistration:
    """Mutual exclusion of the registration of functions in this process and of changes of the cluster.

    TensorFlow sends every traced function to all servers in its list, and fails ("Client for target ... not found") if
    the list and the connections do not match, as for a moment during each change of the cluster. Without this class, a
    worker that is lost while any thread traces a function makes the trace fail, and a function that was deleted at that
    moment stays on the servers.

    Neither waits longer than `longest_wait` seconds: one that hangs does not block the other. The removal of a
    function, which Python's garbage collection requests on any thread, never waits: it is deferred.
    """

    def __init__(self, longest_wait: float) -> None:
        self._longest_wait = longest_wait
        self._changed = threading.Condition()
        self._running = 0
        self._changing: int | None = None
        self._deferred: collections.deque[Any] = collections.deque()
        tensorflow: Any = context.context()
        self.register, self.remove = tensorflow.add_c_function, tensorflow.remove_function
        self._patches = contextlib.ExitStack()
        # Private: every trace calls this, also of users' functions and datasets, and there is no public hook.
        self._patches.enter_context(attribute_replaced(tensorflow, "add_c_function", self._register_in_turn))
        # Private: called for every deleted function. Its errors would only be printed: nothing can catch them.
        self._patches.enter_context(attribute_replaced(tensorflow, "remove_function", self._remove_in_turn))

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """A scope in which only the calling thread registers functions. One thread at a time may enter it."""
        with self._changed:
            self._changing = threading.get_ident()
            self._changed.wait_for(lambda: not self._running, self._longest_wait)
        try:
            yield
        finally:
            while not self._end_change():
                self._remove_connected(self._deferred.popleft())

    def close(self) -> None:
        """Restores TensorFlow's own methods, unless another instance has replaced them."""
        self._patches.close()

    def _register_in_turn(self, function: Any) -> None:
        with self._changed:
            own = (None, threading.get_ident())
            self._changed.wait_for(lambda: self._changing in own, self._longest_wait)
            self._running += 1
        try:
            self.register(function)
        finally:
            self._end_one()

    def _end_change(self) -> bool:
        """Ends the change. Returns False if functions must be removed first: one of the same name may be waiting."""
        with self._changed:
            if self._deferred:
                return False
            self._changing = None
            self._changed.notify_all()
            return True

    def _remove_in_turn(self, name: Any) -> None:
        with self._changed:
            if self._changing is not None:
                self._deferred.append(name)
                return
            self._running += 1
        try:
            self._remove_connected(name)
        finally:
            self._end_one()

    def _remove_connected(self, name: Any) -> None:
        # After a failed change, servers may lack a connection; they forget the function anyway.
        with contextlib.suppress(tf.errors.InvalidArgumentError):
            self.remove(name)

    def _end_one(self) -> None:
        with self._changed:
            self._running -= 1
            self._changed.notify_all()
