"""Datasets that are made in a function: their options, and the files in which they are cached.

The order of a function's data and effects: it takes its elements of datasets before it changes anything.

    x = next(iterator)              IteratorGetNext ──► AssignAdd
    count.assign_add(1)             a control edge, although AssignAdd does not need x

Program order is no order of execution: TensorFlow orders operations that use the same resource alone. At the end of
finite data `IteratorGetNext` fails. A function that fails so is to have no effect, since it is run where there is data
left. What did not need the element would have been done by then, and would be done twice.
"""

import contextlib
import functools
import operator
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.framework import auto_control_deps, auto_control_deps_utils

from coordinator.ps_strategy.tensorflow_internals.process import attribute_replaced

# Under this name the order is registered with TensorFlow.
_ORDER = "coordinator_data_before_effects"
# What fails at the end of the data.
_TAKES = frozenset({"IteratorGetNext", "IteratorGetNextSync"})


@contextlib.contextmanager
def data_before_effects() -> Iterator[None]:
    """A scope in which functions that are traced change nothing before they have taken the elements of before."""
    # Private: automatic control dependencies have no public hook; this one is for kinds of operations.
    order = _Order()
    resolvers = auto_control_deps._acd_resource_resolvers_registry
    resolvers.register(order.add, _ORDER)
    try:
        yield
    finally:
        del resolvers._registry[_ORDER]


class _GraphOrder:
    """The order of one graph.

    Attributes:
      taking: the operations so far that take elements.
      after: which of them each operation depends on, by a bit each.
    """

    def __init__(self) -> None:
        self.taking: list[Any] = []
        self.after: dict[str, int] = {}


class _Order:
    """Adds the control edges as TensorFlow adds its own, for each operation of a graph in the order of the program."""

    def __init__(self) -> None:
        self._graphs: weakref.WeakKeyDictionary[Any, _GraphOrder] = weakref.WeakKeyDictionary()
        # Whether functions take elements, by their graphs.
        self._takes: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    def add(self, operation: Any, reads: Any, writes: Any) -> bool:
        """Adds the next operation of a graph; returns False, since it changes nothing of what the operation uses."""
        order = self._graphs.get(operation.graph)
        is_taking = takes_elements(operation) or self._calls_what_takes(operation)
        if order is None:
            if not is_taking:
                return False
            order = self._graphs[operation.graph] = _GraphOrder()
        before = [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]
        after = functools.reduce(operator.or_, (order.after.get(other.name, 0) for other in before), 0)
        if has_effects(operation):
            # Of a call TensorFlow may begin operations before it has all arguments, but not before control edges.
            known = 0 if functions_of(operation) else after
            operation._add_control_inputs([each for n, each in enumerate(order.taking) if not known >> n & 1])
            after = (1 << len(order.taking)) - 1
        if is_taking:
            after |= 1 << len(order.taking)
            order.taking.append(operation)
        if after:
            order.after[operation.name] = after
        return False

    def _calls_what_takes(self, operation: Any) -> bool:
        """Returns whether an operation is a call, a branch or a loop with functions that take elements."""
        graph = operation.graph
        functions = [graph._get_function(name) for name in functions_of(operation) if graph._is_function(name)]
        # A graph that was imported has definitions without graphs, of functions that are ordered already.
        return any(self._is_taking(each.graph) for each in functions if hasattr(each, "graph"))

    def _is_taking(self, graph: Any) -> bool:
        if graph not in self._takes:
            self._takes[graph] = any(
                takes_elements(inner) or self._calls_what_takes(inner) for inner in graph.get_operations()
            )
        return self._takes[graph]


def functions_of(operation: Any) -> list[str]:
    """Returns the names of the functions that an operation with effects calls."""
    if not operation.op_def.is_stateful:
        return []
    values = [operation.get_attr(each.name) for each in operation.op_def.attr if each.type in ("func", "list(func)")]
    return [each.name for value in values for each in (value if isinstance(value, list) else [value])]


def takes_elements(operation: Any) -> bool:
    """Returns whether an operation takes an element of a dataset, and fails if there is none."""
    return operation.type in _TAKES


def has_effects(operation: Any) -> bool:
    """Returns whether an operation may change something: it is no read, and draws no random numbers alone."""
    is_read = operation.type in auto_control_deps_utils.RESOURCE_READ_OPS
    return auto_control_deps.op_is_stateful(operation) and not is_read and not takes_elements(operation)


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
