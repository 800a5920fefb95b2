"""What a parameter server holds of a table: the rows, their keys and slots, and the index that finds the row of a key.

    index     key -> number of the row, or -1 - times while the key waits to be admitted; -1 for any other key
    rows      [capacity, dim]      slots  [capacity, ...], one for each of the optimizer's
    key_of    [capacity]           stamp  [capacity], the step of the last gradient; -1 if the row is free
    free      [capacity], the numbers of free rows below `used`, as a stack
    waiting   [capacity], keys that wait to be admitted, as a ring
    evicted   [capacity], the keys that were evicted last, as a ring

The variables are created for the full capacity, and memory is used as rows are written: what is beyond `used` is never
read. The index is created with all of its buckets, since adding some would stop all look-ups for seconds.

Index, free rows and counts of waiting keys are no variables of a checkpoint; `rebuild` derives the first two from
`key_of` and `stamp`.
"""

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator.ps_strategy.tensorflow_internals.handles import create_mutable_table
from coordinator.ps_strategy.tensorflow_internals.shared_variable import ServerMutex, client_may_call, operations_added

# The positions of `counts`. Rows below `USED` are in use or free; `CLOCK` counts pushes; `CHANGES` grows when rows that
# the index has are changed or freed, and is odd meanwhile; `NEXT_WAITING` is the number of keys that have ever waited;
# `HAND` is where the search for the oldest rows goes on; `RESTORED` is 1 if a checkpoint was restored.
USED, FREE, CLOCK, ADMITTED, EVICTED, REFUSED, DROPPED, WAITING, CHANGES, NEXT_WAITING, HAND, RESTORED = range(12)
_COUNTS = 12

FREE_STAMP = -1
# As `counts`, since a stamp is compared with `CLOCK`, which grows with each push of all training.
STAMPS = tf.int64
# What an entry of the index takes, its part of the buckets included; measured.
INDEX_BYTES = 42
# The index gives it for keys that it does not have.
UNKNOWN = -1
# How many rows or keys are handled in one step where all are: so few that others wait at most some milliseconds.
SLICE = 2**16


class Index(tf.lookup.experimental.MutableHashTable):
    """A mutable table which the strategy's scope does not place: it is on the server of its rows."""


