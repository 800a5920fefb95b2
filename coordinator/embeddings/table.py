"""A growing table, sharded over the parameter servers: `table_shard.py` has the rows, one for each key trained on.

worker                                   each parameter server
table.lookup(keys)     -->  its keys     finds their rows, and creates rows for new keys     TableShard
                       <--  rows
table.apply_gradients  -->  its keys     updates the rows that these keys have now
                            and rows
"""

import collections
import contextlib
import dataclasses
import functools
import itertools
import types
import uuid
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator.addresses import checkpoint_path
from coordinator.embeddings.table_checkpoint import TableCheckpoint
from coordinator.embeddings.table_settings import (
    Admission,
    Eviction,
    MinCount,
    OlderThan,
    SmallerThan,
    TableSettings,
    Uniform,
    as_integers,
    bucket_of,
    capacities,
    server_of,
)
from coordinator.embeddings.table_shard import Count, TableShard, full_size
from coordinator.ps_strategy.keras.internals.optimizers import without_repeats
from coordinator.ps_strategy.keras.internals.row_updates import table_updates
from coordinator.ps_strategy.parameter_server_strategy import ParameterServerStrategy
from coordinator.ps_strategy.tensorflow_internals.checkpoint_savers import (
    SelfSaved,
    SelfSaving,
    merged,
    savers_replaced,
)
from coordinator.ps_strategy.tensorflow_internals.handles import is_on_parameter_server
from coordinator.ps_strategy.tensorflow_internals.process import current_server_def
from coordinator.ps_strategy.tensorflow_internals.replicas import alone
from coordinator.ps_strategy.tensorflow_internals.unstored_variable import TableVariable

_NUMBERS = itertools.count()
# The replacements that a strategy makes while it is open. Tables without a strategy keep them until the process ends.
_REPLACED = contextlib.ExitStack()
# The name of a delta's tensors.
_DELTA = "delta"
_GIGABYTE = 1e9
# The counters whose sums over all servers are in `TableStatistics`.
_SUMMED = ("waiting", "admitted", "evicted", "refused", "dropped")


@dataclasses.dataclass(frozen=True)
class TableStatistics:
    """Counters of a table since it was created.

    Attributes:
      capacity: the maximum number of rows.
      size: the number of keys that have a row: `admitted - evicted`.
      waiting: the number of keys that wait to be admitted.
      admitted: how many rows were given to keys; a key that returns after its eviction counts again.
      evicted: how many rows were removed, or left out of a restored checkpoint because there was no room.
      refused: how many keys got no row because the table was full; a key counts at each look-up.
      dropped: how many rows of gradients were dropped because their key had no row.
      steps: the number of calls of `apply_gradients`.
      bytes: the memory of the rows in use on the servers, with keys and slots, without the index.
    """

    capacity: int
    size: int
    waiting: int
    admitted: int
    evicted: int
    refused: int
    dropped: int
    steps: int
    bytes: int


