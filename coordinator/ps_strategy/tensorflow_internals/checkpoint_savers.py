"""Parts of a checkpoint that TensorFlow cannot write and read: large variables, tables, sharded variables.

TensorFlow gives all values of a server to one operation that writes them. A value must not change while it is written,
so the next update of a variable first copies the value. A table of 1 GB needs 1 GB more, and updates wait for the copy.

A `MultiDeviceSaver` of TensorFlow writes and reads every checkpoint, and the variables of a SavedModel. Within
`savers_replaced`, another object writes and reads some of the values; its files are merged with TensorFlow's files.
Within `saves_captured`, nothing is written, and the caller gets the values to write.
"""

import contextlib
import contextvars
import copy
import functools
import math
import os
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

import tensorflow as tf
from tensorflow.python.checkpoint import functional_saver, tensor_callable
from tensorflow.python.trackable import base
from tensorflow.python.trackable.constants import VARIABLE_VALUE_KEY
from tensorflow.python.training.saving import saveable_object_util
from tensorflow.python.training.saving.saveable_object_util import TrackableSaveable

from coordinator.ps_strategy.tensorflow_internals.process import attribute_replaced

# The attribute in which the specification of a saved value holds the value's variable.
VARIABLE = "_coordinator_variable"
# The attribute in which the specification of a `SelfSaving` object holds that object.
_WRITER = "_coordinator_writer"
# Attributes of `tf.train.Checkpoint`: the asynchronous checkpointer, and the method that creates this checkpointer.
_ASYNCHRONOUS, _MAKES_ASYNCHRONOUS = "_async_checkpointer_impl", "_async_checkpointer"
# Matches a tensor's piece in the listing of a checkpoint; see TensorFlow's `EncodeTensorNameSlice` for the name.
_PIECE = rb"\x00%s\x00\x01[\s\S]{1,90}?\(DT_\w+\) \[([\d,]*)\]\n"


class SavedInSlices:
    """A mixin for classes of variables whose rows are in other variables.

    The rows of the `parts` are consecutive. A checkpoint stores each part as a slice of one tensor of the whole shape,
    as TensorFlow stores its own sharded variables. So a variable can be restored with other parts or in one piece, and
    parts can be restored from a variable that was saved in one piece.
    """

    parts: Sequence[Any]

    # All private: checkpoints and SavedModels call these methods. No public way saves a slice of a tensor.

    def _serialize_to_tensors(self) -> dict[str, dict[str, Any]]:
        slices = {
            name: part._serialize_to_tensors()[VARIABLE_VALUE_KEY]
            for name, part in zip(self._slice_names(), self.parts, strict=True)
        }
        return {VARIABLE_VALUE_KEY: slices}

    def _restore_from_tensors(self, restored_tensors: dict[str, dict[str, Any]]) -> list[Any]:
        slices = restored_tensors[VARIABLE_VALUE_KEY]
        return [
            part._restore_from_tensors({VARIABLE_VALUE_KEY: slices[name]})
            for name, part in zip(self._slice_names(), self.parts, strict=True)
        ]

    def _slice_names(self) -> list[str]:
        """Returns the place of each part in the whole, in the format of `shape_and_slices` of `tf.raw_ops.SaveV2`."""
        rows, *rest = self.shape.as_list()  # type: ignore[attr-defined]  # of the other base
        row = "".join(f":0,{size}" for size in rest)
        names, first = [], 0
        for part in self.parts:
            names.append(f"{' '.join(map(str, [rows, *rest]))} {first},{part.shape[0]}{row}")
            first += part.shape[0]
        return names

    def _copy_trackable_to_cpu(self, object_map: Any) -> None:
        for part in self.parts:
            part._copy_trackable_to_cpu(object_map)
        if self not in object_map:
            copies = [object_map[part] for part in self.parts]
            object_map[self] = type(self)(copies, self._shared_name)  # type: ignore[call-arg,attr-defined]


@contextlib.contextmanager
def slices_restored() -> Iterator[None]:
    """A scope in which all slices of a tensor are restored, instead of only the first slice."""
    # Private: TensorFlow saves all slices that `_serialize_to_tensors` returns for a tensor, but restores only the
    # first slice. TensorFlow's own sharded variables use an older interface, which Keras variables do not have.
    stock = TrackableSaveable.restore

    @functools.wraps(stock)
    def restore(self: Any, restored_tensors: Sequence[Any], restored_shapes: Any) -> Any:
        if len(self._local_names) == len(self.specs):
            return stock(self, restored_tensors, restored_shapes)
        slices = {spec.slice_spec: tensor for spec, tensor in zip(self.specs, restored_tensors, strict=True)}
        return self._trackable._restore_from_tensors({self._local_names[0]: slices})

    with attribute_replaced(TrackableSaveable, "restore", restore):
        yield


