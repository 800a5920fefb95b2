"""Keras 3's optimizers: placement of their variables, their learning rate, and updates of some variables only."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from coordinator.ps_strategy.keras.internals.parts import parts_of, slot_lists, variable_of, with_parts
from coordinator.ps_strategy.keras.internals.stand_ins import StandIn


def is_optimizer(value: Any) -> bool:
    """Returns True for an optimizer of Keras 3."""
    return isinstance(value, keras.optimizers.Optimizer)


def build(optimizer: Any, variables: Sequence[Any]) -> None:
    """Creates the variables of an optimizer, with each slot on the server of its model variable."""
    optimizer.build(_Colocating(variables))


class _Colocating(list[Any]):
    """A list of variables; variables that are created during an iteration are placed beside the current one.

    Keras has no other hook: most optimizers ask for their slots to be beside the variable, Adafactor does not.
    """

    def __iter__(self) -> Iterator[Any]:
        for variable in super().__iter__():
            with tf.distribute.get_strategy().extended.colocate_vars_with(variable_of(variable)):
                yield variable


def has_strayed_slots(optimizer: Any) -> bool:
    """Returns True if a built optimizer has a slot on another device than its variable."""
    # Private: the variables that it was built with, in the order of its slots.
    variables = optimizer._trainable_variables
    return any(
        isinstance(slot, keras.Variable) and _devices(slot) != _devices(variable)[: len(parts_of(slot))]
        for slots in slot_lists(optimizer).values()
        for slot, variable in zip(slots, variables, strict=True)
    )


def _devices(variable: Any) -> list[str]:
    return [variable_of(part).device for part in parts_of(variable)]


def scalar_variables(optimizer: Any) -> list[tf.Variable]:
    """Returns the TensorFlow variables of the count of updates and, if it is a variable, the learning rate."""
    # Private: `optimizer.learning_rate` returns the value, not the variable.
    rate = optimizer._learning_rate
    return [optimizer._iterations.value, *([rate.value] if isinstance(rate, keras.Variable) else [])]


def learning_rate(optimizer: Any, scalars: Sequence[Any]) -> Any:
    """Returns the learning rate for given values of `scalar_variables`, a float32 scalar."""
    # Private: `optimizer.learning_rate` would read the variables where they are.
    rate = optimizer._learning_rate
    if isinstance(rate, keras.Variable):
        return tf.cast(scalars[1], tf.float32)
    if isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
        return tf.cast(rate(scalars[0]), tf.float32)
    return tf.cast(rate() if callable(rate) else rate, tf.float32)


def exempt_from_weight_decay(optimizer: Any, variables: Sequence[Any]) -> list[int]:
    """Returns the positions of the variables that an optimizer excludes from weight decay."""
    # Private: the config does not have what `exclude_from_weight_decay` was called with.
    view = with_parts(optimizer)
    return [number for number, variable in enumerate(variables) if not view._use_weight_decay(variable)]


def without_repeats(gradient: Any) -> Any:
    """Sums rows of the same index, if the gradient is `tf.IndexedSlices`; returns other gradients as they are."""
    if not isinstance(gradient, tf.IndexedSlices) or _are_unique(gradient.indices):
        return gradient
    indices, positions = tf.unique(gradient.indices)
    values = tf.math.unsorted_segment_sum(gradient.values, positions, tf.size(indices))
    return tf.IndexedSlices(values, indices, gradient.dense_shape)


def _are_unique(indices: Any) -> bool:
    """Returns True if the indices are known to have no repeats: those of a table's look-up are made so."""
    return tf.is_symbolic_tensor(indices) and indices.op.type == "Unique" and indices is indices.op.outputs[0]


def clipped_by_global_norm(gradients: Sequence[Any], greatest: Any) -> Sequence[Any]:
    """Clips gradients by their global norm; `tf.IndexedSlices` must have each index once, and stay sparse."""
    norm = tf.linalg.global_norm([tf.cast(gradient, tf.float32) for gradient in gradients])
    return tf.clip_by_global_norm(gradients, greatest, norm)[0]


def clipped(optimizer: Any, gradients: Sequence[Any], clip: Callable[[Sequence[Any]], Sequence[Any]]) -> Sequence[Any]:
    """Clips gradients as an optimizer is set to.

    Args:
      optimizer: a Keras 3 optimizer.
      gradients: tensors, and `tf.IndexedSlices` that have each index once, which stay sparse.
      clip: the optimizer's own method for it.
    """
    greatest = optimizer.global_clipnorm
    # As Keras, which uses the first that is set.
    if optimizer.clipnorm or not greatest:
        return clip(gradients)
    return clipped_by_global_norm(gradients, greatest)


def view_for_variables(optimizer: Any, variables: Sequence[Any], scalars: Sequence[Any], rate: Any) -> Any:
    """Returns a view of an optimizer for one update of some of its variables, on their server.

    Its `apply` uses the given learning rate and count of updates, and does not count the update. Sparse gradients must
    have each index once.

    Args:
      optimizer: a built Keras 3 optimizer.
      variables: the variables to update, or parts of them, all on one server.
      scalars: the values of `scalar_variables`.
      rate: the learning rate, a float scalar.
    """
    view = with_parts(optimizer)
    # Private: the learning rate and the count are attributes, shared by all users of the optimizer, and the moving
    # averages of all variables are in one list.
    view.__dict__.update(
        _learning_rate=rate,
        _iterations=StandIn(scalars[0]),
        global_clipnorm=None,
        # Read by `row_updates`.
        has_unique_rows=True,
    )
    if optimizer.use_ema:
        # Variables without a gradient are averaged as well.
        device = variable_of(variables[0]).device
        near = [number for number, each in enumerate(view._trainable_variables) if variable_of(each).device == device]
        for name in ("_trainable_variables", "_model_variables_moving_average"):
            view.__dict__[name] = [getattr(view, name)[number] for number in near]
    if isinstance(optimizer, keras.optimizers.Nadam):
        # Private: the product of all momenta is one variable, which every server would multiply.
        view.__dict__["_u_product"] = StandIn(product_of_momenta(optimizer.beta_1, scalars[0]))
    return view


def product_of_momenta(beta: float, updates: Any) -> Any:
    """Returns the product of Nadam's momenta after `updates` updates, a float32 scalar (Dozat 2016, section 3)."""
    # In float32, all later momenta equal beta.
    factors = 1.0 - 0.5 * 0.96 ** tf.range(1.0, 513.0)
    factors = tf.where(tf.range(512, dtype=updates.dtype) < updates, factors, 1.0)
    return tf.reduce_prod(factors) * beta ** tf.cast(updates, tf.float32)
