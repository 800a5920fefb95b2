"""Many tensors sent from one device to another as few.

By hand, for steps that may wait for other workers, in branches and loops too. Of all others the transfers are joined
when they run several in one call or have run often (`coordinator.ps_strategy.fusing.message_packing`), and what was joined
before would be copied twice.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.fusing.message_packing import PACKED_TYPES, is_worth_packing

# A message has tensors of one dtype: those that TensorFlow can join and split, and that gradients and variables have.
_PACKED_TYPES = PACKED_TYPES | {tf.bool, tf.complex64, tf.complex128}


@dataclasses.dataclass(frozen=True)
class Parcel:
    """What arrived.

    Attributes:
      tensors: those that were sent, on the device that they were sent to.
      size: how much that was, in bytes: an int64 scalar.
    """

    tensors: list[Any]
    size: tf.Tensor


def send(tensors: Sequence[Any], source: str | None, target: str | None, *, is_joined: bool = True) -> Parcel:
    """Brings tensors from one device to another.

    Args:
      tensors: any; all dimensions but the first must be known of those that are to be packed.
      source: the device that they are on; None is the worker.
      target: where they are needed; None is the worker.
      is_joined: whether those of one dtype are joined here, if they are small. Otherwise none is there before all are.
    """
    size = bytes_of(tensors, source)
    if not is_joined:
        with tf.device(target):
            return Parcel(tf.identity_n(tensors), size)
    arrived: dict[int, Any] = {}
    groups: dict[tf.DType, list[int]] = {}
    for number, tensor in enumerate(tensors):
        if tensor.dtype in _PACKED_TYPES and is_worth_packing(tensor):
            groups.setdefault(tensor.dtype, []).append(number)
        else:
            arrived[number] = _moved(tensor, target)
    for numbers in groups.values():
        packed = [tensors[number] for number in numbers]
        arrived.update(zip(numbers, _packed(packed, source, target), strict=True))
    return Parcel([arrived[number] for number in range(len(tensors))], size)


def bytes_of(tensors: Sequence[Any], source: str | None) -> tf.Tensor:
    """How much tensors are, in bytes: an int64 scalar. What shapes tell is no message of its own.

    Args:
      tensors: any.
      source: the device that they are on; None is the worker.
    """
    known = [tensor for tensor in tensors if tensor.shape.is_fully_defined()]
    sizes = [tf.constant(sum(tensor.shape.num_elements() * tensor.dtype.size for tensor in known), tf.int64)]
    with tf.device(source):
        others = [
            tf.size(tensor, tf.int64) * tensor.dtype.size for tensor in tensors if not tensor.shape.is_fully_defined()
        ]
        if others:
            sizes.append(tf.add_n(others))
    return tf.add_n(sizes)


def _packed(tensors: list[Any], source: str | None, target: str | None) -> list[Any]:
    if len(tensors) == 1:
        return [_moved(tensors[0], target)]
    with tf.device(source):
        together = tf.concat([tf.reshape(tensor, [-1]) for tensor in tensors], 0)
        counts: Any = [tensor.shape.num_elements() for tensor in tensors]
        if None in counts:
            counts = tf.stack([tf.size(tensor, tf.int64) for tensor in tensors])
    with tf.device(target):
        parts = tf.split(together, counts)
        return [
            tf.reshape(part, [-1 if size is None else size for size in tensor.shape])
            for part, tensor in zip(parts, tensors, strict=True)
        ]


def _moved(tensor: Any, target: str | None) -> Any:
    with tf.device(target):
        return tf.identity(tensor)
