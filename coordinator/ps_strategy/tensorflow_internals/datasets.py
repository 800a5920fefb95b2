"""Datasets in traced functions: the order of elements and effects, options, and files for caching.

    x = next(iterator)              IteratorGetNext ──► AssignAdd
    count.assign_add(1)             a control edge, although AssignAdd does not need x

TensorFlow does not run operations in program order; it orders only operations that use the same resource. At the end of
finite data, `IteratorGetNext` fails. A function that fails there must have no effect, because it runs again on a worker
that has data left. Without the control edge, operations that do not need the element would run twice.
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

from coordinator.ps_strategy.tensorflow_internals.functions import called_functions
from coordinator.ps_strategy.tensorflow_internals.process import attribute_replaced

# The name under which the order is registered with TensorFlow.
_ORDER = "coordinator_data_before_effects"
# Operations that fail at the end of the data.
_TAKES = frozenset({"IteratorGetNext", "IteratorGetNextSync"})


@contextlib.contextmanager
def dependencies_added(name: str, add: Callable[[Any], None]) -> Iterator[None]:
    """A scope in which `add` is called for each operation of the functions that are traced, in program order.

    `add` may add control edges, as TensorFlow does at that time. `name` is unique to the kind of edges.
    """
    # Private: automatic control dependencies have no public hook. This registry is a hook for kinds of operations.
    resolvers = auto_control_deps._acd_resource_resolvers_registry

    def resolve(operation: Any, reads: Any, writes: Any) -> bool:
        add(operation)
        # False says that the sets of resources that the operation reads and writes are unchanged.
        return False

    resolvers.register(resolve, name)
    try:
        yield
    finally:
        del resolvers._registry[name]


def data_before_effects() -> contextlib.AbstractContextManager[None]:
    """A scope in which functions are traced so that each effect waits for the elements that are taken before it."""
    return dependencies_added(_ORDER, _Order().add)


class _Order:
    """Control edges in each graph, from operations that take elements to the later operations with effects."""

    def __init__(self) -> None:
        # For each graph: the operations that take elements, and a bit mask of them for each operation that needs them.
        self._graphs: weakref.WeakKeyDictionary[Any, tuple[list[Any], dict[str, int]]] = weakref.WeakKeyDictionary()
        self._takes: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    def add(self, operation: Any) -> None:
        """Adds the next operation of a graph."""
        is_taking = takes_elements(operation) or self._calls_what_takes(operation)
        if operation.graph not in self._graphs:
            if not is_taking:
                return
            self._graphs[operation.graph] = [], {}
        taking, dependence = self._graphs[operation.graph]
        before = [*(tensor.op for tensor in operation.inputs), *operation.control_inputs]
        after = functools.reduce(operator.or_, (dependence.get(other.name, 0) for other in before), 0)
        if has_effects(operation):
            # TensorFlow may begin a called function before its arguments exist, but not before its control inputs ran.
            known = 0 if functions_of(operation) else after
            operation._add_control_inputs([taker for n, taker in enumerate(taking) if not known >> n & 1])
            after = (1 << len(taking)) - 1
        if is_taking:
            after |= 1 << len(taking)
            taking.append(operation)
        if after:
            dependence[operation.name] = after

    def _calls_what_takes(self, operation: Any) -> bool:
        graph = operation.graph
        functions = [graph._get_function(name) for name in functions_of(operation) if graph._is_function(name)]
        # An imported graph has definitions without graphs. The functions of these definitions are ordered already.
        return any(self._is_taking(function.graph) for function in functions if hasattr(function, "graph"))

    def _is_taking(self, graph: Any) -> bool:
        if graph not in self._takes:
            self._takes[graph] = any(
                takes_elements(inner) or self._calls_what_takes(inner) for inner in graph.get_operations()
            )
        return self._takes[graph]


def functions_of(operation: Any) -> list[str]:
    """Returns the names of the functions that a stateful operation calls; none for another operation."""
    return [name for _, name in called_functions(operation.node_def)] if operation.op_def.is_stateful else []


def takes_elements(operation: Any) -> bool:
    """Returns whether an operation takes an element of a dataset, and fails if there is none."""
    return operation.type in _TAKES


def has_effects(operation: Any) -> bool:
    """Returns whether an operation may change state. Reads and draws of random numbers do not."""
    is_read = operation.type in auto_control_deps_utils.RESOURCE_READ_OPS
    return auto_control_deps.op_is_stateful(operation) and not is_read and not takes_elements(operation)


def options_in_graph(dataset: tf.data.Dataset) -> tf.data.Options:
    """Returns the options that a function has set for its dataset, if they are known at tracing time."""
    # Private: `Dataset.options()` returns the same options, but warns that the graph may have other options.
    options: tf.data.Options = dataset._options_attr
    return options


@contextlib.contextmanager
def caches_replaced(file_of: Callable[[Any], Any]) -> Iterator[None]:
    """A scope in which the datasets of functions that the calling thread traces are cached in other files.

    `file_of` is called in the traced function with the name of a file, a string scalar. It returns the name to use.
    """
    # File names are replaced at tracing time. Later, names in functions that the dataset calls cannot be changed.
    stock, thread = tf.data.Dataset.cache, threading.get_ident()

    @functools.wraps(stock)
    @tf.autograph.experimental.do_not_convert
    def cache(self: Any, filename: Any = "", name: str | None = None) -> Any:
        if threading.get_ident() == thread and not tf.executing_eagerly():
            file = tf.convert_to_tensor(filename, tf.string)
            # A dataset without a file is cached in memory.
            filename = filename if tf.get_static_value(file) == b"" else file_of(file)
        return stock(self, filename, name)

    with attribute_replaced(tf.data.Dataset, "cache", cache):
        yield
