"""The content of a table in checkpoints and deltas, for any number of parameter servers.

    CONTENT                              a list of the content, as JSON: written and read by the client
    CONTENT/<server>/rows<slice>/<group>/keys, rows, stamps, slots ...     written by the server, slice after slice
    CONTENT/<server>/waiting<slice>/<group>/keys, times                    keys that wait to be admitted
    CONTENT/<server>/evicted<slice>/<group>/keys                           in a delta: keys that were evicted

A slice has rows of one server, which are read at the same time. A group has the keys of 32 buckets. To restore its
keys, a server reads only the groups of its buckets, from the slices of the servers that had these buckets. Neither the
index nor row numbers are in the checkpoint. A delta has the rows that got a gradient or a new key since the previous
checkpoint or delta, and the keys that were evicted since then.
"""

import functools
import json
import logging
import math
import threading
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from coordinator.embeddings.table_settings import BUCKETS, bucket_of, server_of
from coordinator.embeddings.table_shard import STAMPS, Count, TableShard
from coordinator.ps_strategy.recovery.snapshots import on_each_server
from coordinator.ps_strategy.tensorflow_internals.checkpoint_savers import SelfSaved

_logger = logging.getLogger("coordinator")

_KEYS_IN_SLICE = 2**17
_GROUPS = 32
# A server needs a few times this memory for a slice. Steps wait while the server copies and writes the slice.
_SLICE_BYTES = 2**20

# The kinds of slices, in the order of reading.
_KINDS = ("evicted", "rows", "waiting")

_NUMBER, _TEXT = tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.string)


class _Moment(NamedTuple):
    """The state of a table at a checkpoint or delta, with the counts of each server; see `TableCheckpoint.history`.

    `is_whole` is False if the table had no room for some of the restored rows.
    """

    name: str
    counts: np.ndarray
    history: str
    is_whole: bool = True


