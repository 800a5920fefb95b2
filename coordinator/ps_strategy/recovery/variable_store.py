"""The variables on the parameter servers, and how each of them begins.

A parameter server that is lost takes its variables with it. Here they are made again, in the same Python objects: a
variable is a Python object that holds the handle of a resource on a server, so it gets the handle of a new resource,
and so does every function that captured the old one.

It promises that, once `renew`, the restoring of a checkpoint and `initialize_rest` have run, all variables are as a
restarted client would find them after restoring that checkpoint. That is why those on servers that survived are renewed
too: a metric whose total and count are on two servers stays consistent, also if no checkpoint holds it.
"""

import itertools
import logging
import weakref
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy import tensorflow_internals

_logger = logging.getLogger("coordinator")

# An initial value that was given as an array is copied to the client if it is not larger than this, in bytes.
_LARGEST_COPY = 2**20


class VariableStore:
    """Knows every variable on a parameter server, for as long as the variable lives. Safe to use from several threads.

    `renew` and `initialize_rest` are called while no function runs.
    """

    def __init__(self) -> None:
        # By a running number, since variables cannot be hashed; so they are in the order in which they were made.
        self._variables: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()

    def add(self, variable: Any, initial_value: Any) -> None:
        """Tells of a variable that was just made.

        Args:
          variable: a `tf.Variable`; one that is not on a parameter server is ignored.
          initial_value: what it was made with: a value, a function that makes one, or None.
        """
        if tf.DeviceSpec.from_string(variable.device).job != "ps":
            return
        tensorflow_internals.attach_initial_value(variable, _repeatable(variable, initial_value))
        self._variables[next(self._numbers)] = variable

    def variables(self) -> list[Any]:
        """Those that are alive, in the order in which they were made."""
        # The references are copied in one step, so that a variable that is made meanwhile does no harm.
        return [variable for reference in self._variables.valuerefs() if (variable := reference()) is not None]

    def renew(self) -> None:
        """Gives every variable a new resource on its server, without a value, and every function the new handles.

        Raises:
          tf.errors.OpError: a server does not answer.
        """
        variables = self.variables()
        # All are made before the first is put in place: if a server fails meanwhile, nothing has changed.
        renewed = [(variable, tensorflow_internals.new_handle(variable)) for variable in variables]
        tensorflow_internals.replace_handles(renewed)

    def initialize_rest(self) -> None:
        """Gives its initial value to every variable that has no value.

        Raises:
          tf.errors.OpError: a server does not answer.
          Exception: what a function that makes an initial value raised, with a note that names the variable.
        """
        for variable in self.variables():
            if not variable.is_initialized():
                try:
                    _initialize(variable)
                except Exception as error:
                    error.add_note(f"Raised while the variable {variable.name!r} was given its initial value again.")
                    raise

    def __len__(self) -> int:
        return len(self.variables())

    def __repr__(self) -> str:
        return f"<VariableStore: {len(self)} variables>"


def _repeatable(variable: Any, initial_value: Any) -> Any:
    """What gives the initial value once more: a function, or a small array; None if nothing does."""
    if initial_value is None or callable(initial_value):
        return initial_value
    if tf.is_symbolic_tensor(initial_value) or variable.dtype in (tf.resource, tf.variant):
        return None
    elements = variable.shape.num_elements()
    if elements is not None and elements * variable.dtype.size > _LARGEST_COPY:
        return None
    # Out of the function that is being traced, if one is.
    with tf.init_scope():
        value = tf.convert_to_tensor(initial_value, variable.dtype).numpy()
    return value.copy() if value.nbytes <= _LARGEST_COPY else None


def _initialize(variable: Any) -> None:
    initial_value = tensorflow_internals.attached_initial_value(variable)
    with tf.device(variable.device):
        if callable(initial_value):
            initial_value = initial_value()
        if initial_value is None:
            _logger.warning(
                "The variable %r is in no checkpoint and its initial value is not known any more: it is zero now. Add "
                "it to the checkpoint, or make it with a function as its initial value.",
                variable.name,
            )
            initial_value = tf.zeros(_smallest(variable.shape), variable.dtype)
        variable.assign(initial_value, read_value=False)


def _smallest(shape: tf.TensorShape) -> list[int]:
    """A shape that is compatible with one whose dimensions need not all be known."""
    return [] if shape.rank is None else [dimension or 0 for dimension in shape]
