"""Values of a checkpoint, taken at one moment and written later, while training goes on.

    take    in `quiet()`: each server keeps the values of its variables; tables are written
    write   later: each server writes what it keeps, and forgets it; the files become one checkpoint

A server keeps a value by not changing the memory that has it: the next update of the variable copies it first. So
taking a snapshot costs a call to each server, and memory for the variables that are updated before they are written.

Promises: values are of the moment at which the snapshot was taken. They are not sent to the client. What is not written
to its end leaves no file behind, except where files cannot be deleted.

Saves and restores large variables in blocks, on their parameter servers.

    save     for each server at the same time, for one block after the other:
             lock the variable, copy a block of rows, release it; write the block
    restore  likewise: read a block, assign it to its rows

Promises: a server needs at most `memory` bytes more, and an update waits for the copy of a block at most. Values are
not sent to the client. What is written is a checkpoint of TensorFlow, in which the variable is a tensor in pieces: it
is read with blocks of any size, by TensorFlow too, whole or as parts on several servers.

Steps may change the variable between two blocks, so that its rows are of different moments.
"""

import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import math
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from coordinator.ps_strategy.membership.bounded_calls import on_own_thread
from coordinator.ps_strategy.tensorflow_internals.checkpoint_savers import (
    CapturedSave,
    SavedValue,
    SavedVariable,
    StoredPieces,
    merge,
    savers_replaced,
    saves_captured,
    slices_restored,
    temporary_prefix,
)
from coordinator.ps_strategy.tensorflow_internals.handles import is_on_parameter_server

# TensorFlow cannot read pieces of tensors of other types.
DTYPES = frozenset(
    {
        tf.float32,
        tf.float64,
        tf.bfloat16,
        tf.int8,
        tf.int16,
        tf.int32,
        tf.int64,
        tf.uint8,
        tf.bool,
        tf.complex64,
        tf.complex128,
    }
)
# A block is this part of the memory, so that an update waits for a few milliseconds. Some blocks are in one file, since
# TensorFlow opens all files of a tensor at once. The rest is for the buffer with which TensorFlow writes.
_BLOCKS_IN_MEMORY, _BLOCKS_IN_FILE = 8, 3
_INDEX_BYTES = 8


@dataclasses.dataclass(frozen=True)
class Block:
    """A box of a tensor, whose elements lie together.

    Attributes:
      begin: the indices of its first element.
      shape: its size along each axis.
      axes: of this many axes, it has one index of each but the last and some of the last; of the axes after these, all.
    """

    begin: tuple[int, ...]
    shape: tuple[int, ...]
    axes: int


