"""Moves reads of variables out of loops, branches and called functions, to just before the operation that runs them.

    w (handle) ---> While                             w ---> ReadVariableOp ---> While
                      body: ReadVariableOp, a message                              body: the value
                            in each iteration

Several reads of one variable at one place become one read. A read is hoisted if its time depends only on its loop,
branch or function: the read has no control dependencies, no operation inside changes the variable or looks up its rows,
and the read is no `read_value()`, which reads where it is called. A read stays

- in the condition of a loop, and in the body if the end of the loop depends on the variable and the variable is an
  integer, a bool or a scalar: the loop may wait for another worker to change the variable;
- in a branch if the value is large, since the branch may not be taken.

Promises:
- A hoisted read sees the same changes by the function as before: all earlier changes, and no later changes.
- Gradients do not change, because they are already part of the graph.

In this module operations are `NodeDef`s, and the functions that they call are `FunctionDef`s.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

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
_NAME = "coordinator_read_{}"
# The known shapes and types of variables, by the names of their handles.
_Variables = Mapping[str, tf.TensorSpec]


class _Call(NamedTuple):
    # The attribute with the types of the arguments.
    types: str
    # The number of inputs before the first argument.
    first: int
    # The attributes that name one function each; `Case` has a list of functions.
    functions: tuple[str, ...]
    # The type of the same operation if its functions have no side effects.
    stateless: str


_CALLS = {
    "While": _Call("T", 0, ("cond", "body"), "StatelessWhile"),
    "If": _Call("Tin", 1, ("then_branch", "else_branch"), "StatelessIf"),
    "Case": _Call("Tin", 1, (), "StatelessCase"),
    "StatefulPartitionedCall": _Call("Tin", 0, ("f",), "PartitionedCall"),
}


def is_hoistable(node: Any) -> bool:
    """Returns True if an operation is a read of a variable that may be moved; looks only at the operation itself."""
    is_plain_read = node.op == "ReadVariableOp" and len(node.input) == 1 and not _READ_VALUE.search(node.name)
    # A parameter server reads its own variables without a message.
    return is_plain_read and not is_on_parameter_server(node.device)


def reads_of(function: Any, number: int) -> list[Any]:
    """Returns the reads of an argument that may be hoisted."""
    argument = function.signature.input_arg[number].name
    return [node for node in function.node_def if argument in node.input and is_hoistable(node)]


def may_hoist(operation: str, functions: Sequence[Any], number: int, variable: tf.TensorSpec) -> bool:
    """Returns True if an operation, such as `While`, may take a variable's value in place of the variable's handle.

    The handle is the argument with this `number` of the functions that the operation calls.
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
        may_be_polled = variable.shape.rank == 0 or not variable.dtype.is_floating
        return not reads_of(functions[0], number) and not (may_be_polled and number in _deciding(*functions))
    is_small = variable.shape.num_elements() * variable.dtype.size <= MAX_PACKED_BYTES
    return operation not in ("If", "Case") or is_small


def _deciding(condition: Any, body: Any) -> set[int]:
    deciding: set[int] = set()
    new = _needed(condition, condition.ret.values())
    while new:
        deciding |= new
        new = _needed(body, [body.ret[body.signature.output_arg[number].name] for number in new]) - deciding
    return deciding


def _needed(function: Any, outputs: Iterable[str]) -> set[int]:
    nodes = {node.name: node for node in function.node_def}
    waiting, seen = list(outputs), set()
    while waiting:
        name = waiting.pop().partition(":")[0]
        if name not in seen:
            seen.add(name)
            waiting += [source for source in getattr(nodes.get(name), "input", ()) if not source.startswith("^")]
    return {number for number, argument in enumerate(function.signature.input_arg) if argument.name in seen}


def has_loops(concrete: Any) -> bool:
    """Returns True if a concrete function, or one that it calls, has a loop that takes a resource."""
    graph = concrete.graph.as_graph_def()
    nodes = [*graph.node, *(node for function in graph.library.function for node in function.node_def)]
    return any(node.op == "While" and tf.resource.as_datatype_enum in node.attr["T"].list.type for node in nodes)


def hoist(definition: Any, variables: _Variables) -> int:
    """Hoists the reads of a `GraphDef` in place. Returns the number of handles that were replaced by values.

    `variables` maps the name of each graph input that is a known variable's handle to that variable's shape and type.
    """
    functions = _Functions(definition)
    _Body(functions, definition.node, variables).hoist()
    del definition.library.function[:]
    definition.library.function.extend(functions.called(definition.node))
    return functions.replaced


