"""The handles of variables: what functions capture, and what changes when a server is recovered."""

import gc
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import tensorflow as tf
from tensorflow.python.eager.polymorphic_function import concrete_function
from tensorflow.python.framework import func_graph
from tensorflow.python.ops import handle_data_util, resource_variable_ops

from coordinator.ps_strategy.tensorflow_internals.calls import captures_of


def variable_handle(variable: Any) -> tf.Tensor:
    """The resource handle of a variable, eager."""
    # Private: `tf.Variable.handle` is public on its resource subclass alone, which has no public name.
    return variable.handle


def owner_of_handle(tensor: Any) -> Any | None:
    """The lookup table or variable that a resource handle belongs to, or None."""
    # Private: a function's captures are handles, and nothing public leads from one to its object.
    owner = getattr(tensor, "_parent_trackable", None)
    return owner() if owner is not None else None


def present_handle(tensor: Any) -> Any:
    """The handle that the variable of a handle has now; any other tensor itself."""
    owner = owner_of_handle(tensor)
    return variable_handle(owner) if isinstance(owner, tf.Variable) else tensor


def copy_handle_data(source: Any, target: Any) -> None:
    """Has a symbolic handle know of what shape and type the resource is that another one stands for."""
    # Private: `tf.TensorSpec` of a handle does not tell.
    handle_data_util.copy_handle_data(source, target)


def new_handle(variable: Any) -> tf.Tensor:
    """The handle of a new resource, without a value, on the server and of the kind of a variable's present one."""
    # Private: a resource is made, without a value, only by the class of the variables.
    with tf.device(variable.device):
        handle = resource_variable_ops._variable_handle_from_shape_and_dtype(
            variable.shape, variable.dtype, shared_name=None, name=variable.name, graph_mode=False
        )
    handle._handle_data = variable.handle._handle_data
    return handle


def replace_handles(renewed: Iterable[tuple[Any, tf.Tensor]]) -> None:
    """Gives variables other handles, and every function that captured one of the former ones too.

    No function may be running that uses them.

    Args:
      renewed: variables, each with its new handle.
    """
    # Private: that a variable's resource changes is foreseen only while a SavedModel is loaded.
    replacements: dict[int, tuple[Any, tf.Tensor]] = {}
    for variable, handle in renewed:
        former = variable.handle
        handle._parent_trackable = weakref.ref(variable)
        handle._name, handle._unique_id = getattr(former, "_name", None), variable._unique_id
        variable._handle = handle
        # Holds the former one too, so that no other tensor gets its identity meanwhile.
        replacements[id(former)] = former, handle
    graphs, functions = _graphs_and_functions()
    for graph in graphs:
        _replace_captures(graph.function_captures, replacements)
    for function in functions:
        captures = captures_of(function)
        if any(id(capture) in replacements for capture in captures):
            function.set_external_captures(
                [replacements[id(capture)][1] if id(capture) in replacements else capture for capture in captures]
            )


def _graphs_and_functions() -> tuple[list[Any], list[Any]]:
    """Every graph of a function and every concrete function that there is."""
    # TensorFlow keeps no list of them, and they may be anywhere: in a Keras model, a SavedModel, a closure.
    found: tuple[list[Any], list[Any]] = [], []
    kinds: dict[type, list[Any] | None] = {}
    for thing in gc.get_objects():
        kind = type(thing)
        if kind not in kinds:
            is_graph, is_function = (
                issubclass(kind, base) for base in (func_graph.FuncGraph, concrete_function.ConcreteFunction)
            )
            kinds[kind] = found[0] if is_graph else found[1] if is_function else None
        things = kinds[kind]
        if things is not None:
            things.append(thing)
    return found


def _replace_captures(captures: Any, replacements: Mapping[int, tuple[Any, tf.Tensor]]) -> None:
    """Replaces what a graph captured, in its order: it is the order of the function's inputs."""
    captured = dict(captures.by_val_external)
    if not any(id(external) in replacements for external in captured.values()):
        return
    for key, external in captured.items():
        _, internal, kind = captures.pop(key)
        former, present = replacements.get(id(external), (None, external))
        captures.add_or_replace(id(present) if key == id(former) else key, present, internal, kind)
    # What is remembered of them is renewed only when it is asked for, and would keep the former resources alive.
    captures.capture_types  # noqa: B018


def attach_initial_value(variable: Any, initial_value: Any) -> None:
    """Keeps with a variable how its initial value is got.

    Kept anywhere else, it would keep the variable alive: a function that makes the initial value of a Keras variable
    refers to that variable.
    """
    # Private: `tf.Variable.initial_value` refuses eager variables.
    variable._coordinator_initial_value = initial_value


def attached_initial_value(variable: Any) -> Any:
    """What `attach_initial_value` kept, or None."""
    # Private: as above.
    return getattr(variable, "_coordinator_initial_value", None)
