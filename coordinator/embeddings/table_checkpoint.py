"""Writes the content of a table to a checkpoint and reads it, on any number of parameter servers; and what has changed.

    CONTENT                              what there is, as JSON: written and read by the client
    CONTENT/<server>/rows<slice>/<group>/keys, rows, stamps, slots ...     written by the server, slice after slice
    CONTENT/<server>/waiting<slice>/<group>/keys, times                    keys that wait to be admitted
    CONTENT/<server>/evicted<slice>/<group>/keys                           in a delta: keys evicted since

A slice is some rows of a server, of one moment; a group has the keys of 32 buckets. A server that reads takes the
groups of its buckets, from the servers that had them, and keeps the keys that are its own. So it reads its part alone,
and neither the index nor a number of a row is in the checkpoint.

A delta has the rows with a gradient or a new key since the checkpoint or delta before it, and the keys evicted since.
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

from coordinator.embeddings.shard_storage import (
    ADMITTED,
    CLOCK,
    DROPPED,
    EVICTED,
    NEXT_WAITING,
    REFUSED,
    RESTORED,
    STAMPS,
    USED,
)
from coordinator.embeddings.table_settings import BUCKETS, bucket_of, server_of
from coordinator.embeddings.table_shard import TableShard
from coordinator.ps_strategy.recovery.snapshots import on_each_server
from coordinator.ps_strategy.tensorflow_internals.checkpoint_savers import SelfSaved

KEYS_IN_SLICE = 2**17
_GROUPS = 32
# A server needs a few times as much beside the table, and steps wait while it copies and writes it.
_SLICE_BYTES = 2**20

_NUMBER, _TEXT = tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.string)


class ShardFiles:
    """Writes and reads slices on one server.

    Args:
      shard: on that server.
      number: of the server.
      servers: how many there are.

    Attributes:
      device: of the server.
      columns: the shapes of what is saved of a row, by name.
      rows_in_slice: how many rows are in a slice.
    """

    def __init__(self, shard: TableShard, number: int, servers: int) -> None:
        storage = shard.storage
        self.device = shard.device
        self.columns = {
            "keys": [],
            "rows": [storage.dim],
            **{f"slot {name}": slot.shape.as_list()[1:] for name, slot in storage.slots.items()},
            "stamps": [],
        }
        self.rows_in_slice = max(1, _SLICE_BYTES // sum(4 * math.prod(shape) for shape in self.columns.values()))
        self._shard, self._number, self._servers = shard, number, servers
        buckets = np.arange(BUCKETS)
        self._groups = np.unique(buckets[server_of(buckets, servers) == number] * _GROUPS // BUCKETS)

    def save(self, kind: str, first: int, since: int, path: str, name: str) -> None:
        """Writes a slice to a file."""
        self._save(kind)(*(tf.constant(number, tf.int64) for number in (first, since)), tf.constant(path), name)

    def load(self, kind: str, path: str, name: str, stamps: tf.DType) -> None:
        """Reads this server's part of a slice, in which stamps have the given dtype."""
        self._load(kind, stamps)(tf.constant(path), tf.constant(name))

    def evicted(self) -> int:
        """Returns how many rows the server has evicted."""
        return int(self._shard.storage.read_counts()[EVICTED])

    def settle(self, counts: np.ndarray, evicted_before: int, *, first: bool) -> int:
        """Sets the counts, of which one server has what cannot be divided, after all was read.

        Args:
          counts: those that were saved.
          evicted_before: what `evicted` returned before rows were read.
          first: whether the server has what cannot be divided.

        Returns:
          How many rows were left out because there was no room for them.
        """
        present = self._shard.storage.read_counts().numpy()
        left_out = int(present[EVICTED]) - evicted_before
        evicted = int(counts[:, EVICTED].sum() * first) + left_out
        values = {
            CLOCK: counts[:, CLOCK].max(),
            EVICTED: evicted,
            ADMITTED: present[ADMITTED] - present[EVICTED] + evicted,
            REFUSED: counts[:, REFUSED].sum() * first,
            DROPPED: counts[:, DROPPED].sum() * first,
            RESTORED: 1,
        }
        positions = [[position] for position in values]
        self._shard.storage.counts.scatter_nd_update(positions, np.array([*values.values()], np.int64))
        return left_out

    @functools.cache  # noqa: B019 - as long as the table
    def _save(self, kind: str) -> Any:
        content = self._shard.content

        @tf.function(autograph=False, input_signature=[_NUMBER, _NUMBER, _TEXT, _TEXT])
        def save(first: Any, since: Any, path: Any, name: Any) -> Any:
            with tf.device(self.device):
                if kind == "rows":
                    keys, rows, slots, stamps = content.read_rows(first, self.rows_in_slice, since)
                    columns = dict(zip(self.columns, (keys, rows, *slots, stamps), strict=True))
                elif kind == "waiting":
                    columns = dict(zip(("keys", "times"), content.read_waiting(first, KEYS_IN_SLICE), strict=True))
                else:
                    columns = {"keys": content.read_evicted(first, KEYS_IN_SLICE)}
                groups = bucket_of(columns["keys"]) * _GROUPS // BUCKETS
                parts = [tf.dynamic_partition(column, groups, _GROUPS) for column in columns.values()]
                names = _names(name, range(_GROUPS), columns)
                tensors = [part for each in zip(*parts, strict=True) for part in each]
                specs = [""] * len(tensors)
                saved = tf.raw_ops.SaveV2(prefix=path, tensor_names=names, shape_and_slices=specs, tensors=tensors)
                with tf.control_dependencies([saved]):
                    return tf.identity(path)

        return save

    @functools.cache  # noqa: B019 - as long as the table
    def _load(self, kind: str, stamps: tf.DType) -> Any:
        content = self._shard.content
        columns: dict[str, Sequence[int]] = {"keys": []}
        columns = self.columns if kind == "rows" else {"keys": [], "times": []} if kind == "waiting" else columns
        types = {"keys": tf.int64, "times": tf.int64, "stamps": stamps}

        @tf.function(autograph=False, input_signature=[_TEXT, _TEXT])
        def load(path: Any, name: Any) -> None:
            with tf.device(self.device):
                dtypes = [types.get(column, tf.float32) for column in columns] * len(self._groups)
                tensors = tf.raw_ops.RestoreV2(
                    prefix=path,
                    tensor_names=_names(name, self._groups, columns),
                    shape_and_slices=[""] * len(dtypes),
                    dtypes=dtypes,
                )
                whole = [tf.concat(tensors[place :: len(columns)], 0) for place in range(len(columns))]
                is_mine = server_of(bucket_of(tf.ensure_shape(whole[0], [None])), self._servers) == self._number
                found = [
                    tf.boolean_mask(tf.ensure_shape(column, [None, *shape]), is_mine)
                    for column, shape in zip(whole, columns.values(), strict=True)
                ]
                if kind == "rows":
                    content.write_rows(found[0], found[1], found[2:-1], tf.cast(found[-1], tf.int64))
                elif kind == "waiting":
                    content.write_waiting(*found)
                else:
                    content.remove(found[0])

        return load