class _Functions:
    """The functions of a graph. `replaced` counts the handles that were replaced by values."""

    def __init__(self, definition: Any) -> None:
        self._functions = {function.signature.name: copied(function) for function in definition.library.function}
        self._hoisted: dict[tuple[str, tuple[tf.TensorSpec | None, ...]], Any] = {}
        self.replaced = 0

    def hoisted(self, name: str, variables: Sequence[tf.TensorSpec | None]) -> Any:
        """Returns a function with the reads hoisted out of the functions that it calls; None if the graph lacks it.

        `variables` has the shape and type for each argument that is the handle of a known variable, otherwise None.
        """
        if name not in self._functions:
            return None
        key = name, tuple(variables)
        if key not in self._hoisted:
            function = self._hoisted[key] = copied(self._functions[name])
            arguments = zip(function.signature.input_arg, variables, strict=True)
            known = {argument.name: spec for argument, spec in arguments if spec is not None}
            _Body(self, function.node_def, known, function).hoist()
        return self._hoisted[key]

    def add(self, function: Any) -> str:
        """Adds a changed function. Returns its new name; equal functions have equal names."""
        name = str(function.signature.name)
        if function == self._functions[name]:
            return name
        return str(self._functions.setdefault(renamed_by_content(function), function).signature.name)

    def called(self, nodes: Iterable[Any]) -> list[Any]:
        """Returns the functions that these operations call, directly or through other functions."""
        called: dict[str, Any] = {}
        waiting = list(nodes)
        while waiting:
            for _, name in called_functions(waiting.pop()):
                if name in self._functions and name not in called:
                    called[name] = self._functions[name]
                    waiting += called[name].node_def
        return list(called.values())


class _Body:
    """Changes the operations of a graph or a function in place. `function` is None for the graph itself."""

    def __init__(self, functions: _Functions, nodes: Any, variables: _Variables, function: Any = None) -> None:
        self._functions = functions
        self._nodes = nodes
        self._variables = variables
        self._function = function
        self._reads: dict[tuple[str, frozenset[str]], str] = {}

    def hoist(self) -> None:
        self._join_reads()
        for node in list(self._nodes):
            if node.op in _CALLS and not is_on_parameter_server(node.device):
                self._hoist_out_of(node, _CALLS[node.op])

    def _join_reads(self) -> None:
        """Makes the users of a read use the first read of the same variable at the same place."""
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
                # The node stays, because the graph may return its output.
                _take_value(node, self._value_of(first[node.name]), node.attr["dtype"].type)
        for returned in () if self._function is None else (self._function.ret, self._function.control_ret):
            for output, reference in returned.items():
                returned[output] = joined(reference)

    def _hoist_out_of(self, node: Any, call: _Call) -> None:
        inputs = list(node.input[call.first : call.first + len(node.attr[call.types].list.type)])
        known = [self._variables.get(name) for name in inputs]
        references = [node.attr[role].func for role in call.functions] or list(node.attr["branches"].list.func)
        functions = [self._functions.hoisted(reference.name, known) for reference in references]
        if None in functions:
            return
        # A handle may be passed twice: once for reads and once for changes.
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
        for reference, function in zip(references, functions, strict=True):
            reference.name = self._functions.add(function)
        reads = {inputs[number]: self._pass_value(node, call, number, spec) for number, spec in hoisted.items()}
        if hoisted and not any(function.signature.is_stateful for function in functions):
            # TensorFlow runs stateful operations one after the other, so a stateless operation replaces `node`.
            node.op = call.stateless
            self._order_changes(reads, node)

    def _is_output_used(self, node: Any, number: int) -> bool:
        """Returns True if something uses a handle that a loop returns."""
        if node.op != "While":
            return False
        output = node.name if number == 0 else f"{node.name}:{number}"
        if self._function is not None:
            output = f"{node.name}:output:{number}"
        users = [user for user in self._nodes if output in user.input]
        for user in users:
            # The gradient of a loop takes the variable's shape from the returned handle.
            if user.op == "VariableShape":
                user.input[0] = node.input[number]
        is_returned = self._function is not None and output in self._function.ret.values()
        return is_returned or any(user.op != "VariableShape" for user in users)

    def _order_changes(self, reads: Mapping[str, str], node: Any) -> None:
        """Makes operations that change variables wait for the variables' reads, not for `node`: one message less.

        `reads` maps handles to the names of their reads; `node` is a loop, branch or call without other effects.
        """
        waited = f"^{node.name}"
        for user in self._nodes:
            handles = self._variables.keys() & set(user.input)
            if waited in user.input and handles and handles <= reads.keys():
                others = [name for name in user.input if name != waited]
                user.input[:] = dict.fromkeys([*others, *(f"^{reads[handle]}" for handle in sorted(handles))])

    def _pass_value(self, node: Any, call: _Call, number: int, variable: tf.TensorSpec) -> str:
        """Passes the value of a variable in place of its handle; returns the name of the read."""
        place = call.first + number
        handle, dtype = node.input[place], variable.dtype.as_datatype_enum
        after = [name for name in node.input if name.startswith("^")]
        key = handle, frozenset(after)
        if key not in self._reads:
            read = self._nodes.add(name=_NAME.format(len(self._nodes)), op="ReadVariableOp", input=[handle, *after])
            read.attr["dtype"].type = dtype
            self._reads[key] = read.name
        node.input[place] = self._value_of(self._reads[key])
        node.attr[call.types].list.type[number] = dtype
        if node.op == "While":
            node.attr["output_shapes"].list.shape[number].CopyFrom(variable.shape.as_proto())
        if "_read_only_resource_inputs" in node.attr:
            read_only = node.attr["_read_only_resource_inputs"].list.i
            read_only[:] = [other for other in read_only if other != place]
        self._functions.replaced += 1
        return self._reads[key]

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
    """Returns a copy of a function that takes the values of variables, which are numbered like the arguments."""
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
