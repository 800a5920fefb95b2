"""A traced function that is called by itself, with what goes from server to server joined."""

import itertools
import logging
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy import tensorflow_internals
from coordinator.ps_strategy.step_copies import StepCopies, servers_of_resources

_log = logging.getLogger(__name__)

# A function that was called so often will be called again. Joining takes about as long as tracing it did, and each
# worker then has to get to know another function.
_CALLS_BEFORE = 16
# Of what is given to the function, so that it is not of anything in it.
_INPUT_NAME = "coordinator_input_{}"


class PackedFunction:
    """What is called in the place of a function: itself, until it has been called often.

    It does what the function does, and draws other random numbers. May be used by several threads.

    Args:
      concrete: a `tf.types.experimental.ConcreteFunction` that may be copied; see `TracedFunction.may_be_repeated`.
    """

    def __init__(self, concrete: Any) -> None:
        self._concrete = concrete
        self._packed: Any = None
        # Of one resource there is nothing that could go together.
        is_worth_it = len(servers_of_resources(concrete)) > 1
        self._calls = itertools.count(1) if is_worth_it else itertools.repeat(0)

    def run(self, run: Callable[..., Any], inputs: Sequence[Any]) -> Any:
        """Calls it.

        Args:
          run: calls a concrete function with inputs, in the place of another one: `(concrete, inputs, stands_for)`.
          inputs: of the function, captures among them.
        """
        # A number is given to one thread alone.
        if next(self._calls) == _CALLS_BEFORE:
            self._packed = self._made()
        if self._packed is None:
            return run(self._concrete, inputs, None)
        return run(self._packed, inputs, self._concrete)

    def _made(self) -> Any:
        """The function with joined messages; None if there are none."""
        try:
            return packed_function(self._concrete)
        except Exception:  # noqa: BLE001 - the function itself runs, whatever is in its graph
            _log.warning("The messages of %s could not be joined; it runs as it is.", self._concrete, exc_info=True)
            return None


def packed_function(concrete: Any) -> Any:
    """A function that does the same, with operations of the same names; None if there is nothing to join in it."""
    copies = StepCopies(concrete, 1)
    joined = []

    def packed(*given: Any) -> list[Any]:
        copies.note_inputs(given)
        return copies.add(given, "")

    signature = [
        tf.TensorSpec(tensor.shape, tensor.dtype, _INPUT_NAME.format(number))
        for number, tensor in enumerate(concrete.inputs)
    ]
    built = tensorflow_internals.built_function(
        packed, signature, lambda graph: joined.append(copies.pack_transfers(graph))
    )
    return built if any(joined) else None
