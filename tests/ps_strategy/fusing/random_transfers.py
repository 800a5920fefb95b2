"""Random graphs that move tensors of every dtype between servers, and change none of their bits."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator.ps_strategy.tensorflow_internals.functions import CancellationManager, call_concrete, own_executor

WORKER = "/job:worker/replica:0/task:0/device:CPU:0"
SERVERS = [f"/job:ps/replica:0/task:{index}/device:CPU:0" for index in range(2)]
_INTEGERS = [tf.int8, tf.int16, tf.int32, tf.int64, tf.uint8, tf.uint16, tf.uint32, tf.uint64]
_FLOATS = [tf.float16, tf.bfloat16, tf.float32, tf.float64]
# TensorFlow can send these, but has few operations on them.
_RARE = [
    *map(tf.as_dtype, ["float8_e5m2", "float8_e4m3fn", "int4", "uint4"]),
    *(tf.qint8, tf.quint8, tf.qint16, tf.quint16, tf.qint32),
]
# Sent as words of four bytes, if nothing else is sent with them. TensorFlow folds no constants in a function that has
# tensors of rare types.
WORDS = [tf.int32, tf.int64, tf.float32, tf.float64]
COMMON = [*_INTEGERS, *_FLOATS, tf.bool, tf.complex64, tf.complex128, tf.string]
DTYPES = [*COMMON, *_RARE]
# TensorFlow can send these too, but cannot write them into a graph.
FED_ONLY = list(
    map(tf.as_dtype, ["float8_e4m3fnuz", "float8_e4m3b11fnuz", "float8_e5m2fnuz", "float4_e2m1fn", "int2", "uint2"])
)

_SHAPES = [(), (1,), (4,), (2, 3), (0,), (0, 2), (7, 1, 2), (300,)]
_KINDS = ["constant", "computed", "computed", "fed", "fed with unknown length"]
_PARTS = 24


@dataclasses.dataclass(frozen=True)
class _Tensor:
    """The source of a tensor, and the operations on it at each device that it is sent to."""

    dtype: tf.DType
    kind: str
    value: Any
    operations: Sequence[int]


def bits(value: Any) -> bytes:
    """Returns a key of a NumPy value that is equal for two values if all their bits are."""
    array = value if isinstance(value, np.ndarray) else np.array(value, object if isinstance(value, bytes) else None)
    return repr(array.tolist()).encode() if array.dtype.hasobject else array.tobytes()


def random_value(rng: np.random.Generator, dtype: tf.DType, shape: Sequence[int]) -> Any:
    """Numbers of any bits; or small ones, which are denormal as floats; or one of those, or its negative, repeated."""
    count = int(np.prod(shape))
    if dtype is tf.string:
        return np.array([rng.bytes(int(size)) for size in rng.integers(0, 9, count)], object).reshape(shape)
    if dtype is tf.bool:
        return rng.integers(0, 2, shape).astype(bool)
    if dtype in [*_RARE, *FED_ONLY]:
        most = 1 if dtype.name.endswith("int2") else 6
        return rng.integers(0, most + 1, shape).astype(np.int8).astype(dtype.as_numpy_dtype)
    kind = rng.integers(0, 3)
    if kind == 0:
        words = np.frombuffer(rng.bytes(count * dtype.size), np.uint8)
    else:
        rows = np.zeros([count, dtype.size], np.uint8)
        rows[:, 0] = rng.integers(0, 5, count if kind == 1 else 1)
        rows[:, -1] = 128 * rng.integers(0, 2) if kind == 2 else 0
        words = rows.ravel()
    return words.view(dtype.as_numpy_dtype).reshape(shape)


class RandomTransfers:
    """A random graph of many parts; in each, a few tensors go from device to device together.

    Args:
      seed: another one, another graph.
      dtypes: of the tensors.

    Attributes:
      signature: of the function.
      fed: the values to call it with.
      sections: the name scopes of parts, with gaps, so that messages have tensors of one part only.
    """

    def __init__(self, seed: int, dtypes: Sequence[tf.DType] = DTYPES) -> None:
        rng = np.random.default_rng(seed)
        self.signature: list[tf.TensorSpec] = []
        self.fed: list[Any] = []
        self.sections = [f"part_{number}" for number in range(2 * _PARTS)]
        self._parts: list[tuple[list[str | None], list[_Tensor]]] = []
        for number in range(_PARTS):
            places = [None, *SERVERS] if number % 2 else list(rng.permutation([None, *SERVERS]))
            chosen = [dtypes[index] for index in rng.integers(0, len(dtypes), rng.integers(2, 5))]
            self._parts.append((places, [self._tensor(rng, dtype, len(places)) for dtype in chosen]))

    def _tensor(self, rng: np.random.Generator, dtype: tf.DType, moves: int) -> _Tensor:
        kind, shape = _KINDS[rng.integers(len(_KINDS))], _SHAPES[rng.integers(len(_SHAPES))]
        value = random_value(rng, dtype, shape)
        if kind.startswith("fed"):
            is_open = kind != "fed" and shape
            self.signature.append(tf.TensorSpec([None, *shape[1:]] if is_open else shape, dtype))
            self.fed.append(value)
        return _Tensor(dtype, kind, value, list(rng.integers(0, len(_OPERATIONS), moves)))

    def __call__(self, *fed: Any) -> list[Any]:
        """Builds the graph, and returns the tensors that arrive on the worker."""
        rest, arrived = iter(fed), []
        for section, (places, tensors) in zip(self.sections[::2], self._parts, strict=True):
            with tf.name_scope(section):
                for each in tensors:
                    with tf.device(places[0]):
                        moved = next(rest) if each.kind.startswith("fed") else _made(each)
                    for place, operation in zip(places, each.operations, strict=True):
                        with tf.device(place):
                            moved = (tf.identity if each.dtype in _RARE else _OPERATIONS[operation])(moved)
                    with tf.device(None):
                        arrived.append(tf.identity(moved))
        return arrived


def _made(each: _Tensor) -> Any:
    """Returns a constant, or an expression that TensorFlow's constant folding can evaluate."""
    value, dtype = each.value, each.dtype
    if each.kind == "computed" and dtype in _INTEGERS and value.size:
        return tf.fill(value.shape, tf.constant(int(value.ravel()[0]) % 5, dtype)) + tf.ones(value.shape, dtype)
    if each.kind == "computed" and dtype not in _RARE and value.size:
        return tf.fill(value.shape, tf.constant(value.ravel()[0], dtype))
    return tf.constant(value, dtype)


def _reversed(tensor: Any) -> Any:
    return tf.reverse(tensor, [0]) if tensor.shape.rank else tensor


def _gathered(tensor: Any) -> Any:
    return tf.gather(tensor, tf.range(tf.shape(tensor)[0])) if tensor.shape.rank else tensor


_OPERATIONS: list[Callable[[Any], Any]] = [tf.identity, _reversed, _gathered, lambda tensor: tf.reshape(tensor, [-1])]


def run_on_worker(concrete: Any, fed: Sequence[Any]) -> list[bytes]:
    """Runs a function on a worker and two parameter servers, and returns the bits of each result."""
    with tf.device(WORKER), own_executor():
        inputs = [tf.constant(value, tensor.dtype) for value, tensor in zip(fed, concrete.inputs, strict=True)]
        outputs = call_concrete(concrete, inputs, CancellationManager())
        return [bits(tensor.numpy()) for tensor in outputs]