def blocks_of(shape: Sequence[int], element_bytes: int, most_bytes: int) -> Iterator[Block]:
    """Divides a tensor into blocks that have at most `most_bytes`, with the indices that copying them needs.

    Args:
      shape: of the tensor, without zeros.
      element_bytes: the size of an element.
      most_bytes: of a block. A block has one element at least.
    """
    axes, cell = 1, math.prod(shape[1:]) * element_bytes
    while axes < len(shape) and cell + axes * _INDEX_BYTES > most_bytes:
        cell //= shape[axes]
        axes += 1
    length = max(1, most_bytes // (cell + axes * _INDEX_BYTES))
    inner = tuple(shape[axes:])
    for outer in itertools.product(*(range(size) for size in shape[: axes - 1])):
        for start in range(0, shape[axes - 1], length):
            size = min(length, shape[axes - 1] - start)
            yield Block((*outer, start, *[0] * len(inner)), (*[1] * len(outer), size, *inner), axes)


@contextlib.contextmanager
def saved_in_blocks(memory: int, written: Callable[[str], object] = lambda path: None) -> Iterator[None]:
    """A scope in which variables on parameter servers of more than `memory` bytes are saved in blocks.

    Args:
      memory: in bytes.
      written: called with the path of each checkpoint that was written.
    """
    with slices_restored(), savers_replaced(BlockCheckpoints(memory), written):
        yield


class BlockCheckpoints:
    """Implements `LargeVariables` for the variables on the parameter servers.

    Args:
      memory: in bytes. Larger variables are saved in blocks.
    """

    def __init__(self, memory: int) -> None:
        self._memory = memory

    def to_write(self, variables: Sequence[SavedVariable]) -> Sequence[SavedVariable]:
        """Returns the large variables that have a value."""
        return [each for each in variables if self._is_large(each.variable) and each.variable.is_initialized()]

    def to_read(self, variables: Sequence[SavedVariable], path: str) -> Sequence[SavedVariable]:
        """Returns the large variables that the checkpoint has in pieces: of a whole tensor, TensorFlow reads all."""
        large = [each for each in variables if self._is_large(each.variable)]
        if not large:
            return []
        stored = StoredPieces(path)
        taken = []
        for each in large:
            shape, _ = _place(each)
            elements = stored.largest(each.name)
            if elements is not None and stored.shapes.get(each.name) == shape:
                taken += [each] * (elements * each.variable.dtype.size <= self._memory)
        return taken

    def _is_large(self, variable: Any) -> bool:
        size, dtype = variable.shape.num_elements(), variable.dtype
        is_large = dtype in DTYPES and size is not None and size * dtype.size > self._memory
        return is_large and is_on_parameter_server(variable.device)

    def write(self, variables: Sequence[SavedVariable], prefix: str, io_device: str | None) -> Sequence[str]:
        """Writes the values of variables; see `LargeVariables`."""

        def write_on(device: str, task: str, stopped: threading.Event) -> list[str]:
            written: list[str] = []
            for each in variables:
                if each.variable.device == device:
                    write = functools.partial(_write, each, _writer(device, each.variable.dtype, io_device))
                    for blocks in self._files(each.variable):
                        if stopped.is_set():
                            return []
                        written.append(f"{prefix}-{task}-{len(written):05}")
                        write(written[-1], blocks)
            return written

        return on_each_server([each.variable.device for each in variables], "save", write_on)

    def read(self, variables: Sequence[SavedVariable], path: str, io_device: str | None) -> None:
        """Restores the values of variables; see `LargeVariables`."""

        def read_on(device: str, task: str, stopped: threading.Event) -> list[str]:
            for each in variables:
                if each.variable.device == device:
                    _allocate(each.variable)
                    read = functools.partial(_read, each, _reader(device, each.variable.dtype, io_device), path)
                    for blocks in self._files(each.variable):
                        if stopped.is_set():
                            return []
                        read(blocks)
            return []

        on_each_server([each.variable.device for each in variables], "restore", read_on)

    def _files(self, variable: Any) -> Iterator[tuple[Block, ...]]:
        """Returns the blocks of each file of a variable."""
        blocks = blocks_of(variable.shape.as_list(), variable.dtype.size, self._memory // _BLOCKS_IN_MEMORY)
        while file := tuple(itertools.islice(blocks, _BLOCKS_IN_FILE)):
            yield file


def on_each_server(
    devices: Sequence[str], verb: str, call: Callable[[str, str, threading.Event], list[str]]
) -> list[str]:
    """Calls a function for each of some servers at the same time.

    Args:
      devices: of the servers; each may occur several times.
      verb: for the names of the threads.
      call: takes a device, a short name of its server, and an event that tells it to stop.

    Returns:
      All that it returned.

    Raises:
      tf.errors.OpError: a call failed. The others are stopped.
    """
    stopped = threading.Event()
    calls = []
    for device in dict.fromkeys(devices):
        task = f"ps{tf.DeviceSpec.from_string(device).task}"
        calls.append(on_own_thread(f"coordinator-{verb}-{task}", functools.partial(call, device, task, stopped)))
    try:
        concurrent.futures.wait(calls, return_when=concurrent.futures.FIRST_EXCEPTION)
    finally:
        # After Ctrl-C, too. A call that a lost server does not answer fails when the heartbeat has noticed it.
        stopped.set()
        concurrent.futures.wait(calls)
    for failed in calls:
        if failed.exception() is not None:
            failed.result()
    return [each for ended in calls for each in ended.result()]


def _place(saved: SavedVariable) -> tuple[list[int], list[int]]:
    """Returns the shape of the tensor that a variable is a part of, and the indices of its first element there."""
    if not saved.slice_spec:
        return saved.variable.shape.as_list(), [0] * saved.variable.shape.rank
    *shape, parts = saved.slice_spec.split()
    return [*map(int, shape)], [0 if part == "-" else int(part.split(",")[0]) for part in parts.split(":")]


def block_spec(saved: SavedVariable, block: Block) -> str:
    """Returns what `SaveV2` and `RestoreV2` take for a block of a variable."""
    shape, offset = _place(saved)
    parts = (f"{first + begin},{size}" for first, begin, size in zip(offset, block.begin, block.shape, strict=True))
    return f"{' '.join(map(str, shape))} {':'.join(parts)}"


def _int64(numbers: Sequence[Any]) -> tf.Tensor:
    return tf.constant(numbers, tf.int64)


_STRING, _STRINGS = tf.TensorSpec([], tf.string), tf.TensorSpec([None], tf.string)
_RESOURCE, _MATRIX = tf.TensorSpec([], tf.resource), tf.TensorSpec([None, None], tf.int64)


def _write(saved: SavedVariable, writer: Callable[[int], Any], prefix: str, blocks: Sequence[Block]) -> None:
    begin = _int64([block.begin[: block.axes] for block in blocks])
    specs = tf.constant([block_spec(saved, block) for block in blocks])
    shapes = _int64([block.shape for block in blocks])
    name = tf.constant(saved.name)
    writer(len(blocks))(saved.variable.handle, tf.constant(prefix), name, specs, begin, shapes)


def _writer(device: str, dtype: tf.DType, io_device: str | None) -> Callable[[int], Any]:
    """Returns the function that writes a number of blocks to a file."""

    @functools.cache
    def writer(count: int) -> Any:
        @tf.function(autograph=False, input_signature=[_RESOURCE, _STRING, _STRING, _STRINGS, _MATRIX, _MATRIX])
        def write(handle: Any, prefix: Any, name: Any, specs: Any, begin: Any, shapes: Any) -> Any:
            blocks: list[Any] = []
            for number in range(count):
                # One after the other: each holds the variable's lock, and no two are to delay one update.
                with tf.device(device), tf.control_dependencies(blocks[-1:]):
                    blocks.append(_copy(handle, dtype, begin[number], shapes[number]))
            with tf.device(io_device or device):
                names = tf.fill([count], name)
                saved = tf.raw_ops.SaveV2(prefix=prefix, tensor_names=names, shape_and_slices=specs, tensors=blocks)
                # A function does not run operations that write files, unless what it returns depends on them.
                with tf.control_dependencies([saved]):
                    return tf.identity(prefix)

        return write

    return writer


def _copy(handle: Any, dtype: tf.DType, begin: Any, shape: Any) -> Any:
    """Copies a block of a variable, while no update can change it."""
    length = shape[tf.size(begin) - 1]
    along = tf.range(begin[-1], begin[-1] + length)[:, tf.newaxis]
    indices = tf.concat([tf.repeat(begin[tf.newaxis, :-1], length, axis=0), along], axis=1)
    block = tf.raw_ops.ResourceGatherNd(resource=handle, indices=indices, dtype=dtype)
    # A read of single rows makes each later read of the whole variable a copy, and each addition to it, until this.
    with tf.control_dependencies([block]):
        undone = tf.raw_ops.DisableCopyOnRead(resource=handle)
    with tf.control_dependencies([undone]):
        return tf.reshape(block, shape)


def _read(saved: SavedVariable, reader: Any, path: str, blocks: Sequence[Block]) -> None:
    for block in blocks:
        begin, shape = _int64(block.begin), _int64(block.shape)
        spec = tf.constant(block_spec(saved, block))
        reader(saved.variable.handle, tf.constant(path), tf.constant(saved.name), spec, begin, begin + shape)


def _reader(device: str, dtype: tf.DType, io_device: str | None) -> Any:
    """Returns the function that reads a block of a variable from a checkpoint."""
    indices = tf.TensorSpec([None], tf.int64)

    @tf.function(autograph=False, input_signature=[_RESOURCE, _STRING, _STRING, _STRING, indices, indices])
    def read(handle: Any, path: Any, name: Any, spec: Any, begin: Any, end: Any) -> None:
        with tf.device(io_device or device):
            block = tf.raw_ops.RestoreV2(
                prefix=path, tensor_names=name[tf.newaxis], shape_and_slices=spec[tf.newaxis], dtypes=[dtype]
            )[0]
        with tf.device(device):
            assigned = tf.raw_ops.ResourceStridedSliceAssign(
                ref=handle, begin=begin, end=end, strides=tf.ones_like(begin), value=block
            )
            with tf.control_dependencies([assigned]):
                tf.raw_ops.DisableCopyOnRead(resource=handle)

    return read


def _allocate(variable: Any) -> None:
    """Gives a variable without a value one whose memory is not written yet."""
    if variable.is_initialized():
        return
    with tf.device(variable.device):
        empty = tf.raw_ops.Empty(shape=variable.shape.as_list(), dtype=variable.dtype, init=False)
        tf.raw_ops.AssignVariableOp(resource=variable.handle, value=empty)


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
                if is_on_parameter_server(device):
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
        for device in [each for each in values if not is_on_parameter_server(each)]:
            self._kept[device] = [
                _Kept(value.saved, tensor) for value in values[device] if (tensor := value.read()) is not None
            ]

        def read_on(device: str, task: str, stopped: threading.Event) -> list[str]:
            del task, stopped
            self._kept[device] = read(device, values[device])
            return []

        on_each_server([each for each in values if is_on_parameter_server(each)], "copy", read_on)
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
        for number, device in enumerate(each for each in self._kept if not is_on_parameter_server(each)):
            self._written += self._write_on(device, f"{temporary}-client{number}", threading.Event(), hurry)

        def write_on(device: str, task: str, stopped: threading.Event) -> list[str]:
            return self._write_on(device, f"{temporary}-{task}", stopped, hurry)

        self._written += on_each_server([each for each in self._kept if is_on_parameter_server(each)], "save", write_on)
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
