"""Custom gradients that live as long as the graph that uses them.

TensorFlow keeps the gradient function of each call of a `tf.custom_gradient` in a registry of the process, for ever.
The function refers to the tensors of the graph that the call was traced in, and so to all that this graph has captured:
the handles of variables. Keras has one in each training step (`tf.distribute.ReplicaContext.all_reduce`), and
`tf.nn.silu` is another. So a model that was trained would stay on the parameter servers, with its optimizer's slots,
after the program has dropped it.
"""

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any

from tensorflow.python.framework import func_graph, ops

from coordinator.ps_strategy.tensorflow_internals.process import attribute_replaced

# What TensorFlow calls the gradients of these functions.
_NAMES = "CustomGradient-"
# The attribute of a graph with the gradient functions of its operations.
_FUNCTIONS = "_coordinator_custom_gradients"


def _call(reference: Any, *arguments: Any) -> Any:
    return reference()(*arguments)


@contextlib.contextmanager
def custom_gradients_freed() -> Iterator[None]:
    """A scope in which the custom gradients of a function's graph are freed with the graph."""
    # Private: the registry holds all that is registered, and `tf.custom_gradient` has no hook.
    stock: Any = ops.RegisterGradient

    class RegisterGradient(stock):
        def __call__(self, function: Any) -> Any:
            graph = ops.get_default_graph()
            if not self._op_type.startswith(_NAMES) or not isinstance(graph, func_graph.FuncGraph):
                return super().__call__(function)
            setattr(graph, _FUNCTIONS, [*getattr(graph, _FUNCTIONS, ()), function])
            super().__call__(functools.partial(_call, weakref.ref(function)))
            weakref.finalize(function, ops.gradient_registry._registry.pop, self._op_type, None).atexit = False
            return function

    with attribute_replaced(ops, "RegisterGradient", RegisterGradient):
        yield
