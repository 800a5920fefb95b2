"""Reads of variables that are answered from local copies."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import tensorflow as tf
from tensorflow.python.eager import record
from tensorflow.python.ops import control_flow_v2_func_graphs, resource_variable_ops


class Reader(Protocol):
    """Answers reads of one variable."""

    def copy(self, *, may_make: bool) -> Any:
        """Returns a tensor with the variable's value, or None to read the variable itself.

        Args:
          may_make: True if the whole value is needed rather than some rows, so that a new copy pays off.
        """

    def note_rows(self, rows: Any) -> None:
        """Records rows that were read from the variable itself."""


@contextlib.contextmanager
def reads_replaced(variables: Sequence[Any], readers: Sequence[Reader]) -> Iterator[None]:
    """A scope in which reads of variables are answered by their readers; gradients are still those of the variables.

    Args:
      variables: `tf.Variable`s.
      readers: one for each.

    Raises:
      ValueError: the reads of one of them are replaced already.
    """
    # Private: nothing public lets a read of an ordinary variable be answered from a tensor.
    with contextlib.ExitStack() as stack:
        for variable, reader in zip(variables, readers, strict=True):
            if "_read_variable_op" in vars(variable):
                raise ValueError(f"The variable {variable.name!r} is read from a local copy already: pull cannot nest.")
            for name, method in _replaced_reads(variable, reader).items():
                setattr(variable, name, method)
                stack.callback(vars(variable).pop, name, None)
        yield


@contextlib.contextmanager
def reads_not_replaced(variables: Sequence[Any]) -> Iterator[None]:
    """A scope inside `reads_replaced` in which these variables are read normally."""
    # Private: as above.
    replaced = [{name: vars(variable).pop(name, None) for name in _READS} for variable in variables]
    try:
        yield
    finally:
        for variable, methods in zip(variables, replaced, strict=True):
            vars(variable).update({name: method for name, method in methods.items() if method is not None})


_READS = ("_read_variable_op", "sparse_read", "gather_nd")


def _replaced_reads(variable: Any, reader: Reader) -> dict[str, Callable[..., Any]]:
    kind = type(variable)

    def recorded(copy: Any) -> Any:
        resource_variable_ops.variable_accessed(variable)
        # In the copy's own graph: a loop or branch takes its gradients to what it has captured, and no further.
        with copy.graph.as_default(), tf.control_dependencies(None):
            value = tf.identity(copy)
            # The tape records it as a read of the variable, so that gradients are those of the variable.
            record.record_operation("ReadVariableOp", [value], [variable.handle], lambda gradient: [gradient])
        return value

    def read(no_copy: bool = False) -> Any:
        copy = reader.copy(may_make=True)
        return kind._read_variable_op(variable, no_copy) if copy is None else recorded(copy)

    def rows(method: Callable[..., Any], gather: Callable[..., Any], indices: Any, name: str | None) -> Any:
        copy = reader.copy(may_make=False)
        if copy is not None:
            return gather(recorded(copy), indices, name=name)
        read_there = method(variable, indices, name)
        reader.note_rows(read_there)
        return read_there

    def sparse_read(indices: Any, name: str | None = None) -> Any:
        return rows(kind.sparse_read, tf.gather, indices, name)

    def gather_nd(indices: Any, name: str | None = None) -> Any:
        return rows(kind.gather_nd, tf.gather_nd, indices, name)

    return dict(zip(_READS, (read, sparse_read, gather_nd), strict=True))


def read_variable(variable: Any) -> tf.Tensor:
    """Reads the variable itself, without recording it on gradient tapes."""
    # Private: every public way to read goes through what `reads_replaced` replaces.
    if hasattr(variable, "parts"):
        return tf.concat([read_variable(part) for part in variable.parts], 0)
    return resource_variable_ops.gen_resource_variable_ops.read_variable_op(variable.handle, variable.dtype)


def graph_around(graph: Any) -> Any | None:
    """Returns the graph around a branch or a loop body; None for any other graph, including a separate function.

    A function that captures tensors of the graph around it cannot be called elsewhere.
    """
    # Private: no public attribute gives it, or distinguishes a branch from a function.
    is_part = isinstance(graph, control_flow_v2_func_graphs.ControlFlowFuncGraph)
    return graph.outer_graph if is_part else None


def is_within(graph: Any) -> bool:
    """Returns True if operations are currently added to this graph, or to a branch or loop inside it."""
    current = tf.compat.v1.get_default_graph()
    while current is not None and current is not graph:
        current = graph_around(current)
    return current is graph
