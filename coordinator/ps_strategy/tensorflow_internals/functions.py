"""Traced functions: how to call, build, change and register them, and the contents of their graphs; executors.

`concrete` is a `tf.types.experimental.ConcreteFunction`, `node` a `NodeDef`, and `function` usually a `FunctionDef`.
"""

import collections
import contextlib
import ctypes
import functools
import hashlib
import itertools
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import tensorflow as tf
from tensorflow.core.function.trace_type import default_types
from tensorflow.python.client import pywrap_tf_session
from tensorflow.python.distribute.coordinator import coordinator_context
from tensorflow.python.eager import cancellation, context, execute, executor
from tensorflow.python.eager.polymorphic_function import atomic_function, concrete_function, function_type_utils
from tensorflow.python.framework import func_graph, op_def_registry, ops
from tensorflow.python.framework.composite_tensor import CompositeTensor
from tensorflow.python.saved_model import function_deserialization

from coordinator.ps_strategy.tensorflow_internals.process import attribute_replaced, tensorflow_library

# Private: no public attribute says that a function must be compiled. TensorFlow's runtime reads this attribute.
_COMPILED = "_XlaMustCompile"
# The inputs that an operation passes to its function as the last arguments. An operation with several functions has
# such inputs for each function, with the function's attribute as the prefix of their names.
_CAPTURED = ("other_arguments", "captured_inputs", "captured_tensors")
# The first input of these operations selects the function, which takes the other inputs.
_CHOOSING = frozenset({"If", "StatelessIf", "Case", "StatelessCase"})
# The beginning of TensorFlow's names for the gradients of `tf.custom_gradient`.
_CUSTOM_GRADIENT = "CustomGradient-"
# The attribute in which a graph holds the gradient functions of its operations.
_GRADIENTS_OF_GRAPH = "_coordinator_custom_gradients"


class CancellationManager:
    """Cancels the calls that the manager was passed to."""

    def __init__(self) -> None:
        # Private: the public API cannot cancel an eager call.
        self._manager = cancellation.CancellationManager()

    @property
    def is_cancelled(self) -> bool:
        return bool(self._manager.is_cancelled)

    def cancel(self) -> None:
        """Cancels the calls. The method may be called several times."""
        self._manager.start_cancel()


def bind_executor() -> Any:
    """Gives the calling thread its own executor, which runs each call before it returns.

    The thread has the executor while the caller keeps the returned object, and then falls back to the default executor,
    which all threads share. There, a failed call also fails other calls in progress, on any worker, and connecting to a
    worker waits for all calls. `executor_scope` for each call would couple the threads, too: leaving the scope waits
    for the default executor, which waits for handles to be destroyed on every worker, frozen or not.
    """
    # Private: the public API has no executors.
    bound = executor.new_executor(enable_async=False)
    context.context().executor = bound
    return bound


@contextlib.contextmanager
def own_executor() -> Iterator[None]:
    """A scope that gives a thread without an executor its own, so that an error does not outlive the scope."""
    # The thread has the executor as long as `bound` exists.
    bound = bind_executor()
    try:
        yield
    finally:
        bound.clear_error()


def forget_error() -> None:
    """Clears the error of a call from the calling thread's executor; the next call would raise the error again."""
    # Private, as in `bind_executor`.
    context.context().executor.clear_error()


class PresentContext:
    """TensorFlow's context of this process and its servers, at the time when this object is made.

    If a program resets TensorFlow, as test suites do between two tests, a new context without servers replaces this
    context. TensorFlow ends the process if the new context disconnects, or reads a variable of the former context.
    """

    def __init__(self) -> None:
        self._context = weakref.ref(context.context())

    @property
    def is_replaced(self) -> bool:
        """Whether TensorFlow was reset after this object was made."""
        # Private: no public function tells one context from another.
        return context.context() is not self._context()


