"""The version that a push is given: checked while the push is traced."""

from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.tensorflow_internals.reads import is_within

_NEEDED = "The version of a push must be the value of its rule.pull(), an int64 scalar;"
# The operations of which a function gets its arguments, and the results of the functions that it calls.
_FROM_ELSEWHERE = ("Placeholder", "PartitionedCall", "StatefulPartitionedCall")


def checked_version(version: Any) -> Any:
    """Converts the version of a push to a tensor.

    Raises:
      TypeError: it is no int64 scalar.
    """
    try:
        converted = tf.convert_to_tensor(version, tf.int64)
    except (TypeError, ValueError) as error:
        raise TypeError(f"{_NEEDED} got {version!r}.") from error
    if not converted.shape.is_compatible_with([]):
        raise TypeError(f"{_NEEDED} got one of shape {converted.shape}.")
    return converted


def check_pulled_elsewhere(version: Any) -> None:
    """Checks the version of a push in a function without a pull.

    Raises:
      ValueError: it comes neither from an argument of the function nor from another function.
    """
    if is_within(version.graph) and version.op.type not in _FROM_ELSEWHERE:
        raise ValueError(
            "rule.push() found no rule.pull() of this rule. Compute the gradients in `with rule.pull() as version:`, "
            "and push them with this version; or call rule.run(), which does both."
        )
