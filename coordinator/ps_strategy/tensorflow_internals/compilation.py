"""What XLA is asked to compile."""

import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from tensorflow.python.framework import op_def_registry

# Private: nothing public tells that a function is to be compiled; this attribute is what the runtime itself looks at.
_COMPILED = "_XlaMustCompile"

# What operations call those of their inputs that are the last arguments of their function. An operation that has
# several functions has inputs for each, with the name of the function before it.
_CAPTURED = ("other_arguments", "captured_inputs", "captured_tensors")

# Their first input chooses the function, which is given the others.
_CHOOSING = frozenset({"If", "StatelessIf", "Case", "StatelessCase"})


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
        if remote.keys().isdisjoint(node.input):
            continue
        for role, name in _called(node):
            function = functions.get(name)
            if function is None:
                continue
            inner = {
                argument: remote[outer] for argument, outer in passed_inputs(node, role, function) if outer in remote
            }
            if inner and _must_compile(function):
                yield _python_name(name), next(iter(inner.values()))
            yield from _calls(function.node_def, inner, functions)


def passed_inputs(node: Any, role: str, function: Any) -> list[tuple[str, str]]:
    """Which inputs of an operation it passes to a function that it calls.

    Args:
      node: the `tf.compat.v1.NodeDef` of the operation.
      role: the attribute of it that names the function, or has it in a list.
      function: the `FunctionDef`.

    Returns:
      The names of the function's arguments, each with the name of the operation's input that is passed for it. The
      elements that an operation on a dataset passes are not among its inputs; of an operation that calls its function
      in an unknown way, nothing is said.
    """
    given = [name for name in node.input if not name.startswith("^")]
    arguments = [argument.name for argument in function.signature.input_arg]
    places = _input_places(node, len(given))
    names = (f"{role}_other_arguments", f"{role}_other_args", *_CAPTURED)
    captured = next((places[name] for name in names if name in places), None)
    taken = given[captured or slice(int(node.op in _CHOOSING), None)]
    if len(taken) > len(arguments) or (len(taken) < len(arguments) and captured is None):
        return []
    return list(zip(arguments[len(arguments) - len(taken) :], taken, strict=True))


def _input_places(node: Any, count: int) -> dict[str, slice]:
    """Where in an operation's inputs each input of its definition is; nothing if that does not add up."""
    # Private: only an operation of a `tf.Graph` has a public definition, and those in functions are none.
    definition = op_def_registry.get(node.op)
    if definition is None:
        return {}
    places: dict[str, slice] = {}
    start = 0
    for argument in definition.input_arg:
        number, types = node.attr.get(argument.number_attr), node.attr.get(argument.type_list_attr)
        end = start + (number.i if number is not None else len(types.list.type) if types is not None else 1)
        places[argument.name] = slice(start, end)
        start = end
    return places if start == count else {}


def _must_compile(function: Any) -> bool:
    # Asking a map for a key that it lacks would add it, without a value, to the very function that workers are sent,
    # and they refuse every function that calls one like that.
    return _COMPILED in function.attr and bool(function.attr[_COMPILED].b)


def _called(node: Any) -> list[tuple[str, str]]:
    """The attributes of an operation that name functions, and the functions that it calls."""
    return [
        (role, function.name)
        for role, value in node.attr.items()
        for function in (value.func, *value.list.func)
        if function.name
    ]


def _python_name(name: str) -> str:
    return re.sub(r"^__(?:inference|forward)_(.*?)_\d+$", r"\1", name)
