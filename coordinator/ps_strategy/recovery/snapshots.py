"""Checkpoints that parameter servers write and read themselves: snapshots, and large variables in blocks.

    snapshot   take    in `quiet()`: each server keeps the values of its variables; tables are written
               write   later: each server writes and forgets the values; the files become one checkpoint
    blocks     save    each server, block by block: lock the variable, copy a block of rows, release it; write the block
               restore each server, block by block: read the block, assign it to its rows

A server keeps a value by not changing the value's memory; the next update of the variable copies the value first. So a
snapshot costs a call to each server, and memory for the variables that are updated before they are written.

Promises:
- Values are not sent to the client.
- A snapshot has the values that the variables had when it was taken. An unfinished snapshot leaves no file behind,
  unless files cannot be deleted.
- A save or restore in blocks needs at most `memory` additional bytes on a server, and an update waits for the copy of
  at most one block. Steps may change the variable between two blocks, so that its saved rows may be of different times.
- The result is a TensorFlow checkpoint, in which a large variable is a tensor in pieces. The tensor can be read in
  blocks of any size, by TensorFlow too, and as a whole or as parts on several servers.
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
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

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

# TensorFlow can read pieces of a tensor only if the tensor has one of these types.
_NAMES = "float32 float64 bfloat16 int8 int16 int32 int64 uint8 bool complex64 complex128"
_DTYPES = frozenset(map(tf.as_dtype, _NAMES.split()))
# A block is an eighth of the memory, so that an update waits only for milliseconds. A file has three blocks, because
# TensorFlow opens all files of a tensor at the same time. TensorFlow's write buffer takes the rest of the memory.
_BLOCKS_IN_MEMORY, _BLOCKS_IN_FILE = 8, 3
_INDEX_BYTES = 8


@dataclasses.dataclass(frozen=True)
class Block:
    """A box of a tensor in contiguous memory: its first indices, and its size along each axis.

    A block has one index along each of the first `axes - 1` axes, some along the next axis, and all along the others.
    """

    begin: tuple[int, ...]
    shape: tuple[int, ...]
    axes: int


def blocks_of(shape: Sequence[int], element_bytes: int, most_bytes: int) -> Iterator[Block]:
    """Divides a tensor, whose shape has no zeros, into blocks of at least one element.

    A block has at most `most_bytes`, including the indices that copying it needs.
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
    """A scope in which variables of more than `memory` bytes on parameter servers are saved in blocks.

    `written` is called with the path of each written checkpoint.
    """
    with slices_restored(), savers_replaced(BlockCheckpoints(memory), written):
        yield


