"""A traced function that is called by itself, with what goes from server to server joined."""

import itertools
import logging
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy import tensorflow_internals
from coordinator.ps_strategy.fusing.graph_copies import StepCopies, servers_of_resources

_logger = logging.getLogger("coordinator")

# A function that was called so often will be called again. Joining takes about as long as tracing it did, and each
# worker then has to get to know another function.
_CALLS_BEFORE = 16
# Of what is given to the function, so that it is not of anything in it.
_INPUT_NAME = "coordinator_input_{}"


class PackedFunction:
    """What is called in the place of a function: itself, until it has been called often.

    It does what the function does, and draws other random numbers. May be used by several threads.

    Args:
      concrete: a `tf.types.experimental.ConcreteFunction`.
      may_be_copied: whether the messages of a copy may be joined; otherwise it is always the function itself.
    """

    def __init__(self, concrete: Any, *, may_be_copied: bool) -> None:
        self._concrete = concrete
        self._present = concrete
        # Of one resource there is nothing that could go together.
        is_worth_it = may_be_copied and len(servers_of_resources(concrete)) > 1
        self._calls = itertools.count(1) if is_worth_it else itertools.repeat(0)

    def for_next_call(self) -> Any:
        """What is to be called now: a concrete function of the same inputs, outputs, and names of operations."""
        # A number is given to one thread alone.
        if next(self._calls) == _CALLS_BEFORE:
            self._present = self._made()
        return self._present

    def _made(self) -> Any:
        """The function with joined messages; itself if there are none."""
        try:
            return packed_function(self._concrete) or self._concrete
        except Exception:
            # The function itself runs, whatever is in its graph.
            _logger.warning("The messages of %s could not be joined; it runs as it is.", self._concrete, exc_info=True)
            return self._concrete


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
