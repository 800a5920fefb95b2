"""How gradients change variables: a Keras 3 optimizer, or an update function.

Each parameter server applies an optimizer or a function to its own variables and their slots.
"""

import numbers
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.keras.internals import optimizers as keras_optimizers
from coordinator.ps_strategy.keras.internals.optimizers import parts_of, variable_of
from coordinator.ps_strategy.keras.internals.row_updates import updates_rows
from coordinator.ps_strategy.tensorflow_internals.handles import is_on_parameter_server

UpdateFunction = Callable[[tf.Variable, Any, Any], object]


class KerasOptimizer:
    """A Keras 3 optimizer, with its schedule, clipping, weight decay and moving averages.

    The constructor builds the optimizer if necessary. `iterations` is counted once per update, atomically. The
    optimizer never gets variables other than `variables`.

    Raises:
      ValueError: the optimizer accumulates gradients itself, scales losses dynamically, combines several optimizers, or
        has slots on other servers than variables; or a sharded variable has a constraint, or is updated as a whole.
    """

    def __init__(self, optimizer: Any, variables: Sequence[Any]) -> None:
        if optimizer.gradient_accumulation_steps:
            raise ValueError(
                "An optimizer with gradient_accumulation_steps accumulates per parameter server, out of step. Use "
                "coordinator.updates.Synchronous(grads_to_wait=...), which accumulates the gradients of all workers."
            )
        if hasattr(optimizer, "inner_optimizer"):
            raise ValueError(
                "A LossScaleOptimizer decides on all gradients at once whether to apply any. Give its inner optimizer "
                "to the rule, and use mixed_bfloat16, or a fixed loss_scale_factor."
            )
        if hasattr(optimizer, "optimizers"):
            raise ValueError(
                "A MultiOptimizer applies the gradients of all variables together, and counts in each of its parts. "
                "Create one rule for each of its optimizers, with the variables that are meant for it."
            )
        # Each part of a sharded variable is updated on the server of the part.
        for variable in [variable for variable in variables if len(parts_of(variable)) > 1]:
            name = variable_of(variable).name
            if not updates_rows(optimizer):
                raise ValueError(
                    f"{type(optimizer).__name__} updates whole variables, and {name!r} is in parts on several "
                    "parameter servers. Give the rule an optimizer that updates each element by itself, such as Adam, "
                    "or create the variable where the strategy's variable_partitioner does not divide it."
                )
            if variable.constraint is not None:
                raise ValueError(
                    f"The variable {name!r} has a constraint, which concerns all of its rows, and is in parts on "
                    "several parameter servers. Train it with optimizer.apply in a step, without a rule, or drop the "
                    "constraint."
                )
        if not optimizer.built:
            keras_optimizers.build(optimizer, variables)
        if keras_optimizers.has_strayed_slots(optimizer):
            raise ValueError(
                "The optimizer has slots on another server than their variable, so an update would wait for the "
                "network. Give the rule an optimizer that is not built yet; it builds it with the slots in place."
            )
        self.optimizer = optimizer

    @property
    def scalars(self) -> Sequence[Any]:
        """`iterations`, and the learning rate if it is a variable. Their values are pulled with the model."""
        return keras_optimizers.scalar_variables(self.optimizer)

    def learning_rate(self, scalars: Sequence[Any], version: Any) -> Any:
        """Returns the learning rate of the next update, before it is scaled for staleness; a float32 scalar.

        `scalars` has the values of `self.scalars`. Keras schedules use `iterations`, not the model's version.
        """
        del version
        return keras_optimizers.learning_rate(self.optimizer, scalars)

    def prepared(self, gradients: Sequence[Any], variables: Sequence[Any]) -> Sequence[Any]:
        """Prepares all gradients of a step on the worker, before they are divided and sent.

        Rows of the same index are summed. The worker clips gradients if no server knows the norm, as for the global
        norm and for the norm of a sharded variable.
        """
        gradients = list(map(keras_optimizers.without_repeats, gradients))
        # The optimizer divides gradients by its loss scale after this clipping, so the norm limit is scaled.
        scale = self.optimizer.loss_scale_factor or 1.0
        if self.optimizer.global_clipnorm:
            return keras_optimizers.clipped_by_global_norm(gradients, scale * self.optimizer.global_clipnorm)
        if self.optimizer.clipnorm:
            for number, variable in enumerate(variables):
                if len(parts_of(variable)) > 1:
                    # A part has a smaller norm than the whole, so the servers do not clip it again.
                    [gradients[number]] = keras_optimizers.clipped_by_global_norm(
                        [gradients[number]], scale * self.optimizer.clipnorm
                    )
        return gradients

    def apply(self, variables: Sequence[Any], gradients: Sequence[Any], scalars: Sequence[Any], rate: Any) -> None:
        """Applies the optimizer to variables of a server, or to a worker's copies; all tensors are on one device."""
        view = keras_optimizers.view_for_variables(self.optimizer, variables, scalars, rate)
        view.apply(list(gradients), list(variables))

    def count(self) -> None:
        """Counts one update: adds one to `iterations`."""
        self.scalars[0].assign_add(1, read_value=False)

    def for_copies(self, originals: Sequence[Any], copies: Sequence[Any]) -> "KerasOptimizer":
        """Clones the optimizer's initial state for copies of variables. The current scope places the clone's slots."""
        # `apply` always gets the learning rate, so the clone needs no schedule, which Keras might be unable to clone.
        own = type(self.optimizer).from_config({**self.optimizer.get_config(), "learning_rate": 0.0})
        exempt = keras_optimizers.exempt_from_weight_decay(self.optimizer, originals)
        own.exclude_from_weight_decay(var_list=[copies[number] for number in exempt])
        return KerasOptimizer(own, copies)

    def __repr__(self) -> str:
        return f"<KerasOptimizer {type(self.optimizer).__name__}>"


