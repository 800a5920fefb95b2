"""The shard of a table on one parameter server: rows, their keys and slots, and the index that finds the row of a key.

    index     key -> number of the row, or -1 - times while the key waits to be admitted; -1 for any other key
    rows      [capacity, dim]      slots  [capacity, ...], one for each of the optimizer's
    key_of    [capacity]           stamp  [capacity], the step of the last gradient; -1 if the row is free
    free      [capacity], the numbers of free rows below `used`, as a stack
    waiting   [capacity], keys that wait to be admitted, as a ring
    evicted   [capacity], the keys that were evicted last, as a ring

The variables are created for the full capacity. Memory is used as rows are written, and rows beyond `used` are never
read. The index is created with all of its buckets, because adding buckets later would stop all look-ups for seconds.

    look-up     find all keys in the index, gather their rows                       no mutex
                  if some keys are new, or rows have changed: look up again         under the mutex
                  count the waiting keys, give rows to the admitted keys
    gradients   find, read and compute, write these rows and slots, stamp them      under the mutex
    eviction    look for rows in a slice                                            no mutex
                  look again at some of them, remove them from the index, free them under the mutex

Row numbers never leave the server. If a row is evicted or given to another key after a worker has looked up the first
key, the gradient goes to the present row of the first key. If this key has no row, the gradient is dropped.

A look-up without the mutex returns complete rows of the right keys. Rows are written, or freed for other keys, only
while the counter `CHANGES` is odd. A look-up that finds an odd or increased counter is repeated under the mutex. The
counter is odd only while rows are written, which is a small part of an update.

Checkpoints and deltas read and write slices of the content under the mutex, so that the keys, rows, slots and stamps of
a slice are consistent. If training goes on, slices are read at different times. No slice passes through the client,
which reads only the counts and the learning rate. The index, the free rows and the counts of waiting keys are not
variables of a checkpoint. `rebuild` derives the index and the free rows from `key_of` and `stamp`.
"""

import enum
import functools
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator.embeddings.table_settings import OlderThan, TableSettings
from coordinator.ps_strategy.keras.internals.optimizers import UnsharedRows
from coordinator.ps_strategy.tensorflow_internals.handles import create_mutable_table
from coordinator.ps_strategy.tensorflow_internals.shared_variable import ServerMutex, client_may_call, operations_added

# The positions of the counters in `counts`. Rows below `USED` are in use or free. `CLOCK` counts pushes. `CHANGES` is
# incremented before and after rows of the index are changed or freed. `NEXT_WAITING` counts keys that have ever waited.
# The search for the oldest rows continues at `HAND`. `RESTORED` is 1 after a checkpoint was restored.
Count = enum.IntEnum(
    "Count",
    "USED FREE CLOCK ADMITTED EVICTED REFUSED DROPPED WAITING CHANGES NEXT_WAITING HAND RESTORED",
    start=0,
)

FREE_STAMP = -1
# Stamps have the dtype of `counts`, because a stamp is compared with `CLOCK`, which grows with each push.
STAMPS = tf.int64
# The measured size of an index entry with its share of the buckets, in bytes.
_INDEX_BYTES = 42
# The index's value for unknown keys.
UNKNOWN = -1
# The number of rows or keys that a loop over all of them handles per step. Other calls wait a few milliseconds at most.
SLICE = 2**16
# The number of rows that a search for the oldest rows reads per step. A row's stamp and number take 16 bytes.
_STAMPS_AT_ONCE = 2**20
# A call of `_evict` searches `_SEARCHED_AT_ONCE` rows, and evicts at most `_EVICTED_AT_ONCE` of them under the mutex.
_EVICTED_AT_ONCE, _SEARCHED_AT_ONCE = 1000, 2**14
# A full table searches `_CANDIDATES` rows per needed row, but at least `_LEAST_CANDIDATES`, and evicts the oldest.
_CANDIDATES, _LEAST_CANDIDATES = 4, 2000

# The server prepares a function with this attribute once for all steps of a call, and in a branch only if the branch is
# taken. Otherwise, the worker would prepare the function for each step, which is most of the time to build a long call.
_NOT_INLINED = {"_noinline": True}

_KEYS = tf.TensorSpec([None], tf.int64)
_NUMBER = tf.TensorSpec([], tf.int64)