class Table(SelfSaving):
    """An embedding table with a row for each key that was trained on.

    A table that is created in `strategy.scope()` is on the parameter servers. In a process without a strategy, a table
    is local, for prediction, sidecar evaluation, notebooks and tests. All tables read and write the same checkpoints.

    Args:
      name: the name of the table in messages, and of its variables.
      dim: the length of a row.
      capacity: the maximum number of rows. Each parameter server has an equal share of the hash values of keys, and of
        the rows. A row takes memory when it is first used. The index takes memory from the beginning, about 42 bytes
        for each row of the capacity (twice as much with `MinCount(2)` or more).
      optimizer: an elementwise optimizer of Keras 3, `RowwiseAdagrad`, or a function `(rows, gradient)` that changes
        the rows in a gradient by `rows.assign_sub`, `assign_add` or `assign`, such as
        `lambda rows, gradient: rows.assign_sub(0.1 * gradient)`. An optimizer is copied.
      initializer: a function `(keys, dim)` that returns the first rows of keys, float32 [n, dim], as `Uniform`,
        `Normal` and `Constant` do.
      admission: `MinCount` or `Probability`; None gives a row to each key when it is first looked up in training.
      eviction: `OlderThan` or `SmallerThan`, or several of them, which select the rows that `evict()` removes.
      when_full: what happens if there is no room for a new key. "error" raises `tf.errors.InvalidArgumentError` in the
        step. "default_row" gives the key the default, and no row. "evict_oldest" searches the next 2,000 rows or more,
        not all rows, and removes the rows that have had no gradient for longest. If a restored checkpoint has too many
        rows, "error" raises. Otherwise, the rows with the oldest gradients are left out, with a warning.
      default: the value of each number in the row that a key without a row gets.

    Raises:
      RuntimeError: a strategy is open, and the table is not created in the strategy's scope.
      TypeError, ValueError: an argument is wrong, or the table does not fit the memory of a server.

    Attributes:
      name, dim, capacity, default: the arguments of these names.
      variable: a `tf.Variable` of shape [capacity, dim] without a value, which represents all rows in `tape.gradient`.
        The gradients of the variable are `tf.IndexedSlices` with keys as indices.
      shards: the shards of the table, one for each parameter server.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - each argument is one decision of the user
        self,
        name: str,
        dim: int,
        capacity: int,
        optimizer: Any,
        initializer: Callable[[Any, int], Any] | None = None,
        admission: Admission | None = None,
        eviction: Eviction | Sequence[Eviction] = (),
        when_full: str = "error",
        default: float = 0.0,
    ) -> None:
        devices, number, self._services = _place_of_scope()
        self._settings = TableSettings(
            name=name,
            dim=dim,
            capacity=capacity,
            optimizer=optimizer,
            initializer=initializer or Uniform(),
            admission=admission or MinCount(1),
            eviction=(eviction,) if isinstance(eviction, OlderThan | SmallerThan) else tuple(eviction or ()),
            when_full=when_full,
            default=default,
        )
        self.name, self.dim, self.capacity, self.default = name, dim, capacity, default
        parts = capacities(capacity, len(devices))
        check_fits(name, [full_size(self._settings, part) for part in parts], devices)
        if max(parts) > tf.int32.max:
            raise ValueError(
                f"The table {name!r} would have {max(parts):,} rows on one parameter server, and TensorFlow numbers at "
                f"most {tf.int32.max:,} there. Use more parameter servers, or a smaller capacity."
            )
        self.shards = tuple(
            TableShard(self._settings, device, part, number) for device, part in zip(devices, parts, strict=True)
        )
        # The optimizers that use accumulated gradients keep them alive.
        self._accumulating: weakref.WeakSet[AccumulatedGradient] = weakref.WeakSet()
        self._checkpoint = TableCheckpoint(name, self.shards, self._discard_accumulated)
        if self._services is not None:
            self._services.variables.add_recovered(self._checkpoint)
        self.variable = TableVariable(name, [capacity, dim], tf.float32, self.apply_gradients, self._accumulated)

    @property
    def history(self) -> str:
        """A text that identifies the origin of the content, and changes with each restore and recovery."""
        return self._checkpoint.history

    @property
    def learning_rate(self) -> float | None:
        """The optimizer's learning rate, which can be set, or None if a schedule or function gives the rate."""
        rate = self.shards[0].rate
        return None if rate is None else float(rate.numpy())

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        for shard in self.shards:
            if shard.rate is None:
                raise ValueError("The learning rate of this table is not a number, and cannot be set.")
            shard.rate.assign(rate)

    @tf.autograph.experimental.do_not_convert
    def lookup(self, keys: Any, training: bool = False) -> Any:
        """Returns the rows of keys, and records the look-up on gradient tapes.

        Args:
          keys: integers or strings of any shape.
          training: if True, new keys get rows or are counted, as `admission` says. If False, the table does not change,
            and keys without a row get the default.

        Returns:
          A float32 tensor of the shape of `keys` and one more dimension.

        Raises:
          TypeError: the keys are neither integers nor strings.
        """
        keys = as_integers(keys)
        flat = tf.reshape(keys, [-1])
        unique, positions = tf.unique(flat)
        parts, places = divided = self._divided(unique)
        # `apply_gradients` reads this attribute, because the keys of the gradient are the tensor `unique`.
        unique.divided = divided
        with alone():
            of_parts = [shard.lookup(part, training=training) for shard, part in zip(self.shards, parts, strict=True)]
        rows = tf.gather(tf.ensure_shape(tf.dynamic_stitch(places, of_parts), [None, self.dim]), positions)
        rows = tf.reshape(rows, tf.concat([tf.shape(keys), [self.dim]], 0))

        def gradient(output: Any) -> tf.IndexedSlices:
            values = tf.math.unsorted_segment_sum(tf.reshape(output, [-1, self.dim]), positions, tf.size(unique))
            return tf.IndexedSlices(values, unique, tf.constant([self.capacity, self.dim], tf.int64))

        return self.variable.recorded(tf.ensure_shape(rows, [*keys.shape, self.dim]), gradient)

    @tf.autograph.experimental.do_not_convert
    def apply_gradients(self, gradient: tf.IndexedSlices) -> None:
        """Updates the rows in a gradient on their servers, with the table's optimizer.

        Gradient rows of the same key are summed first. Gradients of keys without a row are dropped. Additions of
        concurrent steps are not lost, because a server completes each update of its rows before the next update.

        Args:
          gradient: the `tf.IndexedSlices` that `tape.gradient` returns for `variable`, with keys as indices.

        Raises:
          TypeError: `gradient` is something else.
        """
        if not isinstance(gradient, tf.IndexedSlices):
            raise TypeError(
                f"The gradient of the table {self.name!r} must be the tf.IndexedSlices that tape.gradient returns for "
                f"table.variable, got {gradient!r}. It is None if the loss does not depend on a look-up of the table "
                "that the tape has seen: call table.lookup in the function that has the tape, and not in a branch or "
                "loop of which the tape is outside."
            )
        gradient = without_repeats(gradient)
        values = self._settings.update.clipped(tf.cast(gradient.values, tf.float32))
        keys = tf.cast(gradient.indices, tf.int64)
        parts, places = getattr(gradient.indices, "divided", None) or self._divided(keys)
        for shard, part, place in zip(self.shards, parts, places, strict=True):
            shard.push(part, tf.gather(values, place))

    def _accumulated(self) -> "AccumulatedGradient":
        accumulated = AccumulatedGradient(self.shards, self._divided, [self.capacity, self.dim])
        self._accumulating.add(accumulated)
        return accumulated

    def _discard_accumulated(self) -> None:
        for accumulated in list(self._accumulating):
            accumulated.discard()

    def size(self) -> int:
        """Returns the number of keys that have a row."""
        return self.statistics().size

    def evict(self) -> int:
        """Removes the rows that `eviction` selects, and returns their number. Must be called on the client.

        Rows are removed in small portions, so that training goes on. When a removed key is admitted again, the key gets
        its initial row.

        Raises:
          ValueError: the table was created without `eviction`.
          StrategyClosedError: the strategy is closed.
          tf.errors.OpError: a server does not answer.
        """
        self._refuse_closed("evict")
        if not self._settings.eviction:
            raise ValueError(f"The table {self.name!r} was created without eviction=, so evict() has nothing to do.")
        removed = 0
        for shard in self.shards:
            first = 0
            while first >= 0:
                number, following = shard.evict(tf.constant(first, tf.int64))
                removed, first = removed + int(number), int(following)
        return removed

    def statistics(self) -> TableStatistics:
        """Returns the table's counters, read from the servers.

        Raises:
          StrategyClosedError: the strategy is closed.
          tf.errors.OpError: a server does not answer.
        """
        self._refuse_closed("statistics")
        counts = np.stack([shard.read_counts().numpy() for shard in self.shards])
        total = counts.sum(axis=0)
        sizes = counts[:, Count.ADMITTED] - counts[:, Count.EVICTED]
        memory = sum(int(size) * shard.bytes_per_row() for size, shard in zip(sizes, self.shards, strict=True))
        return TableStatistics(
            capacity=self.capacity,
            size=int(sizes.sum()),
            steps=int(counts[:, Count.CLOCK].max()),
            bytes=memory,
            **{name: int(total[Count[name.upper()]]) for name in _SUMMED},
        )

    def save_delta(self, path: str) -> None:
        """Writes the changes since the table's last save, restore or delta. Must be called on the client.

        A delta has the rows that have had a gradient or were given to a key since then, and the keys that were evicted
        since then. A `tf.train.Checkpoint` saves the whole table.

        Args:
          path: the prefix of the files, as in `tf.train.Checkpoint.write`.

        Raises:
          ValueError: the table was not saved or restored before, or not since a recovery has emptied it; the table had
            no room for some restored rows; or more keys were evicted since then than the table has rows.
          StrategyClosedError: the strategy is closed.
          tf.errors.OpError: a server does not answer, or the files cannot be written.
        """
        self._refuse_closed("save_delta")
        with merged(checkpoint_path(path), self.shards[0].device) as (temporary, written):
            saved = self._checkpoint.write(_DELTA, temporary, delta=True)
            written.extend(saved.prefixes)
        saved.finish()

    def restore_delta(self, path: str) -> None:
        """Applies a delta, which must be the next delta after the checkpoint or delta that was restored last.

        Restore the checkpoint first, then its deltas in order. The table then has its state at the last delta.

        Args:
          path: the path that `save_delta` was given.

        Raises:
          ValueError: the delta is not the next one, or is of a table with other rows or slots.
          StrategyClosedError: the strategy is closed.
          tf.errors.OpError: the delta cannot be read, or a server does not answer.
        """
        self._refuse_closed("restore_delta")
        self._checkpoint.read(_DELTA, checkpoint_path(path), delta=True)

    def write_to_checkpoint(self, name: str, prefix: str) -> SelfSaved:
        """Writes the table to a checkpoint; see `SelfSaving`."""
        return self._checkpoint.write(name, prefix)

    def read_from_checkpoint(self, name: str, path: str) -> None:
        """Restores the table from a checkpoint of any number of servers; see `SelfSaving`."""
        self._checkpoint.read(name, path)

    def _divided(self, keys: Any) -> tuple[Sequence[Any], Sequence[Any]]:
        """Returns the keys of each server, and the places of these keys in `keys`."""
        servers = len(self.shards)
        if servers == 1:
            return [keys], [tf.range(tf.size(keys))]
        owner = server_of(bucket_of(keys), servers)
        places = tf.dynamic_partition(tf.range(tf.size(keys)), owner, servers)
        return [tf.gather(keys, place) for place in places], places

    def _refuse_closed(self, called: str) -> None:
        if self._services is not None:
            self._services.refuse_closed(
                f"table.{called}() asks the parameter servers and cannot be called any more; call it before "
                "strategy.close()"
            )

    def __repr__(self) -> str:
        return f"<Table {self.name!r}: {self.capacity} x {self.dim} on {len(self.shards)} servers>"


