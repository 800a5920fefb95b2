"""What TensorFlow itself logs about the cluster, and about its own checkpoints, while a strategy is open.

The library reports each event in one line of its logger `coordinator`. TensorFlow's C++ code writes pages about the
same events to standard error, past Python's logging: each call to a server that is gone, with gRPC's details. So it is
silent meanwhile, except for what it writes before it ends the process (`FATAL`), unless the user has decided otherwise:
by `TF_CPP_MIN_LOG_LEVEL`, or by setting the logger `coordinator` to the level DEBUG.
"""

import contextlib
import ctypes
import logging
import os
import pathlib
from collections.abc import Iterator

import tensorflow as tf

_FATAL = 3
# Functions of TensorFlow that it creates, traces and drops with each save or restore of variables on several servers.
_TRACED_EACH_TIME = ("tf_function_save", "tf_function_restore")


@contextlib.contextmanager
def quiet_logs() -> Iterator[None]:
    """A scope in which TensorFlow logs neither what the library reports itself, nor what no user can act on."""
    logger = tf.get_logger()
    logger.addFilter(_is_for_users)
    level = _FATAL
    # Where another build of TensorFlow lacks the functions, its logs are not silent, and all else works.
    with contextlib.suppress(AttributeError, OSError):
        level = minimum_level()
    is_changed = level < _FATAL and _is_default()
    try:
        if is_changed:
            set_minimum_level(_FATAL)
        yield
    finally:
        if is_changed:
            set_minimum_level(level)
        logger.removeFilter(_is_for_users)


def _is_default() -> bool:
    return "TF_CPP_MIN_LOG_LEVEL" not in os.environ and not logging.getLogger("coordinator").isEnabledFor(logging.DEBUG)


def _is_for_users(record: logging.LogRecord) -> bool:
    """Returns False for the advice to avoid retracing of functions that are TensorFlow's own."""
    # Only this advice is formatted: formatting fails if the arguments of a message are wrong, which Python reports.
    is_advice = "triggered tf.function retracing" in str(record.msg)
    return not (is_advice and any(name in record.getMessage() for name in _TRACED_EACH_TIME))


def _library() -> ctypes.CDLL:
    return ctypes.CDLL(str(pathlib.Path(tf.sysconfig.get_lib()) / "libtensorflow_framework.so.2"))


def minimum_level() -> int:
    """Returns the level below which C++ code logs nothing: 0 for INFO to 3 for FATAL."""
    # Private: TensorFlow reads TF_CPP_MIN_LOG_LEVEL when it is loaded, and has no other switch.
    return int(_library()["_ZN4absl12lts_2025081411MinLogLevelEv"]())


def set_minimum_level(level: int) -> None:
    """Sets that level."""
    # Private: as above.
    _library()["_ZN4absl12lts_2025081414SetMinLogLevelENS0_18LogSeverityAtLeastE"](level)