class SelfSaved(NamedTuple):
    """The prefixes of the files that an object has written, and a function to call when the checkpoint is complete."""

    prefixes: Sequence[str]
    finish: Callable[[], None]


class SelfSaving(base.Trackable):  # Private: the public base, `tf.Module`, tracks all attributes.
    """A base of objects in a `tf.train.Checkpoint` that write and read themselves.

    These objects are saved only within `savers_replaced`, and not asynchronously. `ATTRIBUTE` names their content in a
    checkpoint, as "VARIABLE_VALUE" names the value of a variable.
    """

    ATTRIBUTE = "CONTENT"

    def write_to_checkpoint(self, name: str, prefix: str) -> SelfSaved:
        """Writes files whose names begin with the path `prefix`.

        The name of each tensor in the files is `name`, or begins with `name` and a slash.
        """
        raise NotImplementedError

    def read_from_checkpoint(self, name: str, path: str) -> None:
        """Reads the tensors that were written under `name` from the checkpoint at `path`."""
        raise NotImplementedError

    def _serialize_to_tensors(self) -> dict[str, Any]:
        def refuse() -> None:
            raise RuntimeError(f"{self!r} is saved and restored by its strategy, and that is closed, or in a function.")

        # Private: a `Callable` tells a checkpoint that the object has something to save.
        spec = tensor_callable.Callable(refuse, tf.string, "/device:CPU:0")
        setattr(spec, _WRITER, self)
        return {self.ATTRIBUTE: spec}

    def _restore_from_tensors(self, restored_tensors: Any) -> None:
        raise NotImplementedError


class SavedVariable(NamedTuple):
    """A variable that a checkpoint holds, or will hold.

    Attributes:
      variable: a `tf.Variable`; None in a `SavedValue` of another object.
      name: the name of the tensor in the checkpoint.
      slice_spec: the slice of the tensor, as in `tf.raw_ops.SaveV2`; empty for the whole tensor.
    """

    variable: Any
    name: str
    slice_spec: str


class SavedValue(NamedTuple):
    """A value that a checkpoint will hold, on the CPU `device` of a server. `read` returns the value, or None."""

    device: str
    saved: SavedVariable
    read: Callable[[], Any]


class CapturedSave(NamedTuple):
    """A save that has written no file yet. `prefix` is the path of the checkpoint; the CPU `device` merges the files.

    `themselves` has the name and the object of each `SelfSaving` object.
    """

    prefix: str
    values: Sequence[SavedValue]
    themselves: Sequence[tuple[str, SelfSaving]]
    device: str


_captured: contextvars.ContextVar[list[CapturedSave] | None] = contextvars.ContextVar("captured_saves", default=None)


@contextlib.contextmanager
def saves_captured() -> Iterator[list[CapturedSave]]:
    """A scope in which saves of the calling thread write nothing. It yields a list, to which the saves are appended.

    The scope has an effect only within `savers_replaced`. A save with savers that users have registered with TensorFlow
    is written as always, with all of its values.
    """
    saves: list[CapturedSave] = []
    before = _captured.set(saves)
    try:
        yield saves
    finally:
        _captured.reset(before)


class LargeVariables(Protocol):
    """Writes and reads some variables of a checkpoint. `io_device`: see `tf.train.CheckpointOptions`."""

    def to_write(self, variables: Sequence[SavedVariable]) -> Sequence[SavedVariable]:
        """Returns the variables that this object writes."""

    def write(self, variables: Sequence[SavedVariable], prefix: str, io_device: str | None) -> Sequence[str]:
        """Writes files whose names begin with `prefix`; returns the prefixes of the files."""

    def to_read(self, variables: Sequence[SavedVariable], path: str) -> Sequence[SavedVariable]:
        """Returns the variables that this object reads from the checkpoint at `path`."""

    def read(self, variables: Sequence[SavedVariable], path: str, io_device: str | None) -> None:
        """Reads the variables from the checkpoint at `path`."""