class ShardStorage:
    """The storage of one table on one parameter server, or in this process; see `TablePlace`.

    Methods that change something are called under `mutex`, where it is not said that they take it.

    Args:
      name: of the table.
      device: of the server's CPU.
      capacity: the greatest number of rows.
      dim: the length of a row.
      slots: what a new row has in each slot, by the slot's name: arrays of the shape of a row, or scalars.
      initializer: see `initializers`.
      counts_waiting: whether keys wait to be admitted.
      number: unique among the tables of the strategy.

    Attributes:
      index, rows, slots, key_of, stamp, free, waiting, counts: see the module.
      mutex: held for every change of them.
    """

    def __init__(
        self,
        name: str,
        device: str,
        capacity: int,
        dim: int,
        slots: Mapping[str, np.ndarray],
        initializer: Callable[[Any, int], Any],
        *,
        counts_waiting: bool,
        number: int,
    ) -> None:
        self.name, self.device, self.capacity, self.dim = name, device, capacity, dim
        self._initializer = initializer
        self._slot_values = dict(slots)
        self.mutex = ServerMutex(f"coordinator/embeddings/{number}", device)
        with self.placed():
            self.counts = tf.Variable(lambda: tf.zeros([_COUNTS], tf.int64), trainable=False, name=f"{name}/counts")
            self.rows = self._reserved("rows", [dim], tf.float32)
            self.slots = {
                slot: self._reserved(slot.strip("_"), list(value.shape), tf.float32) for slot, value in slots.items()
            }
            self.key_of = self._reserved("key_of", [], tf.int64)
            self.stamp = self._reserved("stamp", [], STAMPS)
            self.free = self._reserved("free", [], tf.int64)
            self.evicted = self._reserved("evicted", [], tf.int64)
            self.waiting = self._reserved("waiting", [], tf.int64) if counts_waiting else None
        arguments = (tf.int64, tf.int64, UNKNOWN)
        self.index, resource = create_mutable_table(Index, device, arguments, {"name": f"{name}/index"})
        services = getattr(tf.distribute.get_strategy().extended, "services", None)
        if services is not None:
            services.variables.add_table(self.index, resource, recovered_by=self)
        self.reserve()

    @contextlib.contextmanager
    def placed(self) -> Iterator[None]:
        """A scope in which variables are created on this server."""
        beside = types.SimpleNamespace(device=self.device)

        def create(next_creator: Callable[..., Any], **kwargs: Any) -> Any:
            return next_creator(**{**kwargs, "colocate_with": beside})

        with tf.variable_creator_scope(create), tf.device(self.device):
            yield

    def _reserved(self, name: str, row: list[int], dtype: tf.DType) -> tf.Variable:
        shape = [self.capacity, *row]
        return tf.Variable(
            lambda: tf.raw_ops.Empty(shape=shape, dtype=dtype, init=False),
            shape=shape,
            dtype=dtype,
            trainable=False,
            name=f"{self.name}/{name}",
        )

    @staticmethod
    def full_size(capacity: int, dim: int, slots: Mapping[str, np.ndarray], *, counts_waiting: bool) -> int:
        """Returns how many bytes a storage with these arguments takes when it is full."""
        numbers = dim + sum(int(np.prod(value.shape)) for value in slots.values())
        of_row = 4 * numbers + 32 + 8 * counts_waiting
        return capacity * (of_row + INDEX_BYTES * (1 + counts_waiting))

    @property
    def _large(self) -> list[tf.Variable]:
        rest = [] if self.waiting is None else [self.waiting]
        return [self.rows, *self.slots.values(), self.key_of, self.stamp, self.free, self.evicted, *rest]

    def bytes_per_row(self) -> int:
        """Returns what a row takes of the server's memory, without the index and the list of evicted keys."""
        large = [each for each in self._large if each is not self.evicted]
        return sum(int(np.prod(each.shape[1:])) * each.dtype.size for each in large)

    @property
    def index_entries(self) -> int:
        """The greatest number of keys in the index."""
        return self.capacity * (1 if self.waiting is None else 2)

    @client_may_call()
    def reserve(self) -> None:
        """Empties the table, and allocates its variables and the buckets of its index again.

        While a value that the client assigned is still referred to, the first change of a row would copy all of it, and
        so use the memory of all rows; a value that is assigned in a function is not.
        """
        with self.mutex.hold():
            for variable in self._large:
                empty = tf.raw_ops.Empty(shape=variable.shape, dtype=variable.dtype, init=False)
                tf.raw_ops.AssignVariableOp(resource=variable.handle, value=empty)
            self.counts.assign(tf.zeros([_COUNTS], tf.int64), read_value=False)
            self._create_buckets()

    def _create_buckets(self) -> None:
        """Empties the index, which then has buckets for all rows: a table that was filled and emptied keeps them."""
        entries = tf.constant(self.index_entries, tf.int64)

        def fill(first: Any) -> Any:
            keys = tf.range(first, tf.minimum(first + SLICE, entries))
            with tf.control_dependencies([self.index.insert(keys, keys)]):
                return first + SLICE

        filled = tf.while_loop(lambda first: first < entries, fill, [tf.constant(0, tf.int64)], parallel_iterations=1)
        nothing = tf.zeros([0], tf.int64)
        with tf.control_dependencies(tf.nest.flatten(filled)):
            tf.raw_ops.LookupTableImportV2(table_handle=self.index.resource_handle, keys=nothing, values=nothing)

    # Used by the shard, on the server.

    def find(self, keys: Any) -> Any:
        """Returns what the index has for keys, int64 [n]."""
        found = self.index.lookup(keys)
        # Unknown to TensorFlow, since the table is of another server.
        found.set_shape(keys.shape)
        return found

    def allocate(self, keys: Any, steps: Any) -> Any:
        """Gives rows to keys that have none; there must be as many.

        Args:
          keys: int64 [n].
          steps: what their stamps become, int64 [n] or a scalar.

        Returns:
          Their numbers, int64 [n]. They are not in the index yet.
        """
        counts = self.counts.read_value()
        number = tf.size(keys, tf.int64)
        recycled = tf.minimum(number, counts[FREE])
        again = self.free.sparse_read(counts[FREE] - 1 - tf.range(recycled))
        numbers = tf.concat([again, counts[USED] + tf.range(number - recycled)], 0)
        write(self.key_of, numbers, keys)
        write(self.stamp, numbers, tf.broadcast_to(tf.cast(steps, STAMPS), tf.shape(numbers)))
        self.add_counts({USED: number - recycled, FREE: -recycled, ADMITTED: number})
        return numbers

    def initialize(self, numbers: Any, keys: Any) -> None:
        """Writes the initial rows of keys, and their slots."""
        write(self.rows, numbers, tf.ensure_shape(self._initializer(keys, self.dim), [None, self.dim]))
        for name, value in self._slot_values.items():
            write(self.slots[name], numbers, tf.broadcast_to(value, tf.concat([tf.shape(numbers), value.shape], 0)))

    def release(self, numbers: Any) -> None:
        """Frees rows that are in use."""
        keys = self.key_of.sparse_read(numbers)
        first, before = self.counts.sparse_read(FREE), self.counts.sparse_read(EVICTED)
        number = tf.size(numbers, tf.int64)

        def free() -> None:
            write(self.stamp, numbers, tf.fill(tf.shape(numbers), tf.constant(FREE_STAMP, STAMPS)))
            write(self.free, first + tf.range(number), numbers)
            write(self.evicted, (before + tf.range(number)) % self.capacity, keys)
            self.add_counts({FREE: number, EVICTED: number})

        self.change_rows([keys, first, before], lambda: self.index.remove(keys), free)

    def change_rows(self, after: Sequence[Any], *actions: Callable[[], object]) -> None:
        """Does what changes or frees rows that the index has; see `in_order`.

        A look-up that does not hold the mutex learns from `CHANGES` that rows have been changed since it began.
        """
        changes = self.counts.sparse_read([CHANGES])
        # It is odd before if a call was cancelled in the middle.
        odd = changes + 1 + changes % 2
        in_order(
            [*after, odd],
            lambda: write(self.counts, [CHANGES], odd),
            *actions,
            lambda: write(self.counts, [CHANGES], odd + 1),
        )

    def add_counts(self, added: Mapping[int, Any]) -> None:
        """Adds to `counts`."""
        amounts = tf.stack([tf.cast(amount, tf.int64) for amount in added.values()])
        self.counts.scatter_nd_add([[position] for position in added], amounts)

    def wait(self, keys: Any, times: Any, is_new: Any) -> None:
        """Records how often waiting keys were seen; what has waited longest is forgotten if there is no room.

        Args:
          keys: int64 [n], without rows.
          times: how often each was seen, int64 [n], at least 1.
          is_new: whether each has not been waiting yet, bool [n].
        """
        assert self.waiting is not None
        # More would not have room in the ring, of which each place is written once here.
        keys, times, is_new = (each[: self.capacity] for each in (keys, times, is_new))
        first = self.counts.sparse_read(NEXT_WAITING)
        new = tf.boolean_mask(keys, is_new)
        number = tf.size(new, tf.int64)
        places = tf.range(first, first + number)
        # Places that have been used before; those beyond have no value yet.
        again = tf.boolean_mask(places, places >= self.capacity) % self.capacity
        oldest = self.waiting.sparse_read(again)
        forgotten = tf.unique(tf.boolean_mask(oldest, self.find(oldest) < UNKNOWN))[0]
        waiting = self.waiting
        in_order(
            [forgotten],
            lambda: self.index.insert(keys, -1 - times),
            # They may be among the keys.
            lambda: self.index.remove(forgotten),
            lambda: write(waiting, places % self.capacity, new),
            lambda: self.add_counts({NEXT_WAITING: number, WAITING: number - tf.size(forgotten, tf.int64)}),
        )

    @client_may_call()
    def read_counts(self) -> Any:
        """Returns `counts` of one moment."""
        with self.mutex.hold():
            return self.counts.read_value()

    def recover(self) -> None:
        """Makes the table usable after its variables were restored, or initialized; called on the client.

        A table that no checkpoint holds is empty.
        """
        if not self.read_counts()[RESTORED]:
            self.reserve()

    @client_may_call()
    def rebuild(self) -> None:
        """Derives the index and the free rows from `key_of` and `stamp`, below `USED`; waiting keys are forgotten.

        Called when the variables were restored. Then the counts of the checkpoint hold, too.
        """
        with self.mutex.hold():
            with operations_added() as emptied:
                self._create_buckets()
            used = self.counts.sparse_read(USED)

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
            written = tf.stack([freed, tf.zeros_like(freed), tf.zeros_like(freed), tf.zeros_like(freed)])
            self.counts.scatter_nd_update([[FREE], [WAITING], [NEXT_WAITING], [CHANGES]], written)


def write(variable: tf.Variable, numbers: Any, values: Any) -> None:
    """Assigns to rows of a variable, each number once.

    Ten times as fast as the kernel of `tf.Variable.scatter_update` here, which locks out readers. With this one, who
    reads without the mutex may see a half of a row.
    """
    tf.raw_ops.ResourceScatterUpdate(resource=variable.handle, indices=numbers, updates=values)


def in_order(after: Sequence[Any], *actions: Callable[[], object]) -> None:
    """Adds the operations of each action to the graph, to run after those of the action before."""
    done: Sequence[Any] = after
    for action in actions:
        with tf.control_dependencies(list(done)), operations_added() as added:
            action()
        done = added
