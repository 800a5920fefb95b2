"""Values of a checkpoint, taken at one moment and written later, while training goes on.

    take    in `quiet()`: each server keeps the values of its variables; tables are written
    write   later: each server writes what it keeps, and forgets it; the files become one checkpoint

A server keeps a value by not changing the memory that has it: the next update of the variable copies it first. So
taking a snapshot costs a call to each server, and memory for the variables that are updated before they are written.

Promises: values are of the moment at which the snapshot was taken. They are not sent to the client. What is not written
to its end leaves no file behind, except where files cannot be deleted.
"""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from coordinator.ps_strategy.recovery.block_checkpoints import DTYPES, block_spec, blocks_of, on_each_server
from coordinator.ps_strategy.tensorflow_internals.checkpoint_savers import (
    CapturedSave,
    SavedValue,
    SavedVariable,
    merge,
    saves_captured,
    temporary_prefix,
)

# Values of a server are written in files of about this size, and each file's memory is free when it is written.
_FILE_BYTES = 2**26
_HANDLE = tf.TensorSpec([], tf.resource)


class _Kept(NamedTuple):
    """A value that a server keeps."""

    saved: SavedVariable
    tensor: Any

    @property
    def size(self) -> int:
        """The number of its bytes; of text, of its elements."""
        return int(self.tensor.shape.num_elements() or 0) * self.tensor.dtype.size


class Snapshots:
    """Takes snapshots of the same objects; keeps the functions that read their variables.

    Args:
      checkpoint: a `tf.train.Checkpoint`.
      memory: in bytes. Larger variables are written in pieces, so that they can be restored so.
      check: called before files become a checkpoint; raises an error if they must not.
    """

    def __init__(
        self, checkpoint: tf.train.Checkpoint, memory: int, check: Callable[[], object] = lambda: None
    ) -> None:
        self._checkpoint = checkpoint
        self._memory = memory
        self._check = check
        self._readers: dict[tuple[str, tuple[tf.DType, ...]], Any] = {}

    def prepare(self, prefix: str) -> None:
        """Makes, before the first snapshot, the functions that read the variables, so that training does not wait."""
        if self._readers:
            return
        with saves_captured() as saves:
            self._checkpoint.write(prefix)
        for save in saves:
            for device, values in _by_device(save.values).items():
                if is_on_server(device):
                    self._read(device, values)

    def take(self, prefix: str) -> "Snapshot":
        """Takes a snapshot, which becomes a checkpoint at `prefix`; to be called while nothing runs.

        Raises:
          tf.errors.OpError: a server does not answer, or a table cannot be written.
        """
        delete_unfinished(prefix)
        with saves_captured() as saves:
            self._checkpoint.write(prefix)
        return Snapshot(saves, self._read, self._memory, self._check)

    def _read(self, device: str, values: Sequence[SavedValue]) -> list[_Kept]:
        """Returns the values of a server."""
        variables = _variables(values)
        try:
            handles = [value.saved.variable.handle for value in variables]
            with tf.device(device):
                tensors = self._reader(device, _dtypes(variables))(handles) if handles else []
        except tf.errors.FailedPreconditionError:
            # One has no value yet: they are read one by one, as TensorFlow does.
            variables, tensors = [], []
        read = {id(value): tensor for value, tensor in zip(variables, tensors, strict=True)}
        found = ((value.saved, read[id(value)] if id(value) in read else value.read()) for value in values)
        return [_Kept(saved, tensor) for saved, tensor in found if tensor is not None]

    def _reader(self, device: str, dtypes: tuple[tf.DType, ...]) -> Any:
        reader = self._readers.get((device, dtypes))
        if reader is None:
            reader = self._readers[device, dtypes] = _new_reader(device, dtypes)
        return reader


def _new_reader(device: str, dtypes: Sequence[tf.DType]) -> Any:
    @tf.function(autograph=False, input_signature=[[_HANDLE] * len(dtypes)])
    def read(handles: Sequence[Any]) -> Any:
        values = []
        for handle, dtype in zip(handles, dtypes, strict=True):
            with tf.device(device):
                # Otherwise, after lookups of single rows, a read is a copy.
                shared = tf.raw_ops.DisableCopyOnRead(resource=handle)
                with tf.control_dependencies([shared]):
                    values.append(tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype))
        return values

    return read.get_concrete_function()


def _dtypes(values: Sequence[SavedValue]) -> tuple[tf.DType, ...]:
    return tuple(value.saved.variable.dtype for value in values)


def _variables(values: Sequence[SavedValue]) -> list[SavedValue]:
    return [value for value in values if value.saved.variable is not None]


def _by_device(values: Sequence[SavedValue]) -> dict[str, list[SavedValue]]:
    found: dict[str, list[SavedValue]] = {}
    for value in values:
        found.setdefault(value.device, []).append(value)
    return found