def _names(name: Any, groups: Any, columns: Mapping[str, Any]) -> Any:
    # One operation: the first save of a table waits until its function has been sent to the server, and steps with it.
    return tf.strings.join([name, tf.constant([f"/{group}/{column}" for group in groups for column in columns])])


_logger = logging.getLogger("coordinator")

# In the order of reading.
_KINDS = ("evicted", "rows", "waiting")


class _Moment(NamedTuple):
    """When a checkpoint or delta was saved.

    Attributes:
      name: unique.
      counts: of each server, then.
      history: see `TableCheckpoint`.
      is_whole: False if the table was restored, and had no room for some of the rows.
    """

    name: str
    counts: np.ndarray
    history: str
    is_whole: bool = True


class TableCheckpoint:
    """Writes and reads the content of a table; called on the client.

    Args:
      table: its name, for messages.
      shards: of the table, by parameter server.
      discard_accumulated: forgets gradients that wait for an update, when the rows that they belong to are replaced.

    Attributes:
      history: identifies what the content has come from: a new text whenever a restore or a recovery replaces it. What
        was written before is no base of what is written after.
    """

    def __init__(self, table: str, shards: Sequence[TableShard], discard_accumulated: Callable[[], None]) -> None:
        self._table = table
        self._shards = shards
        self._discard_accumulated = discard_accumulated
        self._files = [ShardFiles(shard, number, len(shards)) for number, shard in enumerate(shards)]
        # What is complete: checkpoints and deltas whose files were merged, or that were read to their end.
        self._last: _Moment | None = None
        self.history = uuid.uuid4().hex

    def recover(self) -> None:
        """Forgets gradients, and what was saved unless the recovery has restored the table; see `Recovered`."""
        self._discard_accumulated()
        if not self._counts()[:, RESTORED].all():
            self._replace_history()

    def write(self, name: str, prefix: str, *, delta: bool = False) -> SelfSaved:
        """Writes all, or what has changed since the last checkpoint or delta.

        Args:
          name: of the tensors.
          prefix: of the files.
          delta: whether what has changed is written.

        Raises:
          ValueError: nothing was saved before a delta, or more keys were evicted since than are known.
          tf.errors.OpError: a server does not answer, or the files cannot be written.
        """
        since = self._since() if delta else None
        now = _Moment(uuid.uuid4().hex, self._counts(), self.history)
        slices = self._slices(now.counts, since)
        devices = [files.device for files in self._files]
        clocks = np.zeros(len(self._shards), np.int64) if since is None else since.counts[:, CLOCK]

        def write_on(device: str, task: str, stopped: threading.Event) -> list[str]:
            written: list[str] = []
            number = devices.index(device)
            for kind, starts in slices[number].items():
                for index, first in enumerate(starts):
                    if stopped.is_set():
                        return []
                    written.append(f"{prefix}-{task}-{len(written):05}")
                    self._files[number].save(kind, first, clocks[number], written[-1], f"{name}/{number}/{kind}{index}")
            return written

        written = on_each_server(devices, "save", write_on)
        rate = self._shards[0].rate
        content = {
            "columns": self._files[0].columns,
            "slices": [{kind: len(starts) for kind, starts in each.items()} for each in slices],
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
        """Replaces the content by that of a checkpoint, or changes it by a delta.

        Args:
          name: of the tensors.
          path: of the checkpoint.
          delta: whether it is a delta.

        Raises:
          ValueError: it is of a table with other rows or slots, or not a delta to what was restored before.
          tf.errors.OpError: it cannot be read, or a server does not answer or has no room for its rows, of which none
            may be left out.
        """
        content, last = self._content(name, path), self._valid_last()
        if delta and content["since"] != (last and last.name):
            raise ValueError(
                f"{path} cannot be restored into the table {self._table!r} now: it is not the delta that was saved "
                "next after what was restored or saved last. Restore the checkpoint, then its deltas in their order."
            )
        devices, left_out = [files.device for files in self._files], []

        def read_on(device: str, task: str, stopped: threading.Event) -> list[str]:
            del task
            left_out.append(self._read_shard(devices.index(device), name, path, content, stopped, delta=delta))
            return []

        self._replace_history()
        self._discard_accumulated()
        on_each_server(devices, "restore", read_on)
        # Once more, for what has begun meanwhile.
        self._replace_history()
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
        """Reads the part of one server; returns how many rows were left out because it has no room for them."""
        shard, files, slices = self._shards[number], self._files[number], content["slices"]
        # Checkpoints that do not name the dtype are older than int64 stamps.
        stamps, evicted = tf.as_dtype(content.get("stamps", "int32")), 0
        if not delta:
            shard.storage.reserve()
        for kind in _KINDS:
            if kind == "rows":
                evicted = files.evicted()
            if kind == "waiting" and delta and shard.storage.waiting is not None:
                # All that wait are in the delta.
                shard.storage.rebuild()
            for server in _overlapping(number, len(self._shards), len(slices)):
                for index in range(slices[server].get(kind, 0)):
                    if stopped.is_set():
                        return 0
                    files.load(kind, path, f"{name}/{server}/{kind}{index}", stamps)
        left_out = files.settle(np.array(content["counts"]), evicted, first=number == 0)
        if shard.rate is not None and content["rate"] is not None:
            shard.rate.assign(content["rate"])
        return left_out

    def _replace_history(self) -> None:
        self.history = uuid.uuid4().hex

    def _finish(self, moment: _Moment) -> None:
        if moment.history == self.history:
            self._last = moment

    def _valid_last(self) -> _Moment | None:
        return self._last if self._last is not None and self._last.history == self.history else None

    def _since(self) -> _Moment:
        last = self._valid_last()
        if last is not None and last.is_whole:
            return last
        why = "it had no room for some rows of what was restored last"
        if last is None:
            why = "it was not saved yet, or has been emptied since by a recovery that restored no checkpoint of it"
        raise ValueError(f"The table {self._table!r} has no delta: save it first, in a tf.train.Checkpoint; {why}.")

    def _counts(self) -> np.ndarray:
        return np.stack([shard.storage.read_counts().numpy() for shard in self._shards])

    def _slices(self, counts: np.ndarray, since: _Moment | None) -> list[dict[str, range]]:
        """Returns where the slices of each kind begin, by server."""
        slices = []
        for number, (shard, files) in enumerate(zip(self._shards, self._files, strict=True)):
            capacity, mine = shard.storage.capacity, counts[number]
            waiting = min(mine[NEXT_WAITING], capacity) if shard.storage.waiting is not None else 0
            each = {"rows": range(0, mine[USED], files.rows_in_slice), "waiting": range(0, waiting, KEYS_IN_SLICE)}
            if since is not None:
                before = since.counts[number]
                if mine[EVICTED] - before[EVICTED] > capacity:
                    raise ValueError(
                        f"The table {self._table!r} has no delta: more keys than it has rows were evicted since it was "
                        "saved. Save it in a tf.train.Checkpoint; save deltas more often."
                    )
                each["evicted"] = range(before[EVICTED], mine[EVICTED], KEYS_IN_SLICE)
            slices.append(each)
        return slices

    def _content(self, name: str, path: str) -> dict[str, Any]:
        with tf.device("/device:CPU:0"):
            text = tf.raw_ops.RestoreV2(prefix=path, tensor_names=[name], shape_and_slices=[""], dtypes=[tf.string])[0]
        content: dict[str, Any] = json.loads(text.numpy())
        if content["columns"] != self._files[0].columns:
            raise ValueError(
                f"The checkpoint {path} is of a table with {_shown(content['columns'])}, and {self._table!r} has "
                f"{_shown(self._files[0].columns)}. Create it with the same dim and a similar optimizer."
            )
        return content


def _shown(columns: Mapping[str, Sequence[int]]) -> str:
    return ", ".join(f"{name} {list(shape)}" for name, shape in columns.items() if name not in ("keys", "stamps"))


def _overlapping(server: int, servers: int, former: int) -> list[int]:
    """Returns which of the `former` servers had buckets that this one of `servers` has."""
    buckets = np.arange(BUCKETS)
    mine = buckets[server_of(buckets, servers) == server]
    return [int(each) for each in np.unique(server_of(mine, former))]
