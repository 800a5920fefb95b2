"""One parameter server's part of a table: look-ups, gradients and eviction, by key, where the rows are.

    look-up     find all keys in the index, gather their rows                       no mutex
                  if some are new, or rows were changed during that: again          under the mutex
                  count those that wait, give rows to those that are admitted
    gradients   find, read and compute, write these rows and slots, stamp them      under the mutex
    eviction    look for rows in a slice                                            no mutex
                  look again at some of them, remove them from the index, free them under the mutex

No number of a row leaves the server. So if a row was evicted, or given to another key, after a worker looked its key
up, the gradient finds the key's present row, or none, and is then dropped.

A row that is looked up without the mutex is whole, and of its key. Rows are written, or freed so that another key can
get them, only while `CHANGES` is odd, and it grows each time. A look-up that finds it odd, or grown, is repeated under
the mutex. It is odd only during the writing, which takes a small part of the time of an update.
"""

import functools
from typing import Any

import tensorflow as tf

from coordinator.embeddings.shard_storage import FREE_STAMP, UNKNOWN, Count, ShardStorage, in_order, write
from coordinator.embeddings.table_settings import TableSettings, evicted
from coordinator.ps_strategy.keras.internals.optimizers import UnsharedRows
from coordinator.ps_strategy.tensorflow_internals.shared_variable import operations_added

_KEYS = tf.TensorSpec([None], tf.int64)
_NUMBER = tf.TensorSpec([], tf.int64)

# How many rows are evicted at most while others wait for the mutex, and how many rows are searched for them.
_EVICTED_AT_ONCE, _SEARCHED_AT_ONCE = 1000, 2**14
# A full table evicts the oldest of this many rows for each that is needed, and at least of the second number.
_CANDIDATES, _LEAST_CANDIDATES = 4, 2000

# The server prepares such a function once for all steps of a call, and a function in a branch only if the branch is
# taken. Otherwise the worker would prepare it for each step: most of the time to build a call of many steps.
_NOT_INLINED = {"_noinline": True}