class AccumulatedGradient:
    """Gradients of a table that an optimizer accumulates over steps. Checkpoints do not contain them.

    Each server appends the keys and rows of gradients under the mutex of its shard. Like the mutex, the resources are
    looked up by name at each use, so that a restarted server has empty resources. A `tf.Variable` is not used, because
    its shape must be known: a worker that gets a handle of a variable of unknown shape dies (`Check failed` in
    `RemoteMgr::DeserializeRemoteTensorHandle`, TensorFlow 2.21).
    """

    def __init__(self, shards: Sequence[TableShard], divided: Callable[[Any], Any], shape: Sequence[int]) -> None:
        self._divided = divided
        self._shape = list(shape)
        # The name is unique among all clients of the servers.
        self._name = f"coordinator/embeddings/{uuid.uuid4().hex}"
        self._specs = {"keys": tf.TensorSpec([None], tf.int64), "rows": tf.TensorSpec([None, shape[1]], tf.float32)}
        added = [*self._specs.values()]
        # For each server: the device, a function that adds keys and rows, and a function that takes all of them.
        self._parts = [
            (
                shard.device,
                tf.function(functools.partial(self._append, shard), input_signature=added, autograph=False),
                tf.function(functools.partial(self._take, shard), input_signature=[], autograph=False),
            )
            for shard in shards
        ]

    def add(self, gradient: tf.IndexedSlices) -> None:
        """Adds a gradient whose indices are keys."""
        keys, places = self._divided(gradient.indices)
        for (device, append, _), mine, place in zip(self._parts, keys, places, strict=True):
            rows = tf.gather(gradient.values, place)
            with tf.device(device):
                append(mine, rows)

    def take(self) -> tf.IndexedSlices:
        """Returns the sum of all gradients since the last call. Keys may occur several times."""
        keys, rows = zip(*self._take_all(), strict=True)
        return tf.IndexedSlices(tf.concat(rows, 0), tf.concat(keys, 0), tf.constant(self._shape, tf.int64))

    def discard(self) -> None:
        """Drops all gradients since the last `take`. Called on the client."""
        self._take_all()

    def _take_all(self) -> list[tuple[Any, Any]]:
        taken = []
        for device, _, take in self._parts:
            with tf.device(device):
                taken.append(take())
        return taken

    def _append(self, shard: TableShard, keys: Any, rows: Any) -> Any:
        with shard.mutex.hold([keys, rows]):
            for handle, kept, added in zip(*self._read(), (keys, rows), strict=True):
                tf.raw_ops.AssignVariableOp(resource=handle, value=tf.concat([kept, added], 0))
        return tf.constant(0)

    def _take(self, shard: TableShard) -> tuple[Any, Any]:
        with shard.mutex.hold():
            handles, (keys, rows) = self._read()
            with tf.control_dependencies([keys, rows]):
                for handle, kept in zip(handles, (keys, rows), strict=True):
                    tf.raw_ops.AssignVariableOp(resource=handle, value=kept[:0])
        return keys, rows

    def _read(self) -> tuple[list[Any], list[Any]]:
        handles, values = [], []
        for name, spec in self._specs.items():
            unknown = tf.TensorShape(None)
            handle = tf.raw_ops.VarHandleOp(dtype=spec.dtype, shape=unknown, shared_name=f"{self._name}/{name}")
            value = tf.cond(
                tf.raw_ops.VarIsInitializedOp(resource=handle),
                functools.partial(tf.raw_ops.ReadVariableOp, resource=handle, dtype=spec.dtype),
                functools.partial(tf.zeros, [0, *spec.shape[1:]], spec.dtype),
            )
            handles.append(handle)
            values.append(tf.ensure_shape(value, spec.shape))
        return handles, values