class BlockCheckpoints:
    """Checkpoints of variables of more than `memory` bytes on parameter servers: implements `LargeVariables`."""

    def __init__(self, memory: int) -> None:
        self._memory = memory

    def to_write(self, variables: Sequence[SavedVariable]) -> Sequence[SavedVariable]:
        """Returns the large variables that have a value."""
        return [saved for saved in variables if self._is_large(saved.variable) and saved.variable.is_initialized()]

    def to_read(self, variables: Sequence[SavedVariable], path: str) -> Sequence[SavedVariable]:
        """Returns the large variables stored in pieces. TensorFlow would read all of any other variable for a block."""
        large = [saved for saved in variables if self._is_large(saved.variable)]
        stored = StoredPieces(path) if large else None
        return [saved for saved in large if stored is not None and self._is_in_blocks(saved, stored)]

    def _is_in_blocks(self, saved: SavedVariable, stored: StoredPieces) -> bool:
        elements, (shape, _) = stored.largest(saved.name), _place(saved)
        is_small = elements is not None and elements * saved.variable.dtype.size <= self._memory
        return is_small and stored.shapes.get(saved.name) == shape

    def _is_large(self, variable: Any) -> bool:
        size, dtype = variable.shape.num_elements(), variable.dtype
        is_large = dtype in _DTYPES and size is not None and size * dtype.size > self._memory
        return is_large and is_on_parameter_server(variable.device)

    def write(self, variables: Sequence[SavedVariable], prefix: str, io_device: str | None) -> Sequence[str]:
        def write_on(device: str, task: str, stopped: threading.Event) -> list[str]:
            writer = functools.cache(functools.partial(_writer, device, io_device))
            files = (
                functools.partial(writer(saved.variable.dtype, len(blocks)), saved, blocks)
                for saved in variables
                if saved.variable.device == device
                for blocks in self._files(saved.variable)
            )
            return _write_files(f"{prefix}-{task}", files, stopped)

        return on_each_server([saved.variable.device for saved in variables], "save", write_on)

    def read(self, variables: Sequence[SavedVariable], path: str, io_device: str | None) -> None:
        def read_on(device: str, task: str, stopped: threading.Event) -> list[str]:
            del task
            reader = functools.cache(functools.partial(_reader, device, io_device))
            for saved in variables:
                if saved.variable.device == device:
                    _allocate(saved.variable)
                    for block in itertools.chain.from_iterable(self._files(saved.variable)):
                        if stopped.is_set():
                            return []
                        reader(saved.variable.dtype)(saved, block, path)
            return []

        on_each_server([saved.variable.device for saved in variables], "restore", read_on)

    def _files(self, variable: Any) -> Iterator[tuple[Block, ...]]:
        blocks = blocks_of(variable.shape.as_list(), variable.dtype.size, self._memory // _BLOCKS_IN_MEMORY)
        while file := tuple(itertools.islice(blocks, _BLOCKS_IN_FILE)):
            yield file


def on_each_server(
    devices: Sequence[str], verb: str, call: Callable[[str, str, threading.Event], list[str]]
) -> list[str]:
    """Calls a function for each of some servers at the same time; joins the returned lists.

    `call` takes a device, a short name of the device's server, and an event that tells the call to stop. If a call
    fails, the other calls are stopped.
    """
    stopped = threading.Event()
    calls = []
    for device in dict.fromkeys(devices):
        task = f"ps{tf.DeviceSpec.from_string(device).task}"
        calls.append(on_own_thread(f"coordinator-{verb}-{task}", functools.partial(call, device, task, stopped)))
    try:
        concurrent.futures.wait(calls, return_when=concurrent.futures.FIRST_EXCEPTION)
    finally:
        # Calls are stopped after Ctrl-C, too. A call to a lost server fails when the heartbeat has noticed the loss.
        stopped.set()
        concurrent.futures.wait(calls)
    return [*itertools.chain.from_iterable(ended.result() for ended in calls)]


def _place(saved: SavedVariable) -> tuple[list[int], list[int]]:
    """Returns the shape of the tensor that a variable is a part of, and the indices of its first element there."""
    if not saved.slice_spec:
        return saved.variable.shape.as_list(), [0] * saved.variable.shape.rank
    *shape, parts = saved.slice_spec.split()
    return [*map(int, shape)], [0 if part == "-" else int(part.split(",")[0]) for part in parts.split(":")]


def block_spec(saved: SavedVariable, block: Block) -> str:
    """Returns the `shape_and_slices` of `SaveV2` and `RestoreV2` for a block of a variable."""
    shape, offset = _place(saved)
    parts = (f"{first + begin},{size}" for first, begin, size in zip(offset, block.begin, block.shape, strict=True))
    return f"{' '.join(map(str, shape))} {':'.join(parts)}"


_RESOURCE, _STRING = tf.TensorSpec([], tf.resource), tf.TensorSpec([], tf.string)
_STRINGS, _INDICES = tf.TensorSpec([None], tf.string), tf.TensorSpec([None], tf.int64)
_MATRIX = tf.TensorSpec([None, None], tf.int64)


def _writer(device: str, io_device: str | None, dtype: tf.DType, count: int) -> Callable[..., None]:
    """Returns a function that copies blocks of a server's variable, and writes them to a file.

    The operations are one call, at whose end the server frees the blocks. Blocks of separate calls would stay longer.
    """

    @tf.function(autograph=False, input_signature=[_RESOURCE, _STRING, _STRING, _STRINGS, _MATRIX, _MATRIX])
    def write(handle: Any, prefix: Any, name: Any, specs: Any, begin: Any, shapes: Any) -> Any:
        blocks: list[Any] = []
        for number in range(count):
            # One copy after another: each copy holds the variable's lock, and only one copy may delay an update.
            with tf.device(device), tf.control_dependencies(blocks[-1:]):
                blocks.append(_copy(handle, dtype, begin[number], shapes[number]))
        with tf.device(io_device or device):
            names = tf.fill([count], name)
            saved = tf.raw_ops.SaveV2(prefix=prefix, tensor_names=names, shape_and_slices=specs, tensors=blocks)
            # Operations that write files run only if the function's result depends on them.
            with tf.control_dependencies([saved]):
                return tf.identity(prefix)

    def write_blocks(saved: SavedVariable, blocks: Sequence[Block], prefix: str) -> None:
        begin = tf.constant([block.begin[: block.axes] for block in blocks], tf.int64)
        shapes = tf.constant([block.shape for block in blocks], tf.int64)
        specs = tf.constant([block_spec(saved, block) for block in blocks])
        write(saved.variable.handle, tf.constant(prefix), tf.constant(saved.name), specs, begin, shapes)

    return write_blocks


def _copy(handle: Any, dtype: tf.DType, begin: Any, shape: Any) -> Any:
    """Copies a block of a variable; no update changes the variable during the copy."""
    length = shape[tf.size(begin) - 1]
    along = tf.range(begin[-1], begin[-1] + length)[:, tf.newaxis]
    indices = tf.concat([tf.repeat(begin[tf.newaxis, :-1], length, axis=0), along], axis=1)
    block = tf.raw_ops.ResourceGatherNd(resource=handle, indices=indices, dtype=dtype)
    # After a read of single rows, reads of the whole variable and additions to it make copies, until this call.
    with tf.control_dependencies([block]):
        undone = tf.raw_ops.DisableCopyOnRead(resource=handle)
    with tf.control_dependencies([undone]):
        return tf.reshape(block, shape)


def _reader(device: str, io_device: str | None, dtype: tf.DType) -> Callable[[SavedVariable, Block, str], None]:
    """Returns a function that reads a block of a server's variable from the checkpoint at a path."""

    @tf.function(autograph=False, input_signature=[_RESOURCE, _STRING, _STRING, _STRING, _INDICES, _INDICES])
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

    def read_block(saved: SavedVariable, block: Block, path: str) -> None:
        begin, shape = tf.constant(block.begin, tf.int64), tf.constant(block.shape, tf.int64)
        text = map(tf.constant, (path, saved.name, block_spec(saved, block)))
        read(saved.variable.handle, *text, begin, begin + shape)

    return read_block


def _allocate(variable: Any) -> None:
    if variable.is_initialized():
        return
    with tf.device(variable.device):
        empty = tf.raw_ops.Empty(shape=variable.shape.as_list(), dtype=variable.dtype, init=False)
        tf.raw_ops.AssignVariableOp(resource=variable.handle, value=empty)


def _write_files(
    prefix: str,
    files: Iterable[Callable[[str], object]],
    stopped: threading.Event,
    hurry: threading.Event | None = None,
) -> list[str]:
    """Calls functions that each write the files of a prefix, until `stopped` is set; returns the prefixes.

    Until `hurry` is set, the function pauses after each file for as long as the file took.
    """
    written: list[str] = []
    for write in files:
        if stopped.is_set():
            break
        began = time.monotonic()
        written.append(f"{prefix}-{len(written):05}")
        write(written[-1])
        if hurry is not None:
            hurry.wait(time.monotonic() - began)
    return written


# The approximate size of the files of a snapshot's values.
_FILE_BYTES = 2**26
_Kept = tuple[SavedVariable, Any]


def _size(tensor: Any) -> int:
    """Returns the bytes of a tensor, without the text of strings."""
    return int(tensor.shape.num_elements() or 0) * tensor.dtype.size


class Snapshots:
    """Takes snapshots of the objects of one checkpoint; keeps the functions that read the variables.

    Variables of more than `memory` bytes are written in pieces, and can be restored in pieces. `check` is called before
    files become a checkpoint, and raises an error if they must not become one.
    """

    def __init__(
        self, checkpoint: tf.train.Checkpoint, memory: int, check: Callable[[], object] = lambda: None
    ) -> None:
        self._checkpoint = checkpoint
        self.memory = memory
        self.check = check
        self._readers: dict[tuple[str, tuple[tf.DType, ...]], Any] = {}

    def prepare(self, prefix: str) -> None:
        """Makes the functions that read the variables, so that the first snapshot does not delay training."""
        if self._readers:
            return
        for save in self._captured(prefix):
            for device, values in _by_device(save.values).items():
                if is_on_parameter_server(device):
                    self.read(device, values)

    def take(self, prefix: str) -> "Snapshot":
        """Takes a snapshot, which becomes a checkpoint at `prefix`; called while no function runs.

        Raises `tf.errors.OpError` if a server does not answer, or a table cannot be written.
        """
        delete_unfinished(prefix)
        saves = self._captured(prefix)
        return Snapshot(saves[0] if saves else None, self)

    def _captured(self, prefix: str) -> list[CapturedSave]:
        with saves_captured() as saves:
            self._checkpoint.write(prefix)
        return saves

    def read(self, device: str, values: Sequence[SavedValue]) -> list[_Kept]:
        """Reads the values of a server; leaves out variables that have no value."""
        variables = [value for value in values if value.saved.variable is not None]
        handles = [value.saved.variable.handle for value in variables]
        dtypes = tuple(value.saved.variable.dtype for value in variables)
        read: dict[int, Any] = {}
        # If a variable has no value yet, this read fails, and all variables are read one by one, as TensorFlow does.
        with contextlib.suppress(tf.errors.FailedPreconditionError), tf.device(device):
            tensors = self._reader(device, dtypes)(handles) if handles else []
            read = {id(value): tensor for value, tensor in zip(variables, tensors, strict=True)}
        kept = [(value.saved, read[id(value)] if id(value) in read else value.read()) for value in values]
        return [(saved, tensor) for saved, tensor in kept if tensor is not None]

    def _reader(self, device: str, dtypes: tuple[tf.DType, ...]) -> Any:
        if (device, dtypes) not in self._readers:

            @tf.function(autograph=False, input_signature=[[_RESOURCE] * len(dtypes)])
            def read(handles: Sequence[Any]) -> Any:
                values = []
                for handle, dtype in zip(handles, dtypes, strict=True):
                    with tf.device(device):
                        # Otherwise a read makes a copy if single rows were looked up before.
                        shared = tf.raw_ops.DisableCopyOnRead(resource=handle)
                        with tf.control_dependencies([shared]):
                            values.append(tf.raw_ops.ReadVariableOp(resource=handle, dtype=dtype))
                return values

            self._readers[device, dtypes] = read.get_concrete_function()
        return self._readers[device, dtypes]


def _by_device(values: Sequence[SavedValue]) -> dict[str, list[SavedValue]]:
    by_device: dict[str, list[SavedValue]] = {}
    for value in values:
        by_device.setdefault(value.device, []).append(value)
    return by_device


class Snapshot:
    """The values of variables at one time. `save` is None if the values are already written."""

    def __init__(self, save: CapturedSave | None, snapshots: Snapshots) -> None:
        self._save = save
        self._snapshots = snapshots
        self._written: list[str] = []
        self._finished: list[Callable[[], None]] = []
        self._kept: dict[str, list[_Kept]] = {}
        if save is None:
            return
        values = _by_device(save.values)
        servers = [*filter(is_on_parameter_server, values)]
        for device in values.keys() - servers:
            kept = [(value.saved, value.read()) for value in values[device]]
            self._kept[device] = [(saved, tensor) for saved, tensor in kept if tensor is not None]

        def read_on(device: str, task: str, stopped: threading.Event) -> list[str]:
            del task, stopped
            self._kept[device] = snapshots.read(device, values[device])
            return []

        on_each_server(servers, "copy", read_on)
        for number, (name, table) in enumerate(save.themselves):
            saved = table.write_to_checkpoint(name, f"{self._temporary(save)}-{number}")
            self._written.extend(saved.prefixes)
            self._finished.append(saved.finish)

    def write(self, hurry: threading.Event) -> None:
        """Writes the checkpoint; called once.

        Until `hurry` is set, a server pauses after each file for as long as the file took, and runs steps in the pause.
        Raises OpError if a server was lost or files cannot be written, CheckpointsTakenOver for a former owner.
        """
        if self._save is None:
            return
        temporary = self._temporary(self._save)

        def write_on(device: str, task: str, stopped: threading.Event) -> list[str]:
            files = (functools.partial(self._write_file, device, group) for group in _grouped(self._kept[device]))
            return _write_files(f"{temporary}-{task}", files, stopped, hurry)

        servers = [*filter(is_on_parameter_server, self._kept)]
        for number, device in enumerate(self._kept.keys() - servers):
            self._written += write_on(device, f"client{number}", threading.Event())
        self._written += on_each_server(servers, "save", write_on)
        self._snapshots.check()
        merge(self._save.prefix, self._save.device, self._written)
        for finish in self._finished:
            finish()

    def forget(self) -> None:
        """Frees the values that the servers keep."""
        self._kept.clear()

    def _temporary(self, save: CapturedSave) -> str:
        temporary = temporary_prefix(save.prefix)
        tf.io.gfile.makedirs(os.path.dirname(temporary))
        return temporary

    def _write_file(self, device: str, group: list[_Kept], prefix: str) -> None:
        with tf.device(device):
            names, specs, tensors = zip(*self._pieces(group), strict=True)
            # No list keeps the values, so that they are freed as soon as they are written.
            group.clear()
            tf.raw_ops.SaveV2(prefix=prefix, tensor_names=names, shape_and_slices=specs, tensors=tensors)

    def _pieces(self, group: list[_Kept]) -> Iterator[tuple[str, str, Any]]:
        """Yields each value or its pieces: the name, the `shape_and_slices` of `SaveV2`, and the tensor."""
        for saved, tensor in group:
            if saved.variable is None or tensor.dtype not in _DTYPES or _size(tensor) <= self._snapshots.memory:
                yield saved.name, saved.slice_spec, tensor
                continue
            most = self._snapshots.memory // _BLOCKS_IN_MEMORY
            for block in blocks_of(tensor.shape.as_list(), tensor.dtype.size, most):
                yield saved.name, block_spec(saved, block), tf.slice(tensor, block.begin, block.shape)


def _grouped(kept: list[_Kept]) -> Iterator[list[_Kept]]:
    """Yields the values of each file, and removes them from the list."""
    while kept:
        group = [kept.pop()]
        while kept and sum(_size(tensor) for _, tensor in (*group, kept[-1])) <= _FILE_BYTES:
            group.append(kept.pop())
        yield group


def delete_unfinished(prefix: str) -> None:
    folder = os.path.dirname(temporary_prefix(prefix))
    with contextlib.suppress(tf.errors.OpError):
        if folder != os.path.dirname(prefix):
            tf.io.gfile.rmtree(folder)