class TableShard:
    """The part of a table on one parameter server. Created in the strategy's scope, with the arguments of its storage.

    Attributes:
      storage: the variables and the index.
      rate: the learning rate, a variable; None if the optimizer computes it.
    """

    def __init__(self, settings: TableSettings, device: str, capacity: int, number: int) -> None:
        self.device = device
        self._settings = settings
        self.storage = ShardStorage(settings, device, capacity, number)
        rate = settings.update.learning_rate
        self.rate = None
        if rate is not None:
            with self.storage.placed():
                self.rate = tf.Variable(
                    lambda: tf.constant(rate, tf.float32), trainable=False, name=f"{settings.name}/rate"
                )
        # Traced once each, whatever functions use them.
        self._functions = {
            # Partial functions, as TensorFlow would count the tracings of all tables, and warn.
            method: tf.function(
                functools.partial(method),
                input_signature=signature,
                autograph=False,
                experimental_attributes=_NOT_INLINED,
            )
            for method, signature in (
                (self._find, [_KEYS]),
                (self._find_or_create, [_KEYS]),
                (self._gather_under_mutex, [_KEYS]),
                (self._create, [_KEYS]),
                (self._push, [_KEYS, tf.TensorSpec([None, settings.dim], tf.float32)]),
                (self._evict, [_NUMBER]),
            )
        }

    def lookup(self, keys: Any, *, training: bool) -> Any:
        """Returns the rows of keys, float32 [n, dim], on the server; the default for keys without one.

        The keys are int64 [n], each once. With `training` they are counted and admitted.
        """
        return self._call(self._find_or_create if training else self._find, keys)

    def push(self, keys: Any, gradient: Any) -> None:
        """Updates the rows of keys (int64 [n], each once) with a gradient, float32 [n, dim].

        The gradients of keys that have no row are dropped.
        """
        self._call(self._push, keys, gradient)

    def evict(self, first: Any) -> Any:
        """Evicts some rows that the policies evict, from number `first` on, an int64 scalar.

        Returns:
          How many were evicted, and the row to continue with, or -1 after the last.
        """
        return self._call(self._evict, first)

    def _call(self, method: Any, *arguments: Any) -> Any:
        with tf.device(self.device):
            return self._functions[method](*arguments)

    # Look-ups.

    def _find(self, keys: Any) -> Any:
        """Returns the rows of keys that have one, and the default for the others."""
        return self._rows_of(keys)[0]

    def _find_or_create(self, keys: Any) -> Any:
        with tf.device(self.device):
            rows, found = self._rows_of(keys)
            return tf.cond(tf.reduce_all(found >= 0), lambda: rows, lambda: self._call(self._create, keys))

    def _rows_of(self, keys: Any) -> tuple[Any, Any]:
        """Returns the rows of keys, and what the index has for the keys: numbers of rows, or negative numbers."""
        counts = self.storage.counts
        with tf.device(self.device):
            before = counts.sparse_read(Count.CHANGES)
            with tf.control_dependencies([before]):
                found = self.storage.find(keys)
            rows = self._gather(found)
            with tf.control_dependencies([rows]):
                after = counts.sparse_read(Count.CHANGES)
            is_same = tf.logical_and(before == after, before % 2 == 0)
            return tf.cond(is_same, lambda: (rows, found), lambda: self._call(self._gather_under_mutex, keys))

    def _gather_under_mutex(self, keys: Any) -> tuple[Any, Any]:
        with self.storage.mutex.hold([keys]):
            found = self.storage.find(keys)
            return self._gather(found), found

    def _gather(self, found: Any) -> Any:
        is_there = found >= 0

        def with_default() -> Any:
            there = tf.where(is_there)[:, 0]
            rows = self.storage.rows.sparse_read(tf.gather(found, there))
            default = tf.fill([tf.size(found), self._settings.dim], self._settings.default)
            return tf.tensor_scatter_nd_update(default, there[:, tf.newaxis], rows)

        return tf.cond(tf.reduce_all(is_there), lambda: self.storage.rows.sparse_read(found), with_default)

    def _create(self, keys: Any) -> Any:
        """Counts and admits keys, and returns their rows."""
        storage, settings = self.storage, self._settings
        with storage.mutex.hold([keys]):
            found = storage.find(keys)
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
                    storage.wait(waiting, before + 1, before == 0)
                admitted += counted
            with tf.control_dependencies(admitted):
                # Again, since rows of a full table may have been evicted.
                return self._gather(storage.find(keys))

    def _admit(self, keys: Any, entries: Any, found: Any) -> None:
        """Gives rows to keys (int64 [n]) that have none, as far as there is room; `entries` has the index for them.

        The rows that the index has `found` for all keys of this look-up are not evicted.
        """
        storage = self.storage
        wanted = tf.size(keys, tf.int64)
        with operations_added() as made:
            self._make_room(wanted, found)
        with tf.control_dependencies(made):
            granted = tf.minimum(wanted, storage.room())
        keys, entries = keys[:granted], entries[:granted]
        waited = tf.math.count_nonzero(entries < UNKNOWN)
        with operations_added() as written:
            numbers = storage.allocate(keys, storage.counts.sparse_read(Count.CLOCK))
            storage.initialize(numbers, keys)
            storage.add_counts({Count.WAITING: -waited, Count.REFUSED: wanted - granted})
        with tf.control_dependencies(written):
            # A look-up that does not hold the mutex finds a key only when its row is there.
            storage.index.insert(keys, numbers)

    def _make_room(self, wanted: Any, found: Any) -> None:
        settings, storage = self._settings, self.storage
        if settings.when_full == "default_row":
            return
        missing = wanted - storage.room()
        if settings.when_full == "error":
            text = (
                f"The table {settings.name} is full: {storage.device} has room for {storage.capacity} of its "
                f"{settings.capacity} rows. Create it with a larger capacity, call evict(), or set when_full."
            )
            tf.debugging.Assert(missing <= 0, [text])
            return
        tf.cond(missing > 0, lambda: self._evict_oldest(missing, found), lambda: tf.constant(0))

    # Gradients.

    def _push(self, keys: Any, gradient: Any) -> Any:
        storage = self.storage
        with storage.mutex.hold([keys, gradient]):
            numbers, gradient = _of_rows(storage.find(keys), gradient)
            step = storage.counts.sparse_read(Count.CLOCK)
            rate = self._settings.update.rate_at(step) if self.rate is None else self.rate.read_value()
            rows = UnsharedRows(storage.rows, numbers)
            slots = {name: UnsharedRows(slot, numbers) for name, slot in storage.slots.items()}
            self._settings.update.update(rows, slots, gradient, step, rate)
            changed = [columns for columns in (rows, *slots.values()) if columns.is_changed]

            def write_rows() -> None:
                for columns in changed:
                    write(columns.variable, numbers, columns.value)

            storage.change_rows([columns.value for columns in changed], write_rows)
            write(storage.stamp, numbers, tf.fill(tf.shape(numbers), step + 1))
            storage.add_counts({Count.CLOCK: 1, Count.DROPPED: tf.size(keys, tf.int64) - tf.size(numbers, tf.int64)})
        return step

    # Eviction.

    def _evict(self, first: Any) -> tuple[Any, Any]:
        storage = self.storage
        with tf.device(self.device):
            used = storage.counts.sparse_read(Count.USED)
            end = tf.minimum(first + _SEARCHED_AT_ONCE, used)
            found = self._to_evict(tf.range(first, end))
            some = found[:_EVICTED_AT_ONCE]
            number = tf.cond(tf.size(some) > 0, lambda: self._evict_some(some), lambda: tf.constant(0, tf.int64))
            following = tf.cond(tf.size(found) > _EVICTED_AT_ONCE, lambda: some[-1] + 1, lambda: end)
            return number, tf.where(following < used, following, tf.constant(-1, tf.int64))

    def _evict_some(self, numbers: Any) -> Any:
        with self.storage.mutex.hold([numbers]):
            still = self._to_evict(numbers)
            self.storage.release(still)
            return tf.size(still, tf.int64)

    def _to_evict(self, numbers: Any) -> Any:
        """Returns the rows among these that are in use, and that a policy evicts."""
        storage = self.storage
        stamps = storage.stamp.sparse_read(numbers)
        ages = storage.counts.sparse_read(Count.CLOCK) - stamps
        is_evicted = evicted(self._settings.eviction, lambda: storage.rows.sparse_read(numbers), ages)
        return tf.boolean_mask(numbers, tf.logical_and(stamps > FREE_STAMP, is_evicted))

    def _evict_oldest(self, missing: Any, found: Any) -> Any:
        """Evicts the oldest of the next rows of a full table, except the rows of this look-up.

        It does not compare the stamps of all rows, since others wait for the mutex.
        """
        storage = self.storage
        counts = storage.counts.read_value()
        used = counts[Count.USED]
        rows = tf.maximum(used, tf.constant(1, tf.int64))
        size = tf.minimum(used, tf.maximum(_CANDIDATES * missing, tf.constant(_LEAST_CANDIDATES, tf.int64)))
        candidates = (counts[Count.HAND] + tf.range(size)) % rows
        needed = tf.sort(found)
        places = tf.searchsorted(needed, candidates)
        is_needed = tf.gather(needed, tf.minimum(places, tf.size(needed) - 1)) == candidates
        stamps = storage.stamp.sparse_read(candidates)
        candidates = tf.boolean_mask(candidates, tf.logical_and(stamps > FREE_STAMP, tf.logical_not(is_needed)))
        order = tf.argsort(storage.stamp.sparse_read(candidates), stable=True)
        oldest = tf.gather(candidates, order[: tf.cast(missing, tf.int32)])
        in_order(
            [oldest],
            lambda: storage.release(oldest),
            lambda: storage.counts.scatter_nd_update([[Count.HAND]], [(counts[Count.HAND] + size) % rows]),
        )
        return tf.constant(0)


def _of_rows(found: Any, gradient: Any) -> tuple[Any, Any]:
    """Returns the numbers of rows of the keys that have one, and the gradients of these rows."""
    is_there = found >= 0

    def some() -> tuple[Any, Any]:
        at = tf.where(is_there)[:, 0]
        return tf.gather(found, at), tf.gather(gradient, at)

    return tf.cond(tf.reduce_all(is_there), lambda: (found, gradient), some)
