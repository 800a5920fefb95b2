"""What XLA is asked to compile."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

# Private: nothing public tells that a function is to be compiled; this attribute is what the runtime itself looks at.
_COMPILED = "_XlaMustCompile"


def is_compiled(concrete: Any) -> bool:
    """Whether XLA is to compile a concrete function as a whole."""
    return _must_compile(concrete.function_def)


def compiled_calls(concrete: Any, is_remote: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    """The functions which XLA is to compile and which are given remote resources, inside of a concrete function.

    Args:
      concrete: a `tf.types.experimental.ConcreteFunction`.
      is_remote: tells of a tensor that it captured whether it stands for such a resource.

    Yields:
      The name of the Python function, and the captured tensor; for functions called by functions, in branches and in
      the bodies of loops as well.
    """
    graph = concrete.graph.as_graph_def()
    functions = {function.signature.name: function for function in graph.library.function}
    captures = concrete.captured_inputs
    placeholders = concrete.graph.inputs[len(concrete.graph.inputs) - len(captures) :]
    remote = {
        placeholder.op.name: captured
        for placeholder, captured in zip(placeholders, captures, strict=True)
        if is_remote(captured)
    }
    return _calls(graph.node, remote, functions)


def _calls(nodes: Sequence[Any], remote: dict[str, Any], functions: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The same for the nodes of one graph, in which `remote` has the resources by the names of their placeholders."""
    for node in nodes:
        given = [name for name in node.input if not name.startswith("^")]
        if remote.keys().isdisjoint(given):
            continue
        for name in _called(node):
            function = functions[name]
            # A branch takes all inputs but the first, which chooses it.
            taken = given[len(given) - len(function.signature.input_arg) :]
            inner = {
                argument.name: remote[outer]
                for argument, outer in zip(function.signature.input_arg, taken, strict=True)
                if outer in remote
            }
            if inner and _must_compile(function):
                yield _python_name(name), next(iter(inner.values()))
            yield from _calls(function.node_def, inner, functions)


def _must_compile(function: Any) -> bool:
    # Asking a map for a key that it lacks would add it, without a value, to the very function that workers are sent,
    # and they refuse every function that calls one like that.
    return _COMPILED in function.attr and bool(function.attr[_COMPILED].b)


def _called(node: Any) -> list[str]:
    """The functions that an operation calls."""
    values = node.attr.values()
    return [function.name for value in values for function in (value.func, *value.list.func) if function.name]


def _python_name(name: str) -> str:
    return re.sub(r"^__(?:inference|forward)_(.*?)_\d+$", r"\1", name)