@contextlib.contextmanager
def savers_replaced(large: LargeVariables, written: Callable[[str], object] = lambda prefix: None) -> Iterator[None]:
    """A scope in which `large` writes and reads some variables of the checkpoints that are saved and restored eagerly.

    `written` is called with the path of each written checkpoint.
    """
    # Private: checkpoints have no public hook for the writing of values. Their options apply to one call only.
    saver = functional_saver.MultiDeviceSaver
    save, restore = saver.save, saver.restore

    @functools.wraps(save)
    def save_large(self: Any, file_prefix: Any, options: Any = None) -> Any:
        if not tf.executing_eagerly():
            return save(self, file_prefix, options)
        captured = _captured.get()
        if captured is not None and not self._registered_savers:
            captured.append(_capture(self, _text(file_prefix)))
            return None
        result = _save_with(large, self, save, file_prefix, options)
        written(_text(file_prefix))
        return result

    @functools.wraps(restore)
    def restore_large(self: Any, file_prefix: Any, options: Any = None) -> Any:
        if not tf.executing_eagerly():
            return restore(self, file_prefix, options)
        path = _text(file_prefix)
        taken, themselves = _take(self, lambda variables: large.to_read(variables, path)), _self_saving(self)
        for _, name, saved in themselves:
            saved.read_from_checkpoint(name, path)
        large.read([variable for _, variable in taken], path, _io_device(options))
        others = _without(self, [*taken, *themselves])
        return restore(others, file_prefix, options) if _has_content(others) else {}

    with attribute_replaced(saver, "save", save_large), attribute_replaced(saver, "restore", restore_large):
        yield


def _save_with(large: LargeVariables, saver: Any, save: Callable[..., Any], file_prefix: Any, options: Any) -> Any:
    """Saves a saver's values: `large` writes some, `SelfSaving` objects write themselves, `save` writes the rest."""
    taken, themselves = _take(saver, large.to_write), _self_saving(saver)
    if not taken and not themselves:
        return save(saver, file_prefix, options)
    prefix, device = _text(file_prefix), _io_device(options)
    with merged(prefix, device or list(saver._shardable_tensors_by_task)[-1].to_string()) as (temporary, written):
        others = _without(saver, [*taken, *themselves])
        if _has_content(others):
            written.append(f"{temporary}-rest")
            save(others, tf.constant(written[-1]), options)
        saved = []
        for number, (_, name, writer) in enumerate(themselves):
            saved.append(writer.write_to_checkpoint(name, f"{temporary}-{number}"))
            written.extend(saved[-1].prefixes)
        written.extend(large.write([variable for _, variable in taken], temporary, device))
    for parts in saved:
        parts.finish()
    return None


@contextlib.contextmanager
def merged(prefix: str, device: str) -> Iterator[tuple[str, list[str]]]:
    """A scope to write files of a checkpoint. At the end, `device` merges the files into the checkpoint at `prefix`.

    Yields a prefix for the files, and a list to which the caller appends the prefixes of all files.
    """
    temporary = temporary_prefix(prefix)
    tf.io.gfile.makedirs(os.path.dirname(temporary))
    written: list[str] = []
    yield temporary, written
    merge(prefix, device, written)


def temporary_prefix(prefix: str) -> str:
    """Returns TensorFlow's prefix for files that are merged into a checkpoint."""
    return prefix + (".part" if prefix.startswith("s3://") else "_temp/part")


def merge(prefix: str, device: str, written: Sequence[str]) -> None:
    """Merges written files into one checkpoint, and deletes their folder."""
    with tf.device(device):
        tf.raw_ops.MergeV2Checkpoints(checkpoint_prefixes=written, destination_prefix=prefix, delete_old_dirs=True)


def _capture(saver: Any, prefix: str) -> CapturedSave:
    themselves = _self_saving(saver)
    values = []
    for task, tensors in _without(saver, themselves)._shardable_tensors_by_task.items():
        for tensor in tensors:
            saved = _saved_variable(tensor, _variable_of(tensor))
            values.append(SavedValue(task.to_string(), saved, functools.partial(_value_of, tensor)))
    device = list(saver._shardable_tensors_by_task)[-1].to_string()
    return CapturedSave(prefix, values, [(name, writer) for _, name, writer in themselves], device)


def _value_of(tensor: Any) -> Any:
    if tensor.tensor is not None:
        return tensor.tensor
    with tf.device(tensor.device.to_string()):
        return tensor._tensor_save_spec.tensor


def _tensors_of(saver: Any) -> list[Any]:
    # Private: the saver has a list of tensors for each server.
    return [tensor for tensors in saver._shardable_tensors_by_task.values() for tensor in tensors]


def _self_saving(saver: Any) -> list[tuple[Any, str, SelfSaving]]:
    """Returns the entry, the name and the object of each `SelfSaving` object in a saver."""
    return [
        (tensor, tf.compat.as_str(spec.name), getattr(spec, _WRITER))
        for tensor in _tensors_of(saver)
        if hasattr(spec := tensor._tensor_save_spec, _WRITER)
    ]


def _text(file_prefix: Any) -> str:
    return str(tf.compat.as_str(tf.get_static_value(tf.convert_to_tensor(file_prefix))))


