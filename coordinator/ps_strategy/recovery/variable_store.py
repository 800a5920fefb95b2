"""The variables on the parameter servers, with their initial values.

The variables on a parameter server are lost with it. Here they are recreated in the same Python objects: a variable is
a Python object that holds the handle of a resource on a server, so it gets the handle of a new resource, and so does
every function that captured the old one.

Promise: after `renew`, the restoring of a checkpoint and `initialize_rest`, all variables are as a restarted client
would find them after restoring that checkpoint. That is why those on servers that survived are renewed too: a metric
whose total and count are on two servers stays consistent, even if no checkpoint holds it.
"""

import itertools
import logging
import weakref
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.tensorflow_internals.handles import new_handle, replace_handles

_logger = logging.getLogger("coordinator")

# An initial value that is an array is copied to the client unless it is larger than this, in bytes.
_LARGEST_COPY = 2**20
# The attribute of a variable that has its initial value, or the function that returns it. Kept elsewhere, it would keep
# the variable alive: the function that creates the initial value of a Keras variable refers to that variable.
_INITIAL_VALUE = "_coordinator_initial_value"


class VariableStore:
    """Refers weakly to every variable on a parameter server. Every method may be called from any thread.

    `renew` and `initialize_rest` are called while no function runs.
    """

    def __init__(self) -> None:
        # By a running number, since variables cannot be hashed; this keeps them in the order of their creation.
        self._variables: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()

    def add(self, variable: Any, initial_value: Any) -> None:
        """Adds a variable that was just created.

        Args:
          variable: a `tf.Variable`; one that is not on a parameter server is ignored.
          initial_value: the argument of its constructor: a value, a function that returns one, or None.
        """
        if tf.DeviceSpec.from_string(variable.device).job != "ps":
            return
        setattr(variable, _INITIAL_VALUE, _repeatable(variable, initial_value))
        self._variables[next(self._numbers)] = variable

    def variables(self) -> list[Any]:
        """Returns the variables that are alive, in the order of their creation."""
        # The references are copied in one step, since variables may be created meanwhile.
        return [variable for reference in self._variables.valuerefs() if (variable := reference()) is not None]

    def renew(self) -> None:
        """Gives every variable a new resource on its server, without a value, and every function the new handles.

        Raises:
          tf.errors.OpError: a server does not answer.
        """
        variables = self.variables()
        # All are created before the first replaces an old one: if a server fails meanwhile, nothing has changed.
        renewed = [(variable, new_handle(variable)) for variable in variables]
        replace_handles(renewed)

    def initialize_rest(self) -> None:
        """Assigns its initial value to every variable that has no value.

        Raises:
          tf.errors.OpError: a server does not answer.
          Exception: what the function for an initial value raised, with a note that names the variable.
        """
        for variable in self.variables():
            if not variable.is_initialized():
                try:
                    _initialize(variable)
                except Exception as error:
                    error.add_note(f"Raised while the variable {variable.name!r} was initialized again.")
                    raise


def _repeatable(variable: Any, initial_value: Any) -> Any:
    """Returns a function or a small array that gives the initial value again; None if there is none."""
    if initial_value is None or callable(initial_value):
        return initial_value
    if tf.is_symbolic_tensor(initial_value) or variable.dtype in (tf.resource, tf.variant):
        return None
    elements = variable.shape.num_elements()
    if elements is not None and elements * variable.dtype.size > _LARGEST_COPY:
        return None
    # Outside of the function that is being traced, if one is.
    with tf.init_scope():
        value = tf.convert_to_tensor(initial_value, variable.dtype).numpy()
    return value.copy() if value.nbytes <= _LARGEST_COPY else None


def _initialize(variable: Any) -> None:
    initial_value = getattr(variable, _INITIAL_VALUE)
    with tf.device(variable.device):
        if callable(initial_value):
            initial_value = initial_value()
        if initial_value is None:
            _logger.warning(
                "The variable %r is not in the checkpoint, and its initial value is no longer known: it is zero now. "
                "Add it to the checkpoint, or create it with a function as its initial value.",
                variable.name,
            )
            initial_value = tf.zeros(_smallest(variable.shape), variable.dtype)
        variable.assign(initial_value, read_value=False)


def _smallest(shape: tf.TensorShape) -> list[int]:
    """Returns the smallest shape that is compatible with one that may be partly unknown."""
    return [] if shape.rank is None else [dimension or 0 for dimension in shape]