def _place_of_scope() -> tuple[Sequence[str], int, Any]:
    """Returns the CPU devices for the shards of a new table, a unique table number, and the strategy's services.

    The services are None in a process without a strategy. Raises RuntimeError in the scope of another strategy, or
    outside of the scope of an open strategy.
    """
    strategy: Any = tf.distribute.get_strategy()
    if isinstance(strategy, ParameterServerStrategy):
        services = strategy.extended.services
        return strategy.extended.parameter_devices, next(services.unique_numbers), services
    definition = current_server_def()
    if tf.distribute.has_strategy() or (definition is not None and len(definition.cluster.job) > 1):
        raise RuntimeError(
            "A table is created inside strategy.scope() of a coordinator.ParameterServerStrategy, or in a process "
            "that has no strategy."
        )
    number = next(_NUMBERS)
    if number == 0:
        # This saver leaves all variables to TensorFlow.
        none: Any = types.SimpleNamespace(
            to_write=lambda *_: (), to_read=lambda *_: (), write=lambda *_: (), read=lambda *_: None
        )
        _REPLACED.enter_context(savers_replaced(none))
        _REPLACED.enter_context(table_updates())
    with tf.init_scope(), tf.device("/device:CPU:0"):
        return (tf.zeros([]).device,), number, None


