"""Moves reads of variables out of loops, branches and called functions: to just before the operation that runs them.

    w (handle) ---> While                             w ---> ReadVariableOp ---> While
                      body: ReadVariableOp, a message                              body: the value
                            in each iteration

Reads of one variable at one place are one read. What is hoisted is a read that only the loop, branch or function
itself decides when to make: without control dependencies, of a variable that nothing in there changes or looks up rows
of, and not by `read_value()`, which reads where it is called. A read stays

- in the condition of a loop, and in its body if the end of the loop depends on an integer, a bool or a scalar that it
  reads: the loop may wait for another worker to change it;
- in a branch if the value is large, since the branch may not be taken.

Promises:
- A read sees each change that the function made before, and none that it makes after, as where it was.
- Gradients do not change: they are part of the graph already.

Decides which reads of variables a loop, a branch or a called function may leave to the operation that runs it.

All are functions of the operations, given as `NodeDef`s, and of the functions that they call, given as `FunctionDef`s.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.fusing.message_packing import MAX_PACKED_BYTES
from coordinator.ps_strategy.tensorflow_internals.functions import (
    called_functions,
    copied,
    is_stateful,
    renamed_by_content,
)
from coordinator.ps_strategy.tensorflow_internals.handles import is_on_parameter_server

# `tf.Variable.read_value` reads in its own name scope.
_READ_VALUE = re.compile(r"(^|/)Read(_\d+)?/ReadVariableOp(_\d+)?$")


def is_hoistable(node: Any) -> bool:
    """Returns True if an operation is a read of a variable that may be made elsewhere, as far as it says itself."""
    is_plain_read = node.op == "ReadVariableOp" and len(node.input) == 1 and not _READ_VALUE.search(node.name)
    # On a parameter server, reads of its variables send nothing.
    return is_plain_read and not is_on_parameter_server(node.device)


def reads_of(function: Any, number: int) -> list[Any]:
    """Returns the reads of an argument that may be hoisted."""
    argument = function.signature.input_arg[number].name
    return [node for node in function.node_def if argument in node.input and is_hoistable(node)]


def may_hoist(operation: str, functions: Sequence[Any], number: int, variable: tf.TensorSpec) -> bool:
    """Returns True if an operation may be given the value of a variable in place of the handle that it is given now.

    Args:
      operation: its type.
      functions: those that it calls.
      number: that of the handle among their arguments.
      variable: the shape and type of the variable.
    """
    for function in functions:
        argument = function.signature.input_arg[number].name
        uses = [node for node in function.node_def if argument in node.input]
        if not all(node.op == "VariableShape" or is_hoistable(node) for node in uses):
            return False
        returned = [output.name for output in function.signature.output_arg if function.ret[output.name] == argument]
        is_body = operation == "While" and function is functions[-1]
        if returned != ([function.signature.output_arg[number].name] if is_body else []):
            return False
    if operation == "While":
        return not reads_of(functions[0], number) and not (_may_be_polled(variable) and number in _deciding(*functions))
    is_small = variable.shape.num_elements() * variable.dtype.size <= MAX_PACKED_BYTES
    return operation not in ("If", "Case") or is_small


def _may_be_polled(variable: tf.TensorSpec) -> bool:
    return variable.shape.rank == 0 or not variable.dtype.is_floating


def _deciding(condition: Any, body: Any) -> set[int]:
    """Returns the numbers of the arguments on which it depends when a loop ends."""
    found: set[int] = set()
    new = _needed(condition, condition.ret.values())
    while new:
        found |= new
        new = _needed(body, [body.ret[body.signature.output_arg[number].name] for number in new]) - found
    return found


def _needed(function: Any, outputs: Iterable[str]) -> set[int]:
    """Returns the numbers of the arguments from which outputs of a function are computed."""
    nodes = {node.name: node for node in function.node_def}
    waiting, seen = list(outputs), set()
    while waiting:
        name = waiting.pop().partition(":")[0]
        if name not in seen:
            seen.add(name)
            waiting += [each for each in getattr(nodes.get(name), "input", ()) if not each.startswith("^")]
    return {number for number, argument in enumerate(function.signature.input_arg) if argument.name in seen}


_NAME = "coordinator_read_{}"


@dataclasses.dataclass(frozen=True)
class _Call:
    """How operations of a type call functions.

    Attributes:
      types: the attribute with the types of the arguments.
      first: the number of inputs before the first argument.
      functions: the attributes that name one each; `Case` has a list of them.
      stateless: the same operation for functions without side effects.
    """

    types: str
    first: int
    functions: tuple[str, ...]
    stateless: str


_CALLS = {
    "While": _Call("T", 0, ("cond", "body"), "StatelessWhile"),
    "If": _Call("Tin", 1, ("then_branch", "else_branch"), "StatelessIf"),
    "Case": _Call("Tin", 1, (), "StatelessCase"),
    "StatefulPartitionedCall": _Call("Tin", 0, ("f",), "PartitionedCall"),
}

# What is known of the variables of handles, by the names of the handles.
_Variables = Mapping[str, tf.TensorSpec]


def has_loops(concrete: Any) -> bool:
    """Returns True if a concrete function has a loop, in itself or in what it calls, that is given a resource."""
    graph = concrete.graph.as_graph_def()
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    return any(node.op == "While" and tf.resource.as_datatype_enum in node.attr["T"].list.type for node in nodes)


def hoist(definition: Any, variables: _Variables) -> int:
    """Hoists the reads of a graph.

    Args:
      definition: a `GraphDef`, which is changed.
      variables: the shapes and types of the variables whose handles are inputs of the graph, by the names of these
        inputs. Other variables are read as before.

    Returns:
      How many handles are replaced by values.
    """
    functions = _Functions(definition)
    _Body(functions, definition.node, variables).hoist()
    del definition.library.function[:]
    definition.library.function.extend(functions.called(definition.node))
    return functions.replaced


class _Functions:
    """The functions of a graph.

    Attributes:
      replaced: how many handles were replaced by values.
    """

    def __init__(self, definition: Any) -> None:
        self._functions = {each.signature.name: copied(each) for each in definition.library.function}
        self._hoisted: dict[tuple[str, tuple[tf.TensorSpec | None, ...]], Any] = {}
        self.replaced = 0

    def hoisted(self, name: str, variables: Sequence[tf.TensorSpec | None]) -> Any:
        """Returns a function whose own reads are hoisted out of what it calls; None if it is not in the graph.

        Args:
          name: of the function.
          variables: what is known of each argument that is the handle of a variable; None for the other ones.
        """
        if name not in self._functions:
            return None
        key = name, tuple(variables)
        if key not in self._hoisted:
            function = self._hoisted[key] = copied(self._functions[name])
            arguments = [each.name for each in function.signature.input_arg]
            known = {argument: spec for argument, spec in zip(arguments, variables, strict=True) if spec is not None}
            _Body(self, function.node_def, known, function).hoist()
        return self._hoisted[key]

    def add(self, function: Any) -> str:
        """Adds a function that replaces the one of its name, and returns its new name: that of equal ones is equal."""
        name = str(function.signature.name)
        if function == self._functions[name]:
            return name
        return str(self._functions.setdefault(renamed_by_content(function), function).signature.name)

    def called(self, nodes: Iterable[Any]) -> list[Any]:
        """Returns the functions that these operations call, and those that the functions call."""
        found: dict[str, Any] = {}
        waiting = list(nodes)
        while waiting:
            for _, name in called_functions(waiting.pop()):
                if name in self._functions and name not in found:
                    found[name] = self._functions[name]
                    waiting += found[name].node_def
        return list(found.values())


class _Body:
    """The operations of a graph or a function.

    Args:
      functions: those of the graph.
      nodes: the `NodeDef`s, which are changed.
      variables: see `hoist`.
      function: the `FunctionDef`; None for the graph itself.
    """

    def __init__(self, functions: _Functions, nodes: Any, variables: _Variables, function: Any = None) -> None:
        self._functions = functions
        self._nodes = nodes
        self._variables = variables
        self._function = function
        # By the names of their handles and control inputs.
        self._reads: dict[tuple[str, frozenset[str]], str] = {}

    def hoist(self) -> None:
        """Hoists all reads out of what the operations call."""
        self._join_reads()
        for node in list(self._nodes):
            if node.op in _CALLS and not is_on_parameter_server(node.device):
                self._hoist_out_of(node, _CALLS[node.op])

    def _join_reads(self) -> None:
        """Has what uses a read use the first one of the same variable at the same place."""
        first: dict[str, str] = {}
        for node in filter(is_hoistable, self._nodes):
            handle = node.input[0]
            first[node.name] = self._reads.setdefault((handle, frozenset()), node.name)

        def joined(reference: str) -> str:
            name, colon, output = reference.removeprefix("^").partition(":")
            begin = "^" if reference.startswith("^") else ""
            return f"{begin}{first.get(name, name)}{colon}{output}"

        if len(set(first.values())) == len(first):
            return
        for node in self._nodes:
            node.input[:] = map(joined, node.input)
            if first.get(node.name, node.name) != node.name:
                # The graph may return it.
                _take_value(node, self._value_of(first[node.name]), node.attr["dtype"].type)
        for returned in () if self._function is None else (self._function.ret, self._function.control_ret):
            for output, reference in returned.items():
                returned[output] = joined(reference)

    def _hoist_out_of(self, node: Any, call: _Call) -> None:
        inputs = list(node.input[call.first : call.first + len(node.attr[call.types].list.type)])
        known = [self._variables.get(name) for name in inputs]
        called = [node.attr[role].func for role in call.functions] or list(node.attr["branches"].list.func)
        functions = [self._functions.hoisted(each.name, known) for each in called]
        if None in functions:
            return
        # A handle may be passed twice, to be read and to be changed.
        kept = {
            name
            for number, (name, spec) in enumerate(zip(inputs, known, strict=True))
            if spec is None or self._is_output_used(node, number) or not may_hoist(node.op, functions, number, spec)
        }
        hoisted = {
            number: spec
            for number, (name, spec) in enumerate(zip(inputs, known, strict=True))
            if spec is not None and name not in kept and any(reads_of(function, number) for function in functions)
        }
        functions = [_with_values(function, hoisted) for function in functions]
        for each, function in zip(called, functions, strict=True):
            each.name = self._functions.add(function)
        reads = {inputs[number]: self._pass_value(node, call, number, spec) for number, spec in hoisted.items()}
        if hoisted and not any(function.signature.is_stateful for function in functions):
            # Operations with side effects run one after the other.
            node.op = call.stateless
            self._order_changes(reads, node)

    def _is_output_used(self, node: Any, number: int) -> bool:
        """Returns True if a loop returns a handle to something that uses it."""
        if node.op != "While":
            return False
        output = node.name if number == 0 else f"{node.name}:{number}"
        if self._function is not None:
            output = f"{node.name}:output:{number}"
        users = [each for each in self._nodes if output in each.input]
        for user in users:
            # The gradient of a loop takes the shape of a variable from it.
            if user.op == "VariableShape":
                user.input[0] = node.input[number]
        is_returned = self._function is not None and output in self._function.ret.values()
        return is_returned or any(user.op != "VariableShape" for user in users)

    def _order_changes(self, reads: Mapping[str, str], node: Any) -> None:
        """Has what changes variables, and waited for a loop that reads them, wait for the reads: a message less.

        Args:
          reads: the names of the reads, by the handles.
          node: of the loop, branch or call, which has no other effects than these reads.
        """
        waited = f"^{node.name}"
        for user in self._nodes:
            handles = self._variables.keys() & set(user.input)
            if waited in user.input and handles and handles <= reads.keys():
                others = [name for name in user.input if name != waited]
                user.input[:] = dict.fromkeys([*others, *(f"^{reads[handle]}" for handle in sorted(handles))])

    def _pass_value(self, node: Any, call: _Call, number: int, variable: tf.TensorSpec) -> str:
        """Passes the value of a variable in place of its handle, and returns the name of the read."""
        handle, dtype = node.input[call.first + number], variable.dtype.as_datatype_enum
        after = [name for name in node.input if name.startswith("^")]
        if (handle, frozenset(after)) not in self._reads:
            read = self._nodes.add(name=_NAME.format(len(self._nodes)), op="ReadVariableOp", input=[handle, *after])
            read.attr["dtype"].type = dtype
            self._reads[handle, frozenset(after)] = read.name
        node.input[call.first + number] = self._value_of(self._reads[handle, frozenset(after)])
        node.attr[call.types].list.type[number] = dtype
        if node.op == "While":
            node.attr["output_shapes"].list.shape[number].CopyFrom(variable.shape.as_proto())
        if "_read_only_resource_inputs" in node.attr:
            read_only = node.attr["_read_only_resource_inputs"].list.i
            read_only[:] = [each for each in read_only if each != call.first + number]
        self._functions.replaced += 1
        return self._reads[handle, frozenset(after)]

    def _value_of(self, read: str) -> str:
        return read if self._function is None else f"{read}:value:0"


def _take_value(node: Any, value: str, dtype: int) -> None:
    """Has an operation that reads a variable or its shape take a value instead."""
    node.op = "Identity" if node.op == "ReadVariableOp" else "Shape"
    node.input[0] = value
    node.device = ""
    for attribute in ("dtype", "_class"):
        node.attr.pop(attribute, None)
    node.attr["T"].type = dtype


def _with_values(function: Any, variables: Mapping[int, tf.TensorSpec]) -> Any:
    """Returns a copy of a function that is given the values of variables.

    Args:
      function: the `FunctionDef`.
      variables: by the numbers of the arguments that are their handles now.
    """
    function = copied(function)
    renamed = {}
    for number, variable in variables.items():
        argument, dtype = function.signature.input_arg[number], variable.dtype.as_datatype_enum
        argument.type = dtype
        function.resource_arg_unique_id.pop(number, None)
        for output in function.signature.output_arg:
            output.type = dtype if function.ret[output.name] == argument.name else output.type
        for node in function.node_def:
            if argument.name in node.input:
                if node.op == "ReadVariableOp":
                    renamed[f"{node.name}:value:0"] = f"{node.name}:output:0"
                _take_value(node, argument.name, dtype)
    for node in function.node_def if renamed else ():
        node.input[:] = [renamed.get(name, name) for name in node.input]
    for output, name in function.ret.items() if renamed else ():
        function.ret[output] = renamed.get(name, name)
    function.signature.is_stateful = function.signature.is_stateful and any(map(is_stateful, function.node_def))
    return function