def _io_device(options: Any) -> str | None:
    return None if options is None else options.experimental_io_device


def _take(saver: Any, choose: Any) -> list[tuple[Any, SavedVariable]]:
    """Returns the entry and the variable for each variable of the saver that `choose` returns."""
    owned = [(tensor, _variable_of(tensor)) for tensor in _tensors_of(saver)]
    entries = [(tensor, _saved_variable(tensor, variable)) for tensor, variable in owned if variable is not None]
    chosen = {id(saved) for saved in choose([saved for _, saved in entries])}
    # All slices of a variable are restored together.
    keys = {tensor.checkpoint_key for tensor, saved in entries if id(saved) in chosen}
    return [(tensor, saved) for tensor, saved in entries if tensor.checkpoint_key in keys]


def _saved_variable(tensor: Any, variable: Any) -> SavedVariable:
    spec = tensor._tensor_save_spec
    # The specification of a slice has neither a name nor a slice.
    name, slice_spec = spec.name or tensor.checkpoint_key, spec.slice_spec or tensor.slice_spec or ""
    return SavedVariable(variable, tf.compat.as_str(name), tf.compat.as_str(slice_spec))


def _variable_of(tensor: Any) -> tf.Variable | None:
    spec = tensor._tensor_save_spec
    if (variable := getattr(spec, VARIABLE, None)) is not None:
        return variable
    # Each part of a sharded variable is saved by a saveable object that refers to the part.
    for saveable in getattr(tensor.trackable, "saveables", ()):
        if isinstance(saveable, saveable_object_util.ResourceVariableSaveable) and saveable.specs[0] is spec:
            return saveable.op if isinstance(saveable.op, tf.Variable) else None
    return None


def _without(saver: Any, taken: Any) -> Any:
    """Returns a copy of a saver without the entries that are the first items of the tuples in `taken`."""
    left_out = {id(entry[0]) for entry in taken}
    others = copy.copy(saver)
    others._shardable_tensors_by_task = {
        task: kept
        for task, tensors in saver._shardable_tensors_by_task.items()
        if (kept := [tensor for tensor in tensors if id(tensor) not in left_out])
    }
    # If there is more than one task, TensorFlow traces a new function at each save and restore.
    others._num_unique_tasks = len(others._shardable_tensors_by_task)
    return others


def _has_content(saver: Any) -> bool:
    return bool(saver._shardable_tensors_by_task or saver._registered_savers)


class StoredPieces:
    """The form in which a checkpoint stores each tensor: whole, or in pieces.

    `shapes` has the shape of each whole tensor, by name. Raises OpError if the checkpoint at `path` cannot be read.
    """

    def __init__(self, path: str) -> None:
        reader = tf.train.load_checkpoint(path)
        self.shapes: dict[str, list[int]] = reader.get_variable_to_shape_map()
        # Private: the format of the listing. No public call tells how tensors are stored.
        self._listing: bytes = reader.debug_string()

    def largest(self, name: str) -> int | None:
        """Returns the number of elements of the largest piece of a tensor; None if the tensor is stored whole."""
        shapes = re.findall(_PIECE % re.escape(name.encode()), self._listing)
        return max((math.prod(map(int, filter(None, shape.split(b",")))) for shape in shapes), default=None)


def forget_last_saved_step(manager: Any) -> None:
    """Makes a `tf.train.CheckpointManager` with a `checkpoint_interval` save at the next step."""
    # Private: the manager remembers the step of its last attempt to save. A restored checkpoint's step may be smaller.
    manager._last_checkpoint_step = None


def saves_asynchronously(checkpoint: Any) -> bool:
    """Returns True if a `tf.train.Checkpoint` was saved or restored with `enable_async`, which stays on afterwards."""
    # Private: no public attribute tells whether the checkpoint has an asynchronous checkpointer.
    return getattr(checkpoint, _ASYNCHRONOUS, None) is not None


@contextlib.contextmanager
def asynchronous_saves_refused(checkpoint: Any, error: Callable[[], Exception]) -> Iterator[None]:
    """A scope in which a `tf.train.Checkpoint` raises `error()` when it is saved or restored with `enable_async`."""

    def refuse() -> None:
        # TensorFlow has stored the options already. They would make the next restore without options asynchronous.
        checkpoint._checkpoint_options = None
        raise error()

    # Private: all ways to save call this method. `vars` bypasses the checkpoint's tracking of attributes.
    vars(checkpoint)[_MAKES_ASYNCHRONOUS] = refuse
    try:
        yield
    finally:
        vars(checkpoint).pop(_MAKES_ASYNCHRONOUS, None)
