"""Functions that XLA is to compile, as far as they cannot run on a worker.

XLA compiles for one device of one machine. What is scheduled is spread over several: it runs on a worker, which was
sent it, and its variables are on parameter servers.
"""

import weakref
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy import tensorflow_internals


class CompiledFunctions:
    """Looks at each traced function once. A worker would refuse the same ones, in words that tell nobody why."""

    def __init__(self) -> None:
        self._accepted: weakref.WeakSet[Any] = weakref.WeakSet()

    def check(self, concrete: Any) -> None:
        """Refuses a concrete function that could not be compiled where it is needed.

        Raises:
          ValueError: it is made with `jit_compile=True`, or calls one that is and that uses a variable on a parameter
            server.
        """
        if concrete in self._accepted:
            return
        if tensorflow_internals.is_compiled(concrete):
            raise ValueError(
                f"The function {concrete.graph.name!r} was scheduled and is made with jit_compile=True. XLA compiles "
                "for one machine, and a scheduled function is sent to another one and uses variables on yet others. "
                "Leave jit_compile out, and give it to a function of tensors that this one calls."
            )
        for name, handle in tensorflow_internals.compiled_calls(concrete, is_on_parameter_server):
            variable = tensorflow_internals.owner_of_handle(handle)
            raise ValueError(
                f"The function {name!r}, which {concrete.graph.name!r} calls, is made with jit_compile=True and uses "
                f"the variable {getattr(variable, 'name', handle)!r} on {handle.device}. XLA cannot reach another "
                "machine. Read the variable outside of the compiled function, pass its value as an argument, and "
                "assign what the function returns."
            )
        self._accepted.add(concrete)


def is_on_parameter_server(captured: Any) -> bool:
    """Whether what a function captured is a resource on a parameter server."""
    is_resource = captured.dtype == tf.resource and not tf.is_symbolic_tensor(captured)
    return is_resource and tf.DeviceSpec.from_string(captured.device).job == "ps"