class Index(tf.lookup.experimental.MutableHashTable):
    """A mutable hash table on the server of the rows. The strategy's scope does not place the hash table."""


class TableShard:
    """The shard of a table on one parameter server, or in this process. Created in the strategy's scope.

    Public methods acquire `mutex` for their changes. Private methods that change the shard must run under `mutex`,
    except `_create`, `_push` and `_evict`, which acquire `mutex`. `capacity` is the maximum number of rows in the
    shard. `number` is unique among the tables of the strategy. `rate` is a variable with the learning rate, or None if
    the optimizer computes the rate. The module's docstring describes the other attributes.
    """

    def __init__(self, settings: TableSettings, device: str, capacity: int, number: int) -> None:
        name = self.name = settings.name
        self.device, self.capacity, self.dim = device, capacity, settings.dim
        self._settings = settings
        self.mutex = ServerMutex(f"coordinator/embeddings/{number}", device)
        here = types.SimpleNamespace(device=device)

        def create(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
            return next_creator(**{**kwargs, "colocate_with": here})

        with tf.variable_creator_scope(create), tf.device(device):
            self.counts = tf.Variable(lambda: tf.zeros([len(Count)], tf.int64), trainable=False, name=f"{name}/counts")
            self.rows = self._reserved("rows", [self.dim], tf.float32)
            self.slots = {
                slot: self._reserved(slot.strip("_"), list(value.shape), tf.float32)
                for slot, value in settings.update.slots.items()
            }
            self.key_of = self._reserved("key_of", [], tf.int64)
            self.stamp = self._reserved("stamp", [], STAMPS)
            self.free = self._reserved("free", [], tf.int64)
            self.evicted = self._reserved("evicted", [], tf.int64)
            self.waiting = self._reserved("waiting", [], tf.int64) if settings.admission.counts else None
            rate = settings.update.learning_rate
            self.rate = None
            if rate is not None:
                self.rate = tf.Variable(lambda: tf.constant(rate, tf.float32), trainable=False, name=f"{name}/rate")
        arguments = (tf.int64, tf.int64, UNKNOWN)
        self.index, resource = create_mutable_table(Index, device, arguments, {"name": f"{name}/index"})
        services = getattr(tf.distribute.get_strategy().extended, "services", None)
        if services is not None:
            services.variables.add_table(self.index, resource, recovered_by=self)
        self.reserve()
        # Each function is traced once, for all functions that call it.
        new_function = functools.partial(tf.function, autograph=False, experimental_attributes=_NOT_INLINED)
        self._functions = {
            # Without `partial`, TensorFlow would count the tracings of all tables together, and warn.
            method: new_function(functools.partial(method), input_signature=signature)
            for method, signature in (
                (self._lookup, [_KEYS]),
                (self._lookup_or_create, [_KEYS]),
                (self._gather_under_mutex, [_KEYS]),
                (self._create, [_KEYS]),
                (self._push, [_KEYS, tf.TensorSpec([None, settings.dim], tf.float32)]),
                (self._evict, [_NUMBER]),
            )
        }

    def _reserved(self, name: str, row: list[int], dtype: tf.DType) -> tf.Variable:
        shape = [self.capacity, *row]
        empty = functools.partial(tf.raw_ops.Empty, shape=shape, dtype=dtype, init=False)
        return tf.Variable(empty, shape=shape, dtype=dtype, trainable=False, name=f"{self.name}/{name}")

    @property
    def _large(self) -> list[tf.Variable]:
        waiting = [] if self.waiting is None else [self.waiting]
        return [self.rows, *self.slots.values(), self.key_of, self.stamp, self.free, self.evicted, *waiting]

    def bytes_per_row(self) -> int:
        """Returns the bytes of a row in the server's memory, without the index and the list of evicted keys."""
        large = [variable for variable in self._large if variable is not self.evicted]
        return sum(int(np.prod(variable.shape[1:])) * variable.dtype.size for variable in large)

    @client_may_call()
    def reserve(self) -> None:
        """Empties the shard, and allocates its variables and the buckets of its index again.

        The values are assigned in a function. If the client assigned a value and still had a reference to it, the first
        change of a row would copy the value, which would take the memory of all rows again.
        """
        with self.mutex.hold():
            for variable in self._large:
                empty = tf.raw_ops.Empty(shape=variable.shape, dtype=variable.dtype, init=False)
                tf.raw_ops.AssignVariableOp(resource=variable.handle, value=empty)
            self.counts.assign(tf.zeros([len(Count)], tf.int64), read_value=False)
            self._create_buckets()

    def _create_buckets(self) -> None:
        """Fills the index and then empties it. The empty index keeps the buckets for all rows."""
        entries = tf.constant(self.capacity * (1 if self.waiting is None else 2), tf.int64)

        def fill(first: Any) -> Any:
            keys = tf.range(first, tf.minimum(first + SLICE, entries))
            with tf.control_dependencies([self.index.insert(keys, keys)]):
                return first + SLICE

        filled = tf.while_loop(lambda first: first < entries, fill, [tf.constant(0, tf.int64)], parallel_iterations=1)
        nothing = tf.zeros([0], tf.int64)
        with tf.control_dependencies(tf.nest.flatten(filled)):
            tf.raw_ops.LookupTableImportV2(table_handle=self.index.resource_handle, keys=nothing, values=nothing)

    # Rows by their keys, on the server.

    def find(self, keys: Any) -> Any:
        """Returns the index's values for keys, int64 [n]."""
        found = self.index.lookup(keys)
        # TensorFlow does not know the shape, because the index is on another server.
        found.set_shape(keys.shape)
        return found

    def _room(self) -> Any:
        counts = self.counts.read_value()
        return self.capacity - counts[Count.USED] + counts[Count.FREE]

    def _allocate(self, keys: Any, steps: Any) -> Any:
        """Gives rows, stamped with `steps`, to keys (int64 [n]) without rows. There must be room for all keys.

        Returns the numbers of the rows, int64 [n], which are not in the index yet.
        """
        counts = self.counts.read_value()
        number = tf.size(keys, tf.int64)
        recycled = tf.minimum(number, counts[Count.FREE])
        again = self.free.sparse_read(counts[Count.FREE] - 1 - tf.range(recycled))
        numbers = tf.concat([again, counts[Count.USED] + tf.range(number - recycled)], 0)
        write(self.key_of, numbers, keys)
        write(self.stamp, numbers, tf.broadcast_to(tf.cast(steps, STAMPS), tf.shape(numbers)))
        self._add_counts({Count.USED: number - recycled, Count.FREE: -recycled, Count.ADMITTED: number})
        return numbers

    def _release(self, numbers: Any) -> None:
        keys = self.key_of.sparse_read(numbers)
        first, before = self.counts.sparse_read(Count.FREE), self.counts.sparse_read(Count.EVICTED)
        number = tf.size(numbers, tf.int64)

        def free() -> None:
            write(self.stamp, numbers, tf.fill(tf.shape(numbers), tf.constant(FREE_STAMP, STAMPS)))
            write(self.free, first + tf.range(number), numbers)
            write(self.evicted, (before + tf.range(number)) % self.capacity, keys)
            self._add_counts({Count.FREE: number, Count.EVICTED: number})

        self._change_rows([keys, first, before], lambda: self.index.remove(keys), free)

    def _change_rows(self, after: Sequence[Any], *actions: Callable[[], object]) -> None:
        """Runs actions, in order, that change or free rows of the index.

        `CHANGES` tells a look-up without the mutex that rows have been changed since the look-up began.
        """
        changes = self.counts.sparse_read([Count.CHANGES])
        # `CHANGES` is odd already if a call was cancelled halfway.
        odd = changes + 1 + changes % 2
        in_order(
            [*after, odd],
            lambda: write(self.counts, [Count.CHANGES], odd),
            *actions,
            lambda: write(self.counts, [Count.CHANGES], odd + 1),
        )

    def _add_counts(self, added: Mapping[int, Any]) -> None:
        amounts = tf.stack([tf.cast(amount, tf.int64) for amount in added.values()])
        self.counts.scatter_nd_add([[position] for position in added], amounts)

    def _wait(self, keys: Any, times: Any, is_new: Any) -> None:
        """Records how often keys without rows were seen, and which are new. Forgets the oldest keys of a full ring."""
        assert self.waiting is not None
        # More than `capacity` keys would not fit the ring. Each place of the ring is written at most once here.
        keys, times, is_new = (each[: self.capacity] for each in (keys, times, is_new))
        first = self.counts.sparse_read(Count.NEXT_WAITING)
        new = tf.boolean_mask(keys, is_new)
        number = tf.size(new, tf.int64)
        places = tf.range(first, first + number)
        # The places that have been used before. Other places have no value yet.
        again = tf.boolean_mask(places, places >= self.capacity) % self.capacity
        oldest = self.waiting.sparse_read(again)
        forgotten = tf.unique(tf.boolean_mask(oldest, self.find(oldest) < UNKNOWN))[0]
        waiting, added = self.waiting, number - tf.size(forgotten, tf.int64)
        in_order(
            [forgotten],
            lambda: self.index.insert(keys, -1 - times),
            # The forgotten keys may be among `keys`.
            lambda: self.index.remove(forgotten),
            lambda: write(waiting, places % self.capacity, new),
            lambda: self._add_counts({Count.NEXT_WAITING: number, Count.WAITING: added}),
        )

    # Methods that workers call.

    def lookup(self, keys: Any, *, training: bool) -> Any:
        """Returns the rows of unique keys, int64 [n], or the default for other keys, as float32 [n, dim] on the server.

        With `training`, keys without a row are counted and admitted first.
        """
        return self._call(self._lookup_or_create if training else self._lookup, keys)

    def push(self, keys: Any, gradient: Any) -> None:
        """Updates the rows of unique keys, int64 [n], by a gradient, float32 [n, dim]. Ignores keys without a row."""
        self._call(self._push, keys, gradient)

    def evict(self, first: Any) -> Any:
        """Evicts some of the rows that the policies select, from number `first`, an int64 scalar.

        Returns the number of evicted rows, and the number of the row to continue with, or -1 after the last row.
        """
        return self._call(self._evict, first)

    def _call(self, method: Any, *arguments: Any) -> Any:
        with tf.device(self.device):
            return self._functions[method](*arguments)

    def _lookup(self, keys: Any) -> Any:
        return self._rows_of(keys)[0]

    def _lookup_or_create(self, keys: Any) -> Any:
        with tf.device(self.device):
            rows, found = self._rows_of(keys)
            return tf.cond(tf.reduce_all(found >= 0), lambda: rows, lambda: self._call(self._create, keys))

    def _rows_of(self, keys: Any) -> tuple[Any, Any]:
        """Returns the rows of keys, and the index's values for the keys: row numbers, or negative numbers."""
        counts = self.counts
        with tf.device(self.device):
            before = counts.sparse_read(Count.CHANGES)
            with tf.control_dependencies([before]):
                found = self.find(keys)
            rows = self._gather(found)
            with tf.control_dependencies([rows]):
                after = counts.sparse_read(Count.CHANGES)
            is_same = tf.logical_and(before == after, before % 2 == 0)
            return tf.cond(is_same, lambda: (rows, found), lambda: self._call(self._gather_under_mutex, keys))

    def _gather_under_mutex(self, keys: Any) -> tuple[Any, Any]:
        with self.mutex.hold([keys]):
            found = self.find(keys)
            return self._gather(found), found

    def _gather(self, found: Any) -> Any:
        is_there = found >= 0

        def with_default() -> Any:
            there = tf.where(is_there)[:, 0]
            rows = self.rows.sparse_read(tf.gather(found, there))
            default = tf.fill([tf.size(found), self._settings.dim], self._settings.default)
            return tf.tensor_scatter_nd_update(default, there[:, tf.newaxis], rows)

        return tf.cond(tf.reduce_all(is_there), lambda: self.rows.sparse_read(found), with_default)

    def _create(self, keys: Any) -> Any:
        """Counts and admits keys. Returns the rows of the keys."""
        settings = self._settings
        with self.mutex.hold([keys]):
            found = self.find(keys)
            unknown_at = tf.where(found < 0)[:, 0]
            unknown, entries = tf.gather(keys, unknown_at), tf.gather(found, unknown_at)
            times = UNKNOWN - entries
            is_admitted = settings.admission.admits(times)
            with operations_added() as admitted:
                self._admit(tf.boolean_mask(unknown, is_admitted), tf.boolean_mask(entries, is_admitted), found)
            if settings.admission.counts:
                is_waiting = tf.logical_not(is_admitted)
                waiting, before = tf.boolean_mask(unknown, is_waiting), tf.boolean_mask(times, is_waiting)
                with tf.control_dependencies(admitted), operations_added() as counted:
                    self._wait(waiting, before + 1, before == 0)
                admitted += counted
            with tf.control_dependencies(admitted):
                # The keys are looked up again, because some of them may have got rows.
                return self._gather(self.find(keys))

    def _admit(self, keys: Any, entries: Any, found: Any) -> None:
        """Gives rows to keys that have no rows, while there is room.

        The index has the values `entries` for `keys`, and `found` for all keys of this look-up, whose rows are kept.
        """
        wanted = tf.size(keys, tf.int64)
        settings = self._settings
        with operations_added() as made:
            if settings.when_full != "default_row":
                missing = wanted - self._room()
                if settings.when_full == "error":
                    text = (
                        f"The table {settings.name} is full: {self.device} has room for {self.capacity} of its "
                        f"{settings.capacity} rows. Create it with a larger capacity, call evict(), or set when_full."
                    )
                    tf.debugging.Assert(missing <= 0, [text])
                else:
                    tf.cond(missing > 0, lambda: self._evict_oldest(missing, found), lambda: tf.constant(0))
        with tf.control_dependencies(made):
            granted = tf.minimum(wanted, self._room())
        keys, entries = keys[:granted], entries[:granted]
        waited = tf.math.count_nonzero(entries < UNKNOWN)
        with operations_added() as written:
            numbers = self._allocate(keys, self.counts.sparse_read(Count.CLOCK))
            write(self.rows, numbers, tf.ensure_shape(settings.initializer(keys, self.dim), [None, self.dim]))
            for name, value in settings.update.slots.items():
                write(self.slots[name], numbers, tf.broadcast_to(value, tf.concat([tf.shape(numbers), value.shape], 0)))
            self._add_counts({Count.WAITING: -waited, Count.REFUSED: wanted - granted})
        with tf.control_dependencies(written):
            # The keys are inserted last, so that a look-up without the mutex finds only complete rows.
            self.index.insert(keys, numbers)

    def _push(self, keys: Any, gradient: Any) -> Any:
        with self.mutex.hold([keys, gradient]):
            found = self.find(keys)
            is_there = found >= 0

            def of_rows() -> tuple[Any, Any]:
                at = tf.where(is_there)[:, 0]
                return tf.gather(found, at), tf.gather(gradient, at)

            numbers, of_numbers = tf.cond(tf.reduce_all(is_there), lambda: (found, gradient), of_rows)
            step = self.counts.sparse_read(Count.CLOCK)
            rate = self._settings.update.rate_at(step) if self.rate is None else self.rate.read_value()
            rows = UnsharedRows(self.rows, numbers)
            slots = {name: UnsharedRows(slot, numbers) for name, slot in self.slots.items()}
            self._settings.update.update(rows, slots, of_numbers, step, rate)
            changed = [columns for columns in (rows, *slots.values()) if columns.is_changed]

            def write_rows() -> None:
                for columns in changed:
                    write(columns.variable, numbers, columns.value)

            self._change_rows([columns.value for columns in changed], write_rows)
            write(self.stamp, numbers, tf.fill(tf.shape(numbers), step + 1))
            self._add_counts({Count.CLOCK: 1, Count.DROPPED: tf.size(keys, tf.int64) - tf.size(numbers, tf.int64)})
        return step

    def _evict(self, first: Any) -> tuple[Any, Any]:
        with tf.device(self.device):
            used = self.counts.sparse_read(Count.USED)
            end = tf.minimum(first + _SEARCHED_AT_ONCE, used)
            found = self._to_evict(tf.range(first, end))
            some = found[:_EVICTED_AT_ONCE]

            def evict_some() -> Any:
                with self.mutex.hold([some]):
                    still = self._to_evict(some)
                    self._release(still)
                    return tf.size(still, tf.int64)

            number = tf.cond(tf.size(some) > 0, evict_some, lambda: tf.constant(0, tf.int64))
            following = tf.cond(tf.size(found) > _EVICTED_AT_ONCE, lambda: some[-1] + 1, lambda: end)
            return number, tf.where(following < used, following, tf.constant(-1, tf.int64))

    def _to_evict(self, numbers: Any) -> Any:
        """Returns which of the row numbers are in use and selected by an eviction policy."""
        stamps = self.stamp.sparse_read(numbers)
        ages = self.counts.sparse_read(Count.CLOCK) - stamps
        is_evicted = tf.zeros(tf.shape(ages), tf.bool)
        for policy in self._settings.eviction:
            if isinstance(policy, OlderThan):
                is_evicted |= ages > policy.steps
            else:
                is_evicted |= tf.norm(self.rows.sparse_read(numbers), axis=1) < policy.norm
        return tf.boolean_mask(numbers, tf.logical_and(stamps > FREE_STAMP, is_evicted))

    def _evict_oldest(self, missing: Any, found: Any) -> Any:
        """Evicts the oldest of the next rows, but no rows of this look-up. A full search would block other calls."""
        counts = self.counts.read_value()
        used = counts[Count.USED]
        rows = tf.maximum(used, tf.constant(1, tf.int64))
        size = tf.minimum(used, tf.maximum(_CANDIDATES * missing, tf.constant(_LEAST_CANDIDATES, tf.int64)))
        candidates = (counts[Count.HAND] + tf.range(size)) % rows
        needed = tf.sort(found)
        places = tf.searchsorted(needed, candidates)
        is_needed = tf.gather(needed, tf.minimum(places, tf.size(needed) - 1)) == candidates
        stamps = self.stamp.sparse_read(candidates)
        candidates = tf.boolean_mask(candidates, tf.logical_and(stamps > FREE_STAMP, tf.logical_not(is_needed)))
        order = tf.argsort(self.stamp.sparse_read(candidates), stable=True)
        oldest = tf.gather(candidates, order[: tf.cast(missing, tf.int32)])
        in_order(
            [oldest],
            lambda: self._release(oldest),
            lambda: self.counts.scatter_nd_update([[Count.HAND]], [(counts[Count.HAND] + size) % rows]),
        )
        return tf.constant(0)

    # Methods for the whole shard.

    @client_may_call()
    def read_counts(self) -> Any:
        """Returns a consistent copy of `counts`."""
        with self.mutex.hold():
            return self.counts.read_value()

    def recover(self) -> None:
        """Empties the shard if no checkpoint has restored it. Called on the client after variables were recovered."""
        if not self.read_counts()[Count.RESTORED]:
            self.reserve()

    @client_may_call()
    def rebuild(self) -> None:
        """Derives the index and the free rows from `key_of` and `stamp` below `USED`. Forgets waiting keys.

        Called after the variables were restored, when `counts` has the values of the checkpoint.
        """
        with self.mutex.hold():
            with operations_added() as emptied:
                self._create_buckets()
            used = self.counts.sparse_read(Count.USED)

            def add(first: Any, freed: Any) -> Any:
                numbers = tf.range(first, tf.minimum(first + SLICE, used))
                is_used = self.stamp.sparse_read(numbers) > FREE_STAMP
                mine, unused = tf.boolean_mask(numbers, is_used), tf.boolean_mask(numbers, tf.logical_not(is_used))
                last = freed + tf.size(unused, tf.int64)
                write(self.free, tf.range(freed, last), unused)
                with tf.control_dependencies([self.index.insert(self.key_of.sparse_read(mine), mine)]):
                    return first + SLICE, last

            with tf.control_dependencies(emptied):
                start = tf.constant(0, tf.int64)
                _, freed = tf.while_loop(lambda first, _: first < used, add, [start, start], parallel_iterations=1)
            positions = [[Count.FREE], [Count.WAITING], [Count.NEXT_WAITING], [Count.CHANGES]]
            self.counts.scatter_nd_update(positions, tf.stack([freed, *[tf.zeros_like(freed)] * 3]))

    # Methods for slices of the content.

    @client_may_call(_NUMBER, _NUMBER, _NUMBER)
    def read_rows(self, first: Any, count: Any, since: Any = 0) -> tuple[Any, Any, list[Any], Any]:
        """Reads a consistent slice of `count` rows from number `first`. Returns the rows with stamps from `since` on.

        `first` must be below `USED`. Updates wait while a slice is read, so a slice should have about 65,536 rows.
        While training goes on, a key may be evicted and get a row in another slice.

        Returns tensors on the server: keys, int64 [n]; rows, float32 [n, dim]; slots, as in `slots`; stamps, int64 [n].
        """
        with self.mutex.hold([first, count]):
            numbers = _slice(first, count, self.counts.sparse_read(Count.USED))
            stamps = self.stamp.sparse_read(numbers)
            numbers = tf.boolean_mask(numbers, tf.logical_and(stamps > FREE_STAMP, stamps >= since))
            slots = [slot.sparse_read(numbers) for slot in self.slots.values()]
            keys, rows = self.key_of.sparse_read(numbers), self.rows.sparse_read(numbers)
            return keys, rows, slots, self.stamp.sparse_read(numbers)

    def write_rows(self, keys: Any, rows: Any, slots: Sequence[Any], stamps: Any) -> None:
        """Writes rows for keys with or without a row, under `mutex`. The arguments are as `read_rows` returns them.

        If there is no room for all rows, the oldest of the new and present rows are left out, and count as evicted. If
        no row may be left out, the method raises tf.errors.InvalidArgumentError.
        """
        with self.mutex.hold([keys, rows, *slots, stamps]):
            with operations_added() as made:
                is_kept = self._make_room_for_saved(keys, stamps)
            with tf.control_dependencies(made):
                keys, rows, stamps, *slots = (tf.boolean_mask(each, is_kept) for each in (keys, rows, stamps, *slots))
                found = self.find(keys)
            new_at = tf.where(found < 0)[:, 0]
            new = tf.gather(keys, new_at)
            waited = tf.math.count_nonzero(tf.gather(found, new_at) < UNKNOWN)
            self._add_counts({Count.WAITING: -waited})
            numbers = tf.tensor_scatter_nd_update(found, new_at[:, tf.newaxis], self._allocate(new, 0))
            with operations_added() as writes:
                write(self.rows, numbers, rows)
                write(self.stamp, numbers, stamps)
                for slot, values in zip(self.slots.values(), slots, strict=True):
                    write(slot, numbers, values)
            with tf.control_dependencies(writes):
                self.index.insert(keys, numbers)

    def _make_room_for_saved(self, keys: Any, stamps: Any) -> Any:
        """Makes room for the rows of a checkpoint. Returns for which rows there is room, bool [n]."""
        missing = tf.math.count_nonzero(self.find(keys) < 0) - self._room()
        every = tf.ones(tf.shape(keys), tf.bool)
        if self._settings.when_full != "error":
            return tf.cond(missing > 0, lambda: self._leave_out_oldest(keys, stamps, missing), lambda: every)
        text = (
            f"The table {self.name} has no room for the rows of a checkpoint: {self.device} has room for "
            f"{self.capacity} rows. Create it with a larger capacity, or with when_full='evict_oldest', by which "
            "rows without a gradient for longest are left out."
        )
        tf.debugging.Assert(missing <= 0, [text])
        return every

    def _leave_out_oldest(self, keys: Any, stamps: Any, missing: Any) -> Any:
        """Evicts or leaves out the `missing` oldest of present and new rows, at least 1. Returns which keys to keep."""
        found = self.find(keys)
        is_new = found < 0
        is_there = tf.logical_not(is_new)
        # Present rows get their new stamps first, so that their old stamps do not make them the oldest.
        with operations_added() as stamped:
            write(self.stamp, tf.boolean_mask(found, is_there), tf.boolean_mask(stamps, is_there))
        # In this search, new rows have negative numbers.
        places = -1 - tf.range(tf.size(keys, tf.int64))
        new = tf.boolean_mask(stamps, is_new), tf.boolean_mask(places, is_new)
        with tf.control_dependencies(stamped):
            used = self.counts.sparse_read(Count.USED)

            def search(first: Any, stamps: Any, numbers: Any) -> Any:
                more = _slice(first, _STAMPS_AT_ONCE, used)
                more_stamps = self.stamp.sparse_read(more)
                is_used = more_stamps > FREE_STAMP
                stamps = tf.concat([stamps, tf.boolean_mask(more_stamps, is_used)], 0)
                numbers = tf.concat([numbers, tf.boolean_mask(more, is_used)], 0)
                return first + _STAMPS_AT_ONCE, *_oldest(stamps, numbers, missing)

            *_, oldest = tf.while_loop(
                lambda first, *_: first < used,
                search,
                (tf.constant(0, tf.int64), *_oldest(*new, missing)),
                shape_invariants=(tf.TensorShape([]), tf.TensorShape([None]), tf.TensorShape([None])),
                parallel_iterations=1,
            )
        left_out = -1 - tf.boolean_mask(oldest, oldest < 0)
        number = tf.size(left_out, tf.int64)
        with operations_added() as released:
            self._release(tf.boolean_mask(oldest, oldest >= 0))
        with tf.control_dependencies(released):
            self._add_counts({Count.ADMITTED: number, Count.EVICTED: number})
            is_there = self.find(keys) >= 0
        is_kept = tf.tensor_scatter_nd_update(is_new, left_out[:, tf.newaxis], tf.fill([number], False))
        return tf.logical_or(is_kept, is_there)

    def read_evicted(self, first: Any, count: Any) -> Any:
        """Returns `count` keys, int64 [n], from the evicted key number `first`. The last `capacity` keys are known."""
        with self.mutex.hold([first, count]):
            last = tf.minimum(first + count, self.counts.sparse_read(Count.EVICTED))
            return self.evicted.sparse_read(tf.range(first, last) % self.capacity)

    def remove(self, keys: Any) -> None:
        """Evicts the keys that have rows. Keys may occur several times."""
        with self.mutex.hold([keys]):
            found = tf.unique(self.find(keys))[0]
            self._release(tf.boolean_mask(found, found >= 0))

    @client_may_call(_NUMBER, _NUMBER)
    def read_waiting(self, first: Any, count: Any) -> tuple[Any, Any]:
        """Returns the waiting keys in a slice of the ring and how often each was seen, as int64 [n] on the server."""
        if self.waiting is None:
            return tf.zeros([0], tf.int64), tf.zeros([0], tf.int64)
        with self.mutex.hold([first, count]):
            last = tf.minimum(self.counts.sparse_read(Count.NEXT_WAITING), self.capacity)
            keys = self.waiting.sparse_read(_slice(first, count, last))
            keys = tf.unique(keys)[0]
            found = self.find(keys)
            is_waiting = found < UNKNOWN
            return tf.boolean_mask(keys, is_waiting), -1 - tf.boolean_mask(found, is_waiting)

    @client_may_call(_KEYS, _KEYS)
    def write_waiting(self, keys: Any, times: Any) -> None:
        """Sets how often keys without a row were seen. The arguments are as `read_waiting` returns them."""
        if self.waiting is None:
            return
        with self.mutex.hold([keys, times]):
            found = self.find(keys)
            at = tf.where(found < 0)[:, 0]
            self._wait(tf.gather(keys, at), tf.gather(times, at), tf.gather(found, at) == UNKNOWN)


def _slice(first: Any, count: Any, end: Any) -> Any:
    return tf.range(first, tf.maximum(first, tf.minimum(first + count, end)))


def _oldest(stamps: Any, numbers: Any, count: Any) -> tuple[Any, Any]:
    """Returns the `count` smallest stamps, or all stamps if there are fewer, with their row numbers."""
    negative, at = tf.math.top_k(-stamps, tf.minimum(tf.cast(count, tf.int32), tf.size(stamps)), sorted=False)
    return -negative, tf.gather(numbers, at)


def write(variable: tf.Variable, numbers: Any, values: Any) -> None:
    """Assigns values to rows of a variable. The row numbers must be unique.

    This kernel is ten times as fast as the kernel of `tf.Variable.scatter_update`, which locks out readers. A reader
    without the mutex may see half of a row.
    """
    tf.raw_ops.ResourceScatterUpdate(resource=variable.handle, indices=numbers, updates=values)


def in_order(after: Sequence[Any], *actions: Callable[[], object]) -> None:
    """Adds the operations of each action to the graph, to run after the operations of the previous action."""
    done: Sequence[Any] = after
    for action in actions:
        with tf.control_dependencies(list(done)), operations_added() as added:
            action()
        done = added


def full_size(settings: TableSettings, capacity: int) -> int:
    """Returns the bytes of a full shard with room for `capacity` rows."""
    slots, counts_waiting = settings.update.slots, settings.admission.counts
    numbers = settings.dim + sum(int(np.prod(value.shape)) for value in slots.values())
    of_row = 4 * numbers + 32 + 8 * counts_waiting
    return capacity * (of_row + _INDEX_BYTES * (1 + counts_waiting))