def is_on_server(device: str) -> bool:
    """Returns whether a device is of a parameter server."""
    return tf.DeviceSpec.from_string(device).job == "ps"


class Snapshot:
    """Values of one moment.

    Args:
      saves: what is to be written: of one checkpoint, or nothing if it was written already.
      read: reads values of a server.
      memory: see `Snapshots`.
      check: see `Snapshots`.
    """

    def __init__(
        self,
        saves: Sequence[CapturedSave],
        read: Callable[[str, Sequence[SavedValue]], list[_Kept]],
        memory: int,
        check: Callable[[], object],
    ) -> None:
        self._save = saves[0] if saves else None
        self._check = check
        self._memory = memory
        self._written: list[str] = []
        self._finished: list[Callable[[], None]] = []
        self._kept: dict[str, list[_Kept]] = {}
        if self._save is None:
            return
        values = _by_device(self._save.values)
        for device in [each for each in values if not is_on_server(each)]:
            self._kept[device] = [
                _Kept(value.saved, tensor) for value in values[device] if (tensor := value.read()) is not None
            ]

        def read_on(device: str, task: str, stopped: threading.Event) -> list[str]:
            del task, stopped
            self._kept[device] = read(device, values[device])
            return []

        on_each_server([each for each in values if is_on_server(each)], "copy", read_on)
        for number, (name, each) in enumerate(self._save.themselves):
            saved = each.write_to_checkpoint(name, f"{self._temporary()}-{number}")
            self._written.extend(saved.prefixes)
            self._finished.append(saved.finish)

    def write(self, hurry: threading.Event) -> None:
        """Writes the checkpoint; to be called once.

        Args:
          hurry: until it is set, a server pauses after each file for as long as that took, and runs steps meanwhile.

        Raises:
          tf.errors.OpError: a server was lost, or files cannot be written.
          CheckpointsTakenOver: another client uses the directory.
        """
        if self._save is None:
            return
        temporary = self._temporary()
        for number, device in enumerate(each for each in self._kept if not is_on_server(each)):
            self._written += self._write_on(device, f"{temporary}-client{number}", threading.Event(), hurry)

        def write_on(device: str, task: str, stopped: threading.Event) -> list[str]:
            return self._write_on(device, f"{temporary}-{task}", stopped, hurry)

        self._written += on_each_server([each for each in self._kept if is_on_server(each)], "save", write_on)
        self._check()
        merge(self._save.prefix, self._save.device, self._written)
        for finish in self._finished:
            finish()

    def forget(self) -> None:
        """Frees what the servers keep."""
        self._kept.clear()

    def _temporary(self) -> str:
        assert self._save is not None
        temporary = temporary_prefix(self._save.prefix)
        tf.io.gfile.makedirs(os.path.dirname(temporary))
        return temporary

    def _write_on(self, device: str, prefix: str, stopped: threading.Event, hurry: threading.Event) -> list[str]:
        written: list[str] = []
        left = self._kept[device]
        while left and not stopped.is_set():
            group = [left.pop()]
            while left and sum(each.size for each in (*group, left[-1])) <= _FILE_BYTES:
                group.append(left.pop())
            written.append(f"{prefix}-{len(written):05}")
            began = time.monotonic()
            with tf.device(device):
                self._write_file(written[-1], group)
            hurry.wait(time.monotonic() - began)
        return written

    def _write_file(self, prefix: str, group: list[_Kept]) -> None:
        names, specs, tensors = [], [], []
        for kept in group:
            for spec, tensor in self._pieces(kept):
                names.append(kept.saved.name)
                specs.append(spec)
                tensors.append(tensor)
        # Freed as soon as they are written.
        group.clear()
        tf.raw_ops.SaveV2(prefix=prefix, tensor_names=names, shape_and_slices=specs, tensors=tensors)

    def _pieces(self, kept: _Kept) -> Iterator[tuple[str, Any]]:
        """Returns slices of a value, with what `SaveV2` takes for each."""
        saved, tensor = kept
        if saved.variable is None or tensor.dtype not in DTYPES or kept.size <= self._memory:
            yield saved.slice_spec, tensor
            return
        for block in blocks_of(tensor.shape.as_list(), tensor.dtype.size, self._memory // 8):
            yield block_spec(saved, block), tf.slice(tensor, block.begin, block.shape)


def delete_unfinished(prefix: str) -> None:
    """Deletes what was written of a checkpoint that was not finished."""
    folder = os.path.dirname(temporary_prefix(prefix))
    with contextlib.suppress(tf.errors.OpError):
        if folder != os.path.dirname(prefix):
            tf.io.gfile.rmtree(folder)
