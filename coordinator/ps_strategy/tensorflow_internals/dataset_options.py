"""Datasets that are made in a function: their options, and the files in which they are cached."""

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.tensorflow_internals.process import attribute_replaced


def options_in_graph(dataset: tf.data.Dataset) -> tf.data.Options:
    """Returns the options that the function has set, as far as they are known while it is traced."""
    # Private: `Dataset.options()` returns the same here, but warns that the graph may have other options.
    options: tf.data.Options = dataset._options_attr
    return options


@contextlib.contextmanager
def caches_replaced(file_of: Callable[[Any], Any]) -> Iterator[None]:
    """A scope in which the datasets of a function that this thread traces are cached in other files.

    Args:
      file_of: called, in the function, with the name of a file, a string scalar; returns the one to be used.
    """
    # The file is an argument of an operation, which cannot be changed in functions that the dataset calls.
    stock, thread = tf.data.Dataset.cache, threading.get_ident()

    # AutoGraph converts what a user's function calls.
    @functools.wraps(stock)
    @tf.autograph.experimental.do_not_convert
    def cache(self: Any, filename: Any = "", name: str | None = None) -> Any:
        if threading.get_ident() == thread and not tf.executing_eagerly():
            file = tf.convert_to_tensor(filename, tf.string)
            # Without one, it is cached in memory.
            filename = filename if tf.get_static_value(file) == b"" else file_of(file)
        return stock(self, filename, name)

    with attribute_replaced(tf.data.Dataset, "cache", cache):
        yield