class FunctionRegistration:
    """Mutual exclusion between the registration of functions in this process and changes of the cluster.

    TensorFlow sends every traced function to all servers in its list. This fails ("Client for target ... not found")
    while the list and the connections differ, as they do briefly during each change of the cluster. Without this class,
    the loss of a worker would make concurrent traces fail, and functions deleted then would stay on the servers.

    TensorFlow also wraps each eager operation of this process in a function of its own when the operation is first used
    with its number of inputs, and registers that function in C++, where no registration can be held back. So operations
    are not wrapped while an instance is open: `Dataset.with_options`, a sum or a cast never fails because of a change.

    Registrations and changes wait at most `longest_wait` seconds for each other, even if one hangs. Python's garbage
    collection requests the removal of a function on any thread. A removal never waits: a change defers the removal.
    """

    _open: ClassVar[set["FunctionRegistration"]] = set()

    def __init__(self, longest_wait: float) -> None:
        self._longest_wait = longest_wait
        self._changed = threading.Condition()
        self._running = 0
        self._changing: int | None = None
        self._deferred: collections.deque[Any] = collections.deque()
        tensorflow: Any = context.context()
        self.register, self.remove = tensorflow.add_c_function, tensorflow.remove_function
        self._patches = contextlib.ExitStack()
        # Private: every trace calls this method, also traces of users' functions and datasets. There is no public hook.
        self._patches.enter_context(attribute_replaced(tensorflow, "add_c_function", self._register_in_turn))
        # Private: TensorFlow calls this method for every deleted function. No caller can catch its errors.
        self._patches.enter_context(attribute_replaced(tensorflow, "remove_function", self._remove_in_turn))
        self._open.add(self)
        tensorflow.ensure_initialized()
        _wrap_operations(False)

    @contextlib.contextmanager
    def held_back(self) -> Iterator[None]:
        """A scope in which only the calling thread registers functions. One thread at a time may enter the scope."""
        with self._changed:
            self._changing = threading.get_ident()
            self._changed.wait_for(lambda: not self._running, self._longest_wait)
        try:
            yield
        finally:
            while not self._end_change():
                self._remove_connected(self._deferred.popleft())

    def close(self) -> None:
        """Restores TensorFlow's own methods, and its functions around operations, unless another instance is open."""
        self._patches.close()
        self._open.discard(self)
        if not self._open:
            _wrap_operations(True)

    def _register_in_turn(self, function: Any) -> None:
        with self._changed:
            own = (None, threading.get_ident())
            self._changed.wait_for(lambda: self._changing in own, self._longest_wait)
            self._running += 1
        try:
            self.register(function)
        finally:
            self._end_one()

    def _end_change(self) -> bool:
        """Ends the change, or returns False: functions must be removed first, as new functions may have their names."""
        with self._changed:
            if self._deferred:
                return False
            self._changing = None
            self._changed.notify_all()
            return True

    def _remove_in_turn(self, name: Any) -> None:
        with self._changed:
            if self._changing is not None:
                self._deferred.append(name)
                return
            self._running += 1
        try:
            self._remove_connected(name)
        finally:
            self._end_one()

    def _remove_connected(self, name: Any) -> None:
        # After a failed change, the connection to a server may be missing. The server forgets the function anyway.
        with contextlib.suppress(tf.errors.InvalidArgumentError):
            self.remove(name)

    def _end_one(self) -> None:
        with self._changed:
            self._running -= 1
            self._changed.notify_all()


def _wrap_operations(are_wrapped: bool) -> None:
    """Sets whether TensorFlow wraps each eager operation of this process in a function, as it does by default."""
    present: Any = context.context_safe()
    if present is None or present._context_handle is None or not context.run_eager_op_as_function_enabled():
        return
    name, pointer = ctypes.pythonapi.PyCapsule_GetName, ctypes.pythonapi.PyCapsule_GetPointer
    name.restype, name.argtypes = ctypes.c_char_p, [ctypes.py_object]
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    # The capsule has a name in some versions.
    handle = present._context_handle
    # Private: only the C library has the setting. Another build of TensorFlow may lack it; then operations are wrapped.
    with contextlib.suppress(AttributeError, OSError):
        library = tensorflow_library("cc")
        change, new_status, delete = (
            library.TFE_ContextSetRunEagerOpAsFunction,
            library.TF_NewStatus,
            library.TF_DeleteStatus,
        )
        change.argtypes, change.restype = [ctypes.c_void_p, ctypes.c_ubyte, ctypes.c_void_p], None
        new_status.restype, delete.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
        status = new_status()
        change(pointer(handle, name(handle)), are_wrapped, status)
        delete(status)