class TableCheckpoint:
    """Writes and reads the content of a table. Called on the client.

    `discard_accumulated` drops gradients that wait for an update, and is called when the rows are replaced. `history`
    is a text that identifies the origin of the content, and changes whenever a restore or a recovery replaces the
    content. Files with another history are not a base for a delta.
    """

    def __init__(self, table: str, shards: Sequence[TableShard], discard_accumulated: Callable[[], None]) -> None:
        self._table = table
        self._shards = shards
        self._devices = [shard.device for shard in shards]
        self._discard_accumulated = discard_accumulated
        slots = {f"slot {name}": slot.shape.as_list()[1:] for name, slot in shards[0].slots.items()}
        # For each kind of slice, maps the names of its columns to the shape of a row's or key's value.
        self._columns: dict[str, dict[str, list[int]]] = {
            "rows": {"keys": [], "rows": [shards[0].dim], **slots, "stamps": []},
            "waiting": {"keys": [], "times": []},
            "evicted": {"keys": []},
        }
        numbers_in_row = sum(math.prod(shape) for shape in self._columns["rows"].values())
        self._rows_in_slice = max(1, _SLICE_BYTES // (4 * numbers_in_row))
        # Each function is traced once.
        self._save = functools.cache(self._new_save)
        self._load = functools.cache(self._new_load)
        # The last complete checkpoint or delta, whose files were merged, or which was read to the end.
        self._last: _Moment | None = None
        self.history = uuid.uuid4().hex

    def recover(self) -> None:
        """Drops accumulated gradients, and changes `history` if the recovery restored nothing; see `Recovered`."""
        self._discard_accumulated()
        if not self._counts()[:, Count.RESTORED].all():
            self.history = uuid.uuid4().hex

    def write(self, name: str, prefix: str, *, delta: bool = False) -> SelfSaved:
        """Writes the content, or with `delta` the changes since the last checkpoint or delta.

        The names of tensors begin with `name`, the names of files with `prefix`. Raises ValueError if a delta has no
        base, or if more keys were evicted since the base than are known. Raises tf.errors.OpError if a server does not
        answer, or the files cannot be written.
        """
        since = self._valid_last() if delta else None
        if delta and (since is None or not since.is_whole):
            why = "it had no room for some rows of what was restored last"
            if since is None:
                why = "it was not saved yet, or has been emptied since by a recovery that restored no checkpoint of it"
            raise ValueError(f"The table {self._table!r} has no delta: save it first, in a tf.train.Checkpoint; {why}.")
        now = _Moment(uuid.uuid4().hex, self._counts(), self.history)
        slices = self._slices(now.counts, since)
        clocks = np.zeros(len(self._shards), np.int64) if since is None else since.counts[:, Count.CLOCK]

        def write_on(device: str, task: str, stopped: threading.Event) -> list[str]:
            written: list[str] = []
            number = self._devices.index(device)
            for kind, starts in slices[number].items():
                for index, first in enumerate(starts):
                    if stopped.is_set():
                        return []
                    written.append(f"{prefix}-{task}-{len(written):05}")
                    names = f"{name}/{number}/{kind}{index}"
                    self._save(number, kind)(first, clocks[number], written[-1], names)
            return written

        written = on_each_server(self._devices, "save", write_on)
        rate = self._shards[0].rate
        content = {
            "columns": self._columns["rows"],
            "slices": [{kind: len(starts) for kind, starts in of_server.items()} for of_server in slices],
            "counts": now.counts.tolist(),
            "rate": None if rate is None else float(rate.numpy()),
            "stamps": STAMPS.name,
            "name": now.name,
            "since": None if since is None else since.name,
        }
        with tf.device("/device:CPU:0"):
            text = tf.constant(json.dumps(content))
            tf.raw_ops.SaveV2(prefix=f"{prefix}-content", tensor_names=[name], shape_and_slices=[""], tensors=[text])
        return SelfSaved([*written, f"{prefix}-content"], functools.partial(self._finish, now))

    def read(self, name: str, path: str, *, delta: bool = False) -> None:
        """Replaces the content by the tensors in a checkpoint whose names begin with `name`, or applies a delta.

        Raises ValueError if the file is of a table with other rows or slots, or is not the next delta. Raises
        tf.errors.OpError if the file cannot be read, or a server does not answer or has no room for rows it must keep.
        """
        content, last = self._content(name, path), self._valid_last()
        if delta and content["since"] != (last and last.name):
            raise ValueError(
                f"{path} cannot be restored into the table {self._table!r} now: it is not the delta that was saved "
                "next after what was restored or saved last. Restore the checkpoint, then its deltas in their order."
            )
        left_out = []

        def read_on(device: str, task: str, stopped: threading.Event) -> list[str]:
            del task
            left_out.append(self._read_shard(self._devices.index(device), name, path, content, stopped, delta=delta))
            return []

        self.history = uuid.uuid4().hex
        self._discard_accumulated()
        on_each_server(self._devices, "restore", read_on)
        # The history changes once more, so that files whose write began in between are not a base for a delta.
        self.history = uuid.uuid4().hex
        missing = sum(left_out)
        is_whole = not missing and (not delta or last is None or last.is_whole)
        self._finish(_Moment(content["name"], self._counts(), self.history, is_whole))
        if missing:
            text = (
                "The table %r has no room for %d rows of %s: those without a gradient for longest are left out. Give "
                "the table a larger capacity to have all of them."
            )
            _logger.warning(text, self._table, missing, path)

    def _read_shard(
        self, number: int, name: str, path: str, content: Mapping[str, Any], stopped: threading.Event, *, delta: bool
    ) -> int:
        """Reads the content of one server. Returns how many rows were left out for lack of room."""
        shard, slices = self._shards[number], content["slices"]
        # Checkpoints that do not name the dtype of stamps are older than int64 stamps.
        stamps, evicted = tf.as_dtype(content.get("stamps", "int32")), 0
        buckets = np.arange(BUCKETS)
        # The servers that had this server's buckets when the checkpoint was written.
        former = np.unique(server_of(buckets[server_of(buckets, len(self._shards)) == number], len(slices))).tolist()
        if not delta:
            shard.reserve()
        for kind in _KINDS:
            if kind == "rows":
                evicted = int(shard.read_counts()[Count.EVICTED])
            if kind == "waiting" and delta and shard.waiting is not None:
                # A delta has all waiting keys, so the present waiting keys are forgotten.
                shard.rebuild()
            for server in former:
                for index in range(slices[server].get(kind, 0)):
                    if stopped.is_set():
                        return 0
                    self._load(number, kind, stamps)(path, f"{name}/{server}/{kind}{index}")
        saved, present, is_first = np.array(content["counts"]), shard.read_counts().numpy(), number == 0
        left_out = int(present[Count.EVICTED]) - evicted
        # The first server gets the sums of counts that cannot be divided among the servers.
        evicted = int(saved[:, Count.EVICTED].sum() * is_first) + left_out
        values = {
            Count.CLOCK: saved[:, Count.CLOCK].max(),
            Count.EVICTED: evicted,
            Count.ADMITTED: present[Count.ADMITTED] - present[Count.EVICTED] + evicted,
            Count.REFUSED: saved[:, Count.REFUSED].sum() * is_first,
            Count.DROPPED: saved[:, Count.DROPPED].sum() * is_first,
            Count.RESTORED: 1,
        }
        shard.counts.scatter_nd_update([[position] for position in values], np.array([*values.values()], np.int64))
        if shard.rate is not None and content["rate"] is not None:
            shard.rate.assign(content["rate"])
        return left_out

    def _new_save(self, number: int, kind: str) -> Any:
        """Returns a function that writes a slice with the rows that have changed since a value of `CLOCK`."""
        shard = self._shards[number]

        @tf.function(autograph=False, input_signature=[_NUMBER, _NUMBER, _TEXT, _TEXT])
        def save(first: Any, since: Any, path: Any, name: Any) -> Any:
            with tf.device(shard.device):
                if kind == "rows":
                    keys, rows, slots, stamps = shard.read_rows(first, self._rows_in_slice, since)
                    columns = (keys, rows, *slots, stamps)
                elif kind == "waiting":
                    columns = shard.read_waiting(first, _KEYS_IN_SLICE)
                else:
                    columns = (shard.read_evicted(first, _KEYS_IN_SLICE),)
                groups = bucket_of(columns[0]) * _GROUPS // BUCKETS
                parts = [tf.dynamic_partition(column, groups, _GROUPS) for column in columns]
                names = _names(name, range(_GROUPS), self._columns[kind])
                tensors = [part for group in zip(*parts, strict=True) for part in group]
                specs = [""] * len(tensors)
                saved = tf.raw_ops.SaveV2(prefix=path, tensor_names=names, shape_and_slices=specs, tensors=tensors)
                with tf.control_dependencies([saved]):
                    return tf.identity(path)

        return save

    def _new_load(self, number: int, kind: str, stamps: tf.DType) -> Any:
        """Returns a function that reads a server's part of a slice with stamps of the given dtype."""
        shard, columns, servers = self._shards[number], self._columns[kind], len(self._shards)
        types = {"keys": tf.int64, "times": tf.int64, "stamps": stamps}
        buckets = np.arange(BUCKETS)
        groups = np.unique(buckets[server_of(buckets, servers) == number] * _GROUPS // BUCKETS)

        @tf.function(autograph=False, input_signature=[_TEXT, _TEXT])
        def load(path: Any, name: Any) -> None:
            with tf.device(shard.device):
                dtypes = [types.get(column, tf.float32) for column in columns] * len(groups)
                tensors = tf.raw_ops.RestoreV2(
                    prefix=path,
                    tensor_names=_names(name, groups, columns),
                    shape_and_slices=[""] * len(dtypes),
                    dtypes=dtypes,
                )
                whole = [tf.concat(tensors[place :: len(columns)], 0) for place in range(len(columns))]
                is_mine = server_of(bucket_of(tf.ensure_shape(whole[0], [None])), servers) == number
                mine = [
                    tf.boolean_mask(tf.ensure_shape(column, [None, *shape]), is_mine)
                    for column, shape in zip(whole, columns.values(), strict=True)
                ]
                if kind == "rows":
                    shard.write_rows(mine[0], mine[1], mine[2:-1], tf.cast(mine[-1], tf.int64))
                elif kind == "waiting":
                    shard.write_waiting(*mine)
                else:
                    shard.remove(mine[0])

        return load

    def _finish(self, moment: _Moment) -> None:
        if moment.history == self.history:
            self._last = moment

    def _valid_last(self) -> _Moment | None:
        return self._last if self._last is not None and self._last.history == self.history else None

    def _counts(self) -> np.ndarray:
        return np.stack([shard.read_counts().numpy() for shard in self._shards])

    def _slices(self, counts: np.ndarray, since: _Moment | None) -> list[dict[str, range]]:
        """Returns the starts of the slices of each kind, by server."""
        slices = []
        for number, shard in enumerate(self._shards):
            capacity, mine = shard.capacity, counts[number]
            waiting = min(mine[Count.NEXT_WAITING], capacity) if shard.waiting is not None else 0
            used = mine[Count.USED]
            starts = {"rows": range(0, used, self._rows_in_slice), "waiting": range(0, waiting, _KEYS_IN_SLICE)}
            if since is not None:
                before = since.counts[number]
                if mine[Count.EVICTED] - before[Count.EVICTED] > capacity:
                    raise ValueError(
                        f"The table {self._table!r} has no delta: more keys than it has rows were evicted since it was "
                        "saved. Save it in a tf.train.Checkpoint; save deltas more often."
                    )
                starts["evicted"] = range(before[Count.EVICTED], mine[Count.EVICTED], _KEYS_IN_SLICE)
            slices.append(starts)
        return slices

    def _content(self, name: str, path: str) -> dict[str, Any]:
        with tf.device("/device:CPU:0"):
            text = tf.raw_ops.RestoreV2(prefix=path, tensor_names=[name], shape_and_slices=[""], dtypes=[tf.string])[0]
        content: dict[str, Any] = json.loads(text.numpy())
        if content["columns"] != self._columns["rows"]:
            raise ValueError(
                f"The checkpoint {path} is of a table with {_shown(content['columns'])}, and {self._table!r} has "
                f"{_shown(self._columns['rows'])}. Create it with the same dim and a similar optimizer."
            )
        return content


def _names(name: Any, groups: Any, columns: Mapping[str, Any]) -> Any:
    # One operation makes all names: a small function is sent sooner, and the first save and running steps wait for it.
    return tf.strings.join([name, tf.constant([f"/{group}/{column}" for group in groups for column in columns])])


def _shown(columns: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in columns.items() if name not in ("keys", "stamps"))