class FunctionOptimizer:
    """A function `(variable, gradient, learning_rate)` that changes a variable, with the methods of `KerasOptimizer`.

    `update` takes a `tf.Variable` or a part of a sharded variable, its gradient (a tensor, or `tf.IndexedSlices`), and
    the learning rate, a float32 scalar. `learning_rate` is a number, a scalar variable, or a function of the version,
    such as a Keras schedule (else TypeError). With `allow_duplicate_indices`, `tf.IndexedSlices` may repeat an index.
    """

    def __init__(self, update: UpdateFunction, learning_rate: Any, allow_duplicate_indices: bool = False) -> None:
        self._update = update
        self._rate = _checked_rate(learning_rate)
        self._allow_duplicate_indices = allow_duplicate_indices

    @property
    def scalars(self) -> Sequence[Any]:
        """The learning rate, if it is a variable."""
        return [self._rate] if isinstance(self._rate, tf.Variable) else []

    def learning_rate(self, scalars: Sequence[Any], version: Any) -> Any:
        """Returns the learning rate, a float32 scalar; see `KerasOptimizer`."""
        if callable(self._rate):
            return tf.cast(self._rate(version), tf.float32)
        return tf.cast(scalars[0] if scalars else self._rate, tf.float32)

    def prepared(self, gradients: Sequence[Any], variables: Sequence[Any]) -> Sequence[Any]:
        """Sums rows of the same index, unless repeated indices are allowed."""
        del variables
        return gradients if self._allow_duplicate_indices else list(map(keras_optimizers.without_repeats, gradients))

    def apply(self, variables: Sequence[Any], gradients: Sequence[Any], scalars: Sequence[Any], rate: Any) -> None:
        """Calls the function for each variable."""
        for variable, gradient in zip(variables, gradients, strict=True):
            self._update(variable, gradient, rate)

    def count(self) -> None:
        """Does nothing."""

    def for_copies(self, originals: Sequence[Any], copies: Sequence[Any]) -> "FunctionOptimizer":
        """Returns this object, which has no state."""
        return self

    def __repr__(self) -> str:
        return f"<FunctionOptimizer {getattr(self._update, '__name__', self._update)!r}>"


GradientOptimizer = KerasOptimizer | FunctionOptimizer


def _checked_rate(rate: Any) -> Any:
    """Returns a number, a `tf.Variable`, or a traced function; TypeError for anything else."""
    wanted = "a number, a scalar tf.Variable, or a function of the model's version that returns a number"
    if callable(rate):
        # `tf.function` lets AutoGraph convert the conditions of the function.
        function = tf.function(rate)
        try:
            value = tf.convert_to_tensor(function(tf.constant(0, tf.int64)))
        except Exception as error:
            raise TypeError(f"learning_rate must be {wanted}; {rate!r} raises {error!r} for version 0.") from error
        if value.shape.rank != 0 or not (value.dtype.is_floating or value.dtype.is_integer):
            raise TypeError(f"learning_rate must be {wanted}; {rate!r} returns {value!r} for version 0.")
        return function
    rate = variable_of(rate)
    is_scalar = isinstance(rate, tf.Variable) and rate.shape.rank == 0
    if isinstance(rate, bool) or not (is_scalar or isinstance(rate, numbers.Real)):
        raise TypeError(f"learning_rate must be {wanted}, got {rate!r}.")
    return rate


def gradient_optimizer(
    optimizer: Any, variables: Sequence[Any], learning_rate: Any, allow_duplicate_indices: bool = False
) -> GradientOptimizer:
    """Creates the `GradientOptimizer` of a rule.

    Raises:
      TypeError: `optimizer` is neither a Keras 3 optimizer nor a function; or a function has no usable learning rate.
      ValueError: rules do not support the Keras optimizer, or another argument is for update functions only.
    """
    if keras_optimizers.is_optimizer(optimizer):
        if learning_rate is not None:
            raise ValueError("learning_rate goes with an update function; a Keras optimizer has its own.")
        if allow_duplicate_indices:
            raise ValueError(
                "allow_duplicate_indices goes with an update function that only adds; a Keras optimizer reads what it "
                "changes, so that it needs one row for each index."
            )
        scalars = keras_optimizers.scalar_variables(optimizer)
        if not all(is_on_parameter_server(variable.device) for variable in scalars):
            raise ValueError("The optimizer's variables are on no parameter server. Create it inside strategy.scope().")
        return KerasOptimizer(optimizer, variables)
    if not callable(optimizer) or hasattr(optimizer, "apply_gradients"):
        raise TypeError(
            f"optimizer must be a Keras 3 optimizer or a function (variable, gradient, learning_rate), got "
            f"{optimizer!r}. For an optimizer of tf_keras, give a function that calls it."
        )
    if learning_rate is None:
        raise TypeError(
            "An update function needs learning_rate=: a number, a scalar tf.Variable, or a function of the version."
        )
    return FunctionOptimizer(optimizer, learning_rate, allow_duplicate_indices)