def check_fits(table: str, needed: Sequence[int], devices: Sequence[str]) -> None:
    """Raises ValueError if a table that needs this many bytes on each server does not fit the servers' memory.

    Without this check, Linux would let a server allocate more memory than there is, and later kill the server.
    """
    # Several servers may share the memory of one machine.
    machines: collections.Counter[bytes] = collections.Counter()
    for size, device in zip(needed, devices, strict=True):
        machine = _first_line(device, "/proc/sys/kernel/random/boot_id") or device.encode()
        machines[machine] += size
        for taken, place, memory in (
            (size, device, _number(_first_line(device, "/sys/fs/cgroup/memory.max"))),
            (machines[machine], f"the machine of {device}", _number(_first_line(device, "/proc/meminfo"), factor=1024)),
        ):
            if memory is not None and taken > memory:
                raise ValueError(
                    f"The table {table!r} does not fit: when it is full, it takes {taken / _GIGABYTE:.1f} GB on "
                    f"{place}, which has {memory / _GIGABYTE:.1f} GB. Use a smaller capacity or dim, an optimizer with "
                    "less state, or more parameter servers."
                )


def _number(line: bytes | None, factor: int = 1) -> int | None:
    """Returns the first number in a line, such as 24 in "MemTotal: 24 kB", or None without a number, as in "max"."""
    numbers = [word for word in (line or b"").split() if word.isdigit()]
    return int(numbers[0]) * factor if numbers else None


def _first_line(device: str, path: str) -> bytes | None:
    """Returns the first line of a file on a server's machine or on this machine, or None if there is no such file."""
    try:
        if not is_on_parameter_server(device):
            with open(path, "rb") as file:
                return file.readline()
        with tf.device(device):
            # For a missing file, TensorFlow would log an error that looks like an error of the training.
            if not tf.io.matching_files(path).shape[0]:
                return None
            line: bytes = _read(tf.constant(path)).numpy()
    except (OSError, tf.errors.NotFoundError, tf.errors.PermissionDeniedError):
        return None
    return line


@tf.function(autograph=False, input_signature=[tf.TensorSpec([], tf.string)])
def _read(path: Any) -> Any:
    # `tf.io.read_file` would return nothing, because files of the kernel have the size 0.
    types = {"output_types": [tf.string], "output_shapes": [[]]}
    none, one = tf.constant(""), tf.constant(1, tf.int64)
    lines = tf.raw_ops.TextLineDataset(filenames=path, compression_type=none, buffer_size=tf.constant(4096, tf.int64))
    first = tf.raw_ops.TakeDataset(input_dataset=lines, count=one, **types)
    return tf.raw_ops.DatasetToSingleElement(dataset=first, **types)[0]