def with_defaults(
    function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns the arguments of a call, completed by defaults; TypeError if they do not match the signature.

    Defaults are those of a `tf.function`, or the Python values that a concrete function was traced with.
    """
    # Private: no public attribute has the defaults, and a concrete function does not know its `tf.function`'s defaults.
    signature = function.function_type
    if isinstance(function, tf.types.experimental.ConcreteFunction):
        types = {name: parameter.type_constraint for name, parameter in signature.parameters.items()}
        left_out = {name: kind.value for name, kind in types.items() if isinstance(kind, default_types.Literal)}
    else:
        left_out = function.function_spec.default_values
    bound = signature.bind_partial(*args, **kwargs)
    bound.arguments = {**left_out, **bound.arguments}
    return bound.args, bound.kwargs


def named_arguments(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call of a `tf.function` by parameter name; TypeError if they do not match."""
    # Private: the public signature of a method's Python function includes `self`.
    return dict(function.function_type.bind_partial(*args, **kwargs).arguments)


def flat_inputs(concrete: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Returns a concrete function's input tensors for arguments, without captures; TypeError if they do not match."""
    # Private: the public call flattens the arguments and adds the function's own captures in one step.
    bound = function_type_utils.canonicalize_function_inputs(tuple(args), dict(kwargs), concrete.function_type)
    return list(concrete.function_type.unpack_inputs(bound))


def call_concrete(concrete: Any, inputs: Sequence[Any], manager: CancellationManager, *, stands_for: Any = None) -> Any:
    """Runs a concrete function on the current device; returns its structured outputs.

    `inputs` are `flat_inputs`, then one tensor for each of `captured_inputs`. `stands_for` is the concrete function
    that `concrete` replaces, with the same operation names and flat outputs. The outputs have the structure of the
    replaced function, and an error names the location in the code of the replaced function.
    """
    # Private: a public call takes neither captures nor a cancellation manager. TensorFlow reads the manager from
    # a global variable that the threads of all workers share.
    function = concrete.inference_fn
    reported = function if stands_for in (None, concrete) else _ReportedAs(function.name, stands_for.inference_fn)
    ctx = context.context()
    with atomic_function.InterpolateRuntimeError(reported):
        outputs = execute.execute_with_cancellation(
            function.name.decode("utf-8"),
            num_outputs=len(function.function_type.flat_outputs),
            inputs=list(inputs),
            attrs=tuple(itertools.chain.from_iterable(ctx.function_call_options.as_attrs().items())),
            ctx=ctx,
            cancellation_manager=manager._manager,
        )
    return reported.function_type.pack_output(outputs or None)


class _ReportedAs:
    """A function under its own name, with the errors and results of the function that it replaces."""

    def __init__(self, name: bytes, other: Any) -> None:
        self.name = name
        self.children = other.children
        self.function_type = other.function_type
        self._other = other

    @property
    def graph_debug_info(self) -> Any:
        """The code locations of the function's operations; slow to compute."""
        return self._other.graph_debug_info


def structure_outputs(concrete: Any, values: Sequence[Any]) -> Any:
    """Returns NumPy values, one for each of `concrete.outputs`, in the structure that the function returns.

    Composite tensors in the structure are made from the values.
    """
    # Private: publicly, only a call of the function packs outputs into the structure.
    if any(isinstance(leaf, CompositeTensor) for leaf in tf.nest.flatten(concrete.structured_outputs)):
        values = [tf.constant(value, output.dtype) for value, output in zip(values, concrete.outputs, strict=True)]
    return concrete.function_type.pack_output(values)


def captures_of(concrete: Any) -> list[Any]:
    """Returns the captures of a concrete function, in the same list object until the captures change."""
    # Private: `captured_inputs` creates a new list each time, which is too slow for calls of small functions.
    return concrete._captured_inputs


def captured_inputs(concrete: Any, worker_index: Any = 0) -> list[Any]:
    """Returns the captures of a concrete function: one tensor for each input that is not an argument.

    `worker_index`, an int64 tensor or an int, is passed where the function calls
    `tf.distribute.coordinator.experimental_get_current_worker_index()`.
    """
    # Private: TensorFlow reads the index at each call, from a context of its own coordinator.
    of_thread = coordinator_context._dispatch_context
    former = coordinator_context.get_current_dispatch_context()
    of_thread.current = coordinator_context.DispatchContext(SimpleNamespace(worker_index=worker_index))
    try:
        return list(concrete.captured_inputs)
    finally:
        of_thread.current = former


def untraced_copy(function: Any) -> Any | None:
    """Copies a `tf.function` without its traces; returns None for a SavedModel's function, which cannot be retraced."""
    # Private: no public way copies a function with its settings, or tells that a function is from a SavedModel.
    return None if isinstance(function, function_deserialization.RestoredFunction) else function._clone(None)


def converted_by_autograph(function: Callable[..., Any]) -> Any:
    """Returns a function of the program that AutoGraph converts, although the library's code that calls it is not."""
    # Private: the public `tf.autograph.to_graph` takes neither objects that can be called nor `do_not_convert`.
    autograph = tf.__internal__.autograph
    return autograph.tf_convert(function, autograph.control_status_ctx())


def built_function(
    body: Callable[..., Any], signature: Sequence[tf.TensorSpec], change: Callable[[Any], object]
) -> Any:
    """Builds a concrete function, for `call_concrete`, from a graph that is changed after tracing.

    `body` is traced without AutoGraph. It takes a symbolic tensor for each of `signature`, and returns a list of
    tensors. `change` is called with the traced graph, which already has all control dependencies.
    """
    # Private: public tracing registers a function before the caller can change its graph.
    graph = func_graph.func_graph_from_py_func(body.__name__, body, tuple(signature), {})
    change(graph)
    kind = function_type_utils.derive_from_graph(graph)
    # The servers keep the functions that the graph calls as long as the graph exists.
    library = graph.as_graph_def().library.function
    graph.registered = [kept for function in library for kept in _registered(function, kind)]
    return concrete_function.ConcreteFunction.from_func_graph(graph, kind, {}, shared_func_graph=False)


def _registered(function: Any, kind: Any) -> Iterator[Any]:
    """Registers a `FunctionDef` with all servers, which keep it as long as the yielded objects exist."""
    known = context.context()
    name = function.signature.name
    is_counted = (known.function_scope_id, name.encode()) in atomic_function.RUNTIME_FUNCTION_REFS
    if is_counted or not known.has_function(name):
        # The program does not call the function directly, so its type does not matter.
        yield atomic_function.AtomicFunction(name, known, kind)
    if not known.has_function(name):
        # Tracing makes the same call, which `FunctionRegistration` replaces.
        registered = pywrap_tf_session.TF_FunctionImportFunctionDef(function.SerializeToString())
        try:
            known.add_c_function(registered)
        finally:
            pywrap_tf_session.TF_DeleteFunction(registered)


def under_another_name(concrete: Any) -> Any:
    """Returns a concrete function with the same graph, under a name that the servers do not know yet."""
    # Private: publicly, only tracing creates a function. Tracing takes long and may not be repeatable.
    return concrete_function.ConcreteFunction.from_func_graph(
        concrete.graph, concrete.function_type, concrete.inference_fn.attributes
    )


def replace_input(operation: tf.Operation, position: int, tensor: tf.Tensor) -> None:
    # Private: publicly, operations cannot be changed.
    operation._update_input(position, tensor)


def add_control_input(operation: tf.Operation, before: tf.Operation) -> None:
    # Private: publicly, operations cannot be changed.
    operation._add_control_input(before)


def is_compiled(concrete: Any) -> bool:
    """Returns True if XLA compiles the whole concrete function."""
    return _must_compile(concrete.function_def)


def compiled_calls(concrete: Any, is_remote: Callable[[Any], bool]) -> Iterator[tuple[str, Any]]:
    """Finds functions, called by a concrete function, that XLA compiles and that use remote resources.

    `is_remote` returns True for a captured tensor that is the handle of a remote resource. Yields the name of each such
    Python function and the captured tensor, also for functions in nested calls, branches and loop bodies.
    """
    graph = concrete.graph.as_graph_def()
    functions = {function.signature.name: function for function in graph.library.function}
    captures = captured_inputs(concrete)
    placeholders = concrete.graph.inputs[len(concrete.graph.inputs) - len(captures) :]
    handles = zip(placeholders, captures, strict=True)
    remote = {placeholder.op.name: captured for placeholder, captured in handles if is_remote(captured)}
    return _calls(graph.node, remote, functions)


def _calls(nodes: Sequence[Any], remote: dict[str, Any], functions: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for node in nodes:
        if remote.keys().isdisjoint(node.input):
            continue
        for role, name in called_functions(node):
            if (function := functions.get(name)) is None:
                continue
            passed = passed_inputs(node, role, function)
            inner = {argument: remote[outer] for argument, outer in passed if outer in remote}
            if inner and _must_compile(function):
                python_name = re.sub(r"^__(?:inference|forward)_(.*?)_\d+$", r"\1", name)
                yield python_name, next(iter(inner.values()))
            yield from _calls(function.node_def, inner, functions)


def passed_inputs(node: Any, role: str, function: Any) -> list[tuple[str, str]]:
    """Returns which inputs an operation passes to a function that the operation's attribute `role` names or lists.

    Returns pairs of the function's argument and the operation's input, by name. The elements that a dataset operation
    passes are not inputs. The list is empty for an operation that calls the function in an unknown way.
    """
    inputs = [name for name in node.input if not name.startswith("^")]
    arguments = [argument.name for argument in function.signature.input_arg]
    places = _input_places(node, len(inputs))
    names = (f"{role}_other_arguments", f"{role}_other_args", *_CAPTURED)
    captured = next((places[name] for name in names if name in places), None)
    taken = inputs[captured or slice(int(node.op in _CHOOSING), None)]
    if len(taken) > len(arguments) or (len(taken) < len(arguments) and captured is None):
        return []
    return list(zip(arguments[len(arguments) - len(taken) :], taken, strict=True))


def _input_places(node: Any, count: int) -> dict[str, slice]:
    """Returns the positions of each input in an operation's definition; empty if they are not `count` in total."""
    # Private: publicly, only operations of a `tf.Graph` have a definition, not operations in functions.
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
    # Reading a missing key of the map would add the key without a value. The function is sent to the workers, which
    # refuse all functions that call a function with such a key.
    return _COMPILED in function.attr and bool(function.attr[_COMPILED].b)


def called_functions(node: Any) -> list[tuple[str, str]]:
    """Returns a pair for each function that an operation's attributes name: the attribute, and the function's name."""
    return [
        (role, function.name)
        for role, value in node.attr.items()
        for function in (value.func, *value.list.func)
        if function.name
    ]


def called_in(node: Any) -> list[Any]:
    """Returns the messages in an operation that name functions. The caller may change the names in the messages."""
    values = (value for value in node.attr.values() if value.HasField("func") or value.HasField("list"))
    return [function for value in values for function in ([value.func] if value.HasField("func") else value.list.func)]


def copied(message: Any) -> Any:
    copy = type(message)()
    copy.CopyFrom(message)
    return copy


def renamed_by_content(function: Any) -> str:
    """Gives a changed function a new name, and returns the name. Equal functions get equal names."""
    # `api_implements` would let TensorFlow replace this function by another function with the same arguments.
    function.attr.pop("api_implements", None)
    content = hashlib.sha256(function.SerializeToString(deterministic=True)).hexdigest()
    function.signature.name = f"{function.signature.name}_{content[:16]}"
    return str(function.signature.name)


def is_stateful(node: Any) -> bool:
    """Returns True if an operation has side effects, or reads a state that may change."""
    # Private: see `_input_places`.
    definition = op_def_registry.get(node.op)
    return definition is None or bool(definition.is_stateful)


@contextlib.contextmanager
def custom_gradients_freed() -> Iterator[None]:
    """A scope in which the custom gradients of a function's graph are freed with the graph.

    TensorFlow keeps the gradient function of each call of a `tf.custom_gradient` in a registry until the process ends.
    The gradient function refers to the graph of the call, and so to the handles of variables that the graph has
    captured. Each training step of Keras has one (`tf.distribute.ReplicaContext.all_reduce`), and so has `tf.nn.silu`.
    So a trained model that the program has dropped would stay on the parameter servers, with its optimizer's slots.
    """
    # Private: the registry keeps everything that is registered, and `tf.custom_gradient` has no hook.
    stock: Any = ops.RegisterGradient

    def call(reference: Any, *arguments: Any) -> Any:
        return reference()(*arguments)

    class RegisterGradient(stock):
        def __call__(self, function: Any) -> Any:
            graph = ops.get_default_graph()
            if not self._op_type.startswith(_CUSTOM_GRADIENT) or not isinstance(graph, func_graph.FuncGraph):
                return super().__call__(function)
            setattr(graph, _GRADIENTS_OF_GRAPH, [*getattr(graph, _GRADIENTS_OF_GRAPH, ()), function])
            super().__call__(functools.partial(call, weakref.ref(function)))
            weakref.finalize(function, ops.gradient_registry._registry.pop, self._op_type, None).atexit = False
            return function

    with attribute_replaced(ops, "RegisterGradient", RegisterGradient):
        yield
