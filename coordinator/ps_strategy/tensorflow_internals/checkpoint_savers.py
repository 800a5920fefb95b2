"""What of a checkpoint is written and read in another way than TensorFlow's: large variables.

TensorFlow gives all values of a server to one operation that writes them. A value must not change while it is written,
so that the next update of a variable copies it first: a table of 1 GB needs 1 GB more, and updates wait for the copy.

Every checkpoint is written and read by a `MultiDeviceSaver`: those of `tf.train.Checkpoint`, of its managers, and the
variables of a SavedModel. Within `savers_replaced`, another object writes and reads some of the values, into files that
are merged with TensorFlow's.
"""

import contextlib
import copy
import functools
import math
import os
import re
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import tensorflow as tf
from tensorflow.python.checkpoint import functional_saver
from tensorflow.python.training.saving import saveable_object_util

from coordinator.ps_strategy.tensorflow_internals.process import attribute_replaced

# The attribute of a specification of what is saved that has the variable which is saved.
VARIABLE = "_coordinator_variable"

# How checkpoints name the pieces of a tensor: see `EncodeTensorNameSlice` of TensorFlow.
_PIECE = rb"\x00%s\x00\x01[\s\S]{1,90}?\(DT_\w+\) \[([\d,]*)\]\n"


class SavedVariable(NamedTuple):
    """A variable that a checkpoint holds, or is to hold.

    Attributes:
      variable: a `tf.Variable`.
      name: of the tensor in the checkpoint.
      slice_spec: which part of that tensor it is, as in `tf.raw_ops.SaveV2`; empty if it is all of it.
    """

    variable: Any
    name: str
    slice_spec: str


class LargeVariables(Protocol):
    """Writes and reads some of the variables of a checkpoint. `io_device` is that of `tf.train.CheckpointOptions`."""

    def to_write(self, variables: Sequence[SavedVariable]) -> Sequence[SavedVariable]:
        """Returns those that this object writes."""

    def write(self, variables: Sequence[SavedVariable], prefix: str, io_device: str | None) -> Sequence[str]:
        """Writes files whose names begin with `prefix`. Returns the prefixes that name them."""

    def to_read(self, variables: Sequence[SavedVariable], path: str) -> Sequence[SavedVariable]:
        """Returns those that this object reads from the checkpoint at `path`."""

    def read(self, variables: Sequence[SavedVariable], path: str, io_device: str | None) -> None:
        """Reads them."""


@contextlib.contextmanager
def savers_replaced(large: LargeVariables) -> Iterator[None]:
    """A scope in which checkpoints are written and read with the help of `large`, outside of functions."""
    # Private: a checkpoint has no public hook for how values are written; options would have to be given to each call.
    saver = functional_saver.MultiDeviceSaver
    save, restore = saver.save, saver.restore

    @functools.wraps(save)
    def save_large(self: Any, file_prefix: Any, options: Any = None) -> Any:
        taken = _take(self, large.to_write) if tf.executing_eagerly() else []
        return _save(self, taken, save, large, file_prefix, options) if taken else save(self, file_prefix, options)

    @functools.wraps(restore)
    def restore_large(self: Any, file_prefix: Any, options: Any = None) -> Any:
        if not tf.executing_eagerly():
            return restore(self, file_prefix, options)
        path = _text(file_prefix)
        taken = _take(self, lambda variables: large.to_read(variables, path))
        if taken:
            large.read([variable for _, variable in taken], path, _io_device(options))
            self = _without(self, taken)
        return restore(self, file_prefix, options) if _has_content(self) else {}

    with attribute_replaced(saver, "save", save_large), attribute_replaced(saver, "restore", restore_large):
        yield


def _save(saver: Any, taken: Any, save: Any, large: LargeVariables, file_prefix: Any, options: Any) -> None:
    prefix = _text(file_prefix)
    # As TensorFlow names the files that it merges; it deletes the folder afterwards.
    temporary = prefix + (".part" if prefix.startswith("s3://") else "_temp/part")
    written = []
    rest = _without(saver, taken)
    if _has_content(rest):
        written.append(f"{temporary}-rest")
        tf.io.gfile.makedirs(os.path.dirname(temporary))
        save(rest, tf.constant(written[0]), options)
    written += large.write([variable for _, variable in taken], temporary, _io_device(options))
    last = list(saver._shardable_tensors_by_task)[-1]
    with tf.device(_io_device(options) or last.to_string()):
        tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=written, destination_prefix=prefix, delete_old_dirs=True)


def _text(file_prefix: Any) -> str:
    return str(tf.compat.as_str(tf.get_static_value(tf.convert_to_tensor(file_prefix))))


def _io_device(options: Any) -> str | None:
    return None if options is None else options.experimental_io_device


def _take(saver: Any, choose: Any) -> list[tuple[Any, SavedVariable]]:
    """Returns the variables that `choose` chooses of a saver's, each with what the saver has of it."""
    # Private: a saver's list of all that it saves, by server.
    tensors = [tensor for each in saver._shardable_tensors_by_task.values() for tensor in each]
    found = []
    for tensor in tensors:
        if (variable := _variable_of(tensor)) is not None:
            spec = tensor._tensor_save_spec
            name, slice_spec = tf.compat.as_str(spec.name), tf.compat.as_str(spec.slice_spec or "")
            found.append((tensor, SavedVariable(variable, name, slice_spec)))
    chosen = {id(each) for each in choose([each for _, each in found])}
    return [(tensor, each) for tensor, each in found if id(each) in chosen]


def _variable_of(tensor: Any) -> tf.Variable | None:
    """Returns the variable behind what a saver saves, or None."""
    spec = tensor._tensor_save_spec
    if (variable := getattr(spec, VARIABLE, None)) is not None:
        return variable
    # The parts of a sharded variable are saved by objects that refer to them.
    for saveable in getattr(tensor.trackable, "saveables", ()):
        if isinstance(saveable, saveable_object_util.ResourceVariableSaveable) and saveable.specs[0] is spec:
            return saveable.op if isinstance(saveable.op, tf.Variable) else None
    return None


def _without(saver: Any, taken: Any) -> Any:
    """Returns a saver of the rest."""
    left_out = {id(tensor) for tensor, _ in taken}
    rest = copy.copy(saver)
    by_task = {
        task: [tensor for tensor in tensors if id(tensor) not in left_out]
        for task, tensors in saver._shardable_tensors_by_task.items()
    }
    rest._shardable_tensors_by_task = {task: tensors for task, tensors in by_task.items() if tensors}
    # With one, nothing is traced.
    rest._num_unique_tasks = len(rest._shardable_tensors_by_task)
    return rest


def _has_content(saver: Any) -> bool:
    return bool(saver._shardable_tensors_by_task or saver._registered_savers)


class StoredPieces:
    """How a checkpoint has stored its tensors: whole, or in pieces.

    Args:
      path: of the checkpoint.

    Raises:
      tf.errors.OpError: there is none, or it cannot be read.

    Attributes:
      shapes: of the whole tensors, by name.
    """

    def __init__(self, path: str) -> None:
        reader = tf.train.load_checkpoint(path)
        self.shapes: dict[str, list[int]] = reader.get_variable_to_shape_map()
        # Private in its form: no public call tells how tensors are stored.
        self._listing: bytes = reader.debug_string()

    def largest(self, name: str) -> int | None:
        """Returns the number of elements of the largest piece of a tensor; None if it is not stored in pieces."""
        shapes = re.findall(_PIECE % re.escape(name.encode()), self._listing)
        return max((math.prod(map(int, filter(None, shape.split(b",")))) for shape in shapes), default=None)
