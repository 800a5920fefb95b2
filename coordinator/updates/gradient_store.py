"""Pushed gradients that wait on the parameter servers until the rule has decided which of them make an update.

    GradientStore      one on each server: a push is a row, with all that was sent to this server
    PushLog            on the home server: push --accepted--> ready --grads_to_wait of them, on all servers--> applied
    DelayedPushes      the same log for `Delayed`:  push --> delayed --delay over, at a pull--> ready --one--> applied
    QueuedGradients    the rows and the log of `Delayed` in a checkpoint

The servers store rows, not sums. If a worker dies before it has sent all its rows, the update leaves out the worker's
rows on all servers. The columns of a row:

    per variable: values | indices | kind | pulled     per optimizer: scalar | scalar ...

Usually all pushes have the same kinds of gradients. Then rows have no `kind`, and dense gradients have no indices. With
`has_kinds`, each row has all columns and its own kinds, because the step that applies a gradient may have been traced
before any push, or in another program. The column `pulled`, the value that a dense gradient was computed on, exists
only for rules that need it.

With each update the home server passes the ids of all logged pushes to the servers, the update's ids first. So no
server drops a row that a later update needs.
"""

import functools
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from coordinator.ps_strategy.keras.internals.optimizers import without_repeats
from coordinator.ps_strategy.tensorflow_internals.shared_variable import ServerMutex, client_may_call
from coordinator.updates import decisions
from coordinator.updates.model import Model
from coordinator.updates.rule_state import NO_STEP, RuleState

# The kinds of gradients of a variable in one push.
_NONE, _DENSE, _SPARSE = range(3)


class ChosenRows(NamedTuple):
    """The rows of an update, among all rows of the store.

    `lists` has a TensorList of all rows for each column, the ids last. `places` are the int64 positions of the chosen
    rows, in the order of the ids; `is_chosen` has a bool for each position.
    """

    lists: Sequence[Any]
    places: Any
    is_chosen: Any

    def first(self, column: int, dtype: tf.DType) -> Any:
        """Returns a column of the first chosen row, in the shape in which it was added."""
        return item(self.lists[column], self.places[0], dtype)

    def stacked(self, column: int, dtype: tf.DType, shape: Any) -> Any:
        """Returns a column of the chosen rows, which have the same shape, stacked along a new first dimension."""
        arguments = {"element_shape": tf.constant(-1), "element_dtype": dtype}
        places = tf.cast(self.places, tf.int32)
        rows = tf.raw_ops.TensorListGather(input_handle=self.lists[column], indices=places, **arguments)
        return tf.ensure_shape(rows, tf.TensorShape([None]).concatenate(shape))

    def concatenated(self, column: int, dtype: tf.DType, shape: Sequence[int | None]) -> Any:
        """Concatenates a column of the chosen rows along the first dimension; `shape` has the other dimensions."""
        together, lengths = tf.raw_ops.TensorListConcatV2(
            input_handle=self.lists[column],
            element_shape=tf.constant([-1, *(-1 if size is None else size for size in shape)]),
            leading_dims=tf.constant([], tf.int64),
            element_dtype=dtype,
        )
        return tf.boolean_mask(tf.ensure_shape(together, [None, *shape]), tf.repeat(self.is_chosen, lengths))


# The id of a push: its worker, the worker's connection, and microseconds on the worker's clock.
PUSH_ID_SIZE = 3
# The worker in the id of a dropped row.
_NO_WORKER = -2


class GradientStore:
    """The rows of one server, which may have no variable of the model. No checkpoint contains the rows.

    The store is created in the strategy's scope, on the server of the variable `near`. Operations under the server's
    lock need no other machine. Once begun, operations finish even if the calling worker dies.

    `scalars` are the dtypes of the scalars that the optimizer needs. `is_sparse` tells for each position whether the
    variable's gradients are `tf.IndexedSlices`. All servers share this dict, which is filled when a push is traced.
    None means that each push may have other kinds of gradients (`has_kinds`). With `has_pulled`, a dense gradient is
    stored with the value that it was computed on. Under the lock, `use(store, rows)` changes the server's variables by
    the rows of an update, at most `update_size`. `may_reject` tells whether a push from a live worker may be rejected.

    `places` are the positions of this store's columns in a row of the whole model, which has `width` columns.

    A dropped row leaves an empty place, and its tensors stay in memory. Empty places are removed when they are at least
    as many as the remaining rows, so that the cost of dropping a row does not depend on the number of rows.
    """

    # The ids of the pushes are in the last TensorList, not in their own variable: TensorFlow's workers crash on the
    # handle of a variable of a partially known shape.

    def __init__(  # noqa: PLR0913 - all but three are keywords
        self,
        model: Model,
        lock: ServerMutex,
        near: tf.Variable,
        *,
        scalars: Sequence[tf.DType],
        is_sparse: dict[int, bool] | None,
        update_size: int,
        use: Callable[["GradientStore", ChosenRows], None],
        has_pulled: bool,
        may_reject: bool,
    ) -> None:
        self.device = lock.device
        self._lock, self._update_size, self._use, self._may_reject = lock, update_size, use, may_reject
        self.has_kinds = is_sparse is None
        self.is_sparse = {} if is_sparse is None else is_sparse
        self._variables = {number: model.variables[number] for number in model.by_device.get(self.device, ())}
        per_variable = 2 + self.has_kinds + has_pulled
        self._pulled = per_variable - 1 if has_pulled else None
        self._column = {number: per_variable * place for place, number in enumerate(self._variables)}
        self._scalars = dict(enumerate(scalars, start=per_variable * len(self._variables)))
        self._dtypes: list[tf.DType] = []
        for variable in self._variables.values():
            kind, pulled = [tf.int32] * self.has_kinds, [variable.dtype] * has_pulled
            self._dtypes += [variable.dtype, tf.int64, *kind, *pulled]
        self._dtypes += [*self._scalars.values(), tf.int64]
        of_variables = per_variable * len(model.variables)
        self.width = of_variables + len(scalars)
        self.places = [per_variable * number + part for number in self._variables for part in range(per_variable)]
        self.places += range(of_variables, self.width)
        with tf.distribute.get_strategy().extended.colocate_vars_with(near):
            self.lists = tf.Variable(self._empty, dtype=tf.variant, shape=[len(self._dtypes)], trainable=False)

    def row(
        self, gradients: Mapping[int, Any], scalars: Sequence[Any], pulled: Mapping[int, Any] | None = None
    ) -> dict[int, Any]:
        """Returns the columns of a push, from gradients and pulled values by position."""
        row: dict[int, Any] = {}
        for number, column in self._column.items():
            dtype, gradient = self._variables[number].dtype, gradients.get(number)
            if self.has_kinds:
                kind = _NONE if gradient is None else _SPARSE if isinstance(gradient, tf.IndexedSlices) else _DENSE
                row |= {column: tf.zeros([0], dtype), column + 1: tf.zeros([0], tf.int64)}
                row[column + 2] = tf.constant(kind)
            if isinstance(gradient, tf.IndexedSlices):
                row |= {column: tf.cast(gradient.values, dtype), column + 1: tf.cast(gradient.indices, tf.int64)}
            elif gradient is not None:
                row[column] = tf.cast(gradient, dtype)
                if self._pulled is not None and pulled is not None:
                    row[column + self._pulled] = pulled[number]
        return row | dict(zip(self._scalars, scalars, strict=True))

    def scalars(self, rows: ChosenRows) -> list[Any]:
        """Returns the scalars of the last push among the rows."""
        return [rows.stacked(column, dtype, [])[-1] for column, dtype in self._scalars.items()]

    def combined(self, rows: ChosenRows, combine: Callable[..., Any]) -> dict[int, Any]:
        """Returns the combined gradients of an update by position; float16 and bfloat16 are combined in float32.

        `combine` combines dense gradients; see `Accumulating.combine`. Sparse gradients are averaged.
        """
        return {
            number: self._mean_of_rows(number, rows) if is_sparse else self._combined_of(number, rows, combine)
            for number, is_sparse in sorted(self.is_sparse.items())
            if number in self._variables
        }

    def apply_first(self, rows: ChosenRows, apply: Callable[[int, Any], None]) -> None:
        """Applies the gradients of the first chosen row, in a store with kinds.

        While the graph is built, `apply(position, gradient)` is called once for each kind. At run time, only the
        operations for the gradient's own kind run.
        """

        def apply_kind(number: int, *, is_sparse: bool) -> bool:
            variable, column = self._variables[number], self._column[number]
            gradient = rows.first(column, variable.dtype)
            if is_sparse:
                values = tf.ensure_shape(gradient, tf.TensorShape([None]).concatenate(variable.shape[1:]))
                indices = tf.ensure_shape(rows.first(column + 1, tf.int64), [None])
                gradient = tf.IndexedSlices(values, indices, _shape_of(variable))
            else:
                gradient = tf.ensure_shape(gradient, variable.shape)
            apply(number, gradient)
            return True

        for number, column in self._column.items():
            kinds = [lambda: False, functools.partial(apply_kind, number, is_sparse=False)]
            if self._variables[number].shape.rank != 0:
                kinds.append(functools.partial(apply_kind, number, is_sparse=True))
            tf.switch_case(tf.ensure_shape(rows.first(column + 2, tf.int32), []), kinds)

    def _combined_of(self, number: int, rows: ChosenRows, combine: Callable[..., Any]) -> Any:
        variable, column = self._variables[number], self._column[number]
        dtype = _precise(variable.dtype)
        columns = [column, *([] if self._pulled is None else [column + self._pulled])]
        gradients, *pulled = (tf.cast(rows.stacked(place, variable.dtype, variable.shape), dtype) for place in columns)
        # The first number of an id is its worker.
        workers = rows.stacked(len(rows.lists) - 1, tf.int64, [None])[:, 0]
        return tf.cast(combine(variable, gradients, workers, *(pulled or [None])), variable.dtype)

    def _mean_of_rows(self, number: int, rows: ChosenRows) -> Any:
        variable, column = self._variables[number], self._column[number]
        dtype = _precise(variable.dtype)
        count = tf.cast(tf.size(rows.places), dtype)
        values = tf.cast(rows.concatenated(column, variable.dtype, variable.shape[1:].as_list()), dtype)
        indices = rows.concatenated(column + 1, tf.int64, [])
        shape = _shape_of(variable)
        merged = without_repeats(tf.IndexedSlices(values, indices, shape))
        return tf.IndexedSlices(tf.cast(merged.values / count, variable.dtype), merged.indices, shape)

    def add(self, push: Any, row: Mapping[int, Any]) -> Any:
        """Adds a row of tensors on the server; returns the operation. All rows of the store lack the same columns."""
        with self._lock.hold([push, *row.values()]):
            lists = self._with_row(self.lists.read_value(), {**row, len(self._dtypes) - 1: push})
            return self.lists.assign(lists, read_value=False)

    @client_may_call(tf.TensorSpec([None, PUSH_ID_SIZE], tf.int64))
    def use_once(self, ids: Any) -> Any:
        """Uses and drops the rows of an update, unless an earlier call has done so; returns a tensor to wait for.

        `ids` are the ids of this update's pushes, then of the waiting pushes; int64 [n, 3], n > 0.
        """
        with tf.device(self.device):
            ids = tf.identity(ids)
        with self._lock.hold([ids]):
            # If the caller comes some updates late, the first row is no longer stored.
            pushes = vectors_of(self._unstacked()[-1], PUSH_ID_SIZE)
            is_stored = tf.reduce_any(tf.reduce_all(pushes == ids[0], 1))
            return tf.cond(is_stored, lambda: self._use_and_drop(ids), lambda: tf.constant(False))

    def drop(self, push: Any) -> Any:
        """Drops the row of a push that is in no update, by the push's id, int64 [3]; returns the operation."""
        with tf.device(self.device):
            push = tf.identity(push)
        with self._lock.hold([push]):
            lists = self._unstacked()
            is_other = tf.reduce_any(vectors_of(lists[-1], PUSH_ID_SIZE) != push, 1)
            return self.lists.assign(self._only(lists, _places_of(is_other)), read_value=False)

    @client_may_call()
    def clear(self) -> None:
        with self._lock.hold():
            self.lists.assign(self._empty(), read_value=False)

    @client_may_call(tf.TensorSpec([PUSH_ID_SIZE], tf.int64))
    def serialized(self, push: Any) -> Any:
        """Serializes all columns of a push's row: string [columns], or string [0] if there is no such row."""
        with tf.device(self.device):
            push = tf.identity(push)
        with self._lock.hold([push]):
            lists = self._unstacked()
            is_match = tf.reduce_all(vectors_of(lists[-1], PUSH_ID_SIZE) == push, 1)

            def columns() -> Any:
                place = tf.argmax(tf.cast(is_match, tf.int32))
                columns = zip(lists[:-1], self._dtypes[:-1], strict=True)
                return tf.stack([tf.io.serialize_tensor(item(rows, place, dtype)) for rows, dtype in columns])

            return tf.cond(tf.reduce_any(is_match), columns, lambda: tf.zeros([0], tf.string))

    @client_may_call(tf.TensorSpec([PUSH_ID_SIZE], tf.int64), tf.TensorSpec([None], tf.string))
    def add_serialized(self, push: Any, strings: Any) -> None:
        """Adds a row as `serialized` returns it."""
        with tf.device(self.device):
            push, strings = tf.identity(push), tf.identity(strings)
            dtypes = enumerate(self._dtypes[:-1])
            self.add(push, {column: tf.io.parse_tensor(strings[column], dtype) for column, dtype in dtypes})

    def _unstacked(self) -> Any:
        return tf.unstack(self.lists.read_value(), num=len(self._dtypes))

    def _use_and_drop(self, ids: Any) -> Any:
        lists = self._unstacked()
        pushes = vectors_of(lists[-1], PUSH_ID_SIZE)
        is_same = tf.reduce_all(tf.expand_dims(ids, 1) == pushes, -1)
        chosen = is_same[: self._update_size]
        is_chosen = tf.reduce_any(chosen, 0)
        is_kept = tf.reduce_any(is_same, 0) | ~_is_obsolete(pushes, may_reject=self._may_reject)
        is_kept &= ~is_chosen & (tf.unstack(pushes, axis=1)[0] != _NO_WORKER)
        kept = _places_of(is_kept)
        left = tf.cond(
            2 * tf.size(kept) > tf.size(is_kept),
            lambda: tf.stack([*lists[:-1], vector_list(tf.where(tf.expand_dims(is_kept, 1), pushes, _NO_WORKER))]),
            lambda: self._only(lists, kept),
        )
        dropped = self.lists.assign(left, read_value=False)
        # The rows are dropped first: if their use fails after changes of some variables, they must not be used again.
        with tf.control_dependencies([dropped]):
            self._use(self, ChosenRows(lists, tf.argmax(tf.cast(chosen, tf.int32), 1), is_chosen))
        return tf.constant(True)

    def _only(self, lists: Sequence[Any], kept: Any) -> Any:
        columns = list(range(len(lists)))
        if not self.has_kinds:
            # If no push has a gradient of a variable, the columns of the variable are empty.
            variables = {number: column for number, column in self._column.items() if number in self.is_sparse}
            parts = {True: (0, 1), False: (0,) if self._pulled is None else (0, self._pulled)}
            columns = [column + part for number, column in variables.items() for part in parts[self.is_sparse[number]]]
            columns += [*self._scalars, len(lists) - 1]

        def with_next(number: Any, collected: Any) -> tuple[Any, Any]:
            row = {column: item(lists[column], kept[number], self._dtypes[column]) for column in columns}
            return number + 1, self._with_row(collected, row)

        return tf.while_loop(lambda number, _: number < tf.size(kept), with_next, (0, self._empty()))[1]

    def _with_row(self, lists: Any, row: Mapping[int, Any]) -> Any:
        columns = tf.unstack(lists, num=len(self._dtypes))
        for column, value in row.items():
            columns[column] = tf.raw_ops.TensorListPushBack(input_handle=columns[column], tensor=value)
        return tf.stack(columns)

    def _empty(self) -> Any:
        empty = functools.partial(tf.raw_ops.EmptyTensorList, element_shape=-1, max_num_elements=-1)
        return tf.stack([empty(element_dtype=dtype) for dtype in self._dtypes])


def _places_of(is_true: Any) -> Any:
    """Returns the positions of True in a vector, int32 [n]."""
    return tf.cast(tf.reshape(tf.where(is_true), [-1]), tf.int32)


def _precise(dtype: tf.DType) -> tf.DType:
    return tf.float32 if dtype in (tf.float16, tf.bfloat16) else dtype


def _shape_of(variable: tf.Variable) -> Any:
    # A read of the variable would copy a table whose rows have been changed.
    return tf.raw_ops.VariableShape(input=variable.handle, out_type=tf.int64)


def item(rows: Any, place: Any, dtype: tf.DType) -> Any:
    """Returns an item of a TensorList, in the shape in which it was added."""
    return tf.raw_ops.TensorListGetItem(
        input_handle=rows, index=tf.cast(place, tf.int32), element_shape=tf.constant(-1), element_dtype=dtype
    )


def vector_list(vectors: Any) -> Any:
    """Converts vectors, int64 [n, width], to a TensorList."""
    return tf.raw_ops.TensorListFromTensor(tensor=vectors, element_shape=tf.constant([vectors.shape[1]]))


def vectors_of(rows: Any, width: int) -> Any:
    """Converts a TensorList to its vectors, int64 [n, width]."""
    stacked = tf.raw_ops.TensorListStack(
        input_handle=rows, element_shape=tf.constant([width]), element_dtype=tf.int64, num_elements=-1
    )
    return tf.ensure_shape(stacked, [None, width])


def _is_obsolete(pushes: Any, *, may_reject: bool) -> Any:
    """Returns for each row whether its push is obsolete: if it is not accepted yet, it will never be accepted.

    A push of an older connection is rejected once its worker has pushed on a newer connection. If pushes may be
    rejected, a push that is not accepted before its worker's next push will never be accepted. Otherwise, such a push
    may have been accepted after the caller got the accepted ids.
    """
    # `expand_dims` adds fewer operations to a graph than an index does.
    worker, connection, _ = tf.unstack(pushes, axis=1)
    connections = tf.expand_dims(connection, 1)
    is_older = connection > connections
    if may_reject:
        place = tf.range(tf.size(worker))
        is_older |= (connection == connections) & (place > tf.expand_dims(place, 1))
    return tf.reduce_any((worker == tf.expand_dims(worker, 1)) & is_older, 1)


# An entry of the log has a push's id, the version that its gradient was computed on, and two more numbers: in
# `DelayedPushes` the time of the push and its delay, in microseconds; in `PushLog` the number of the range, and 0.
ENTRY_SIZE = PUSH_ID_SIZE + 3
_PULLED_VERSION, _PUSHED_AT, _DELAY = range(PUSH_ID_SIZE, ENTRY_SIZE)
_RANGE = _PUSHED_AT
# The longest delay in seconds, some three thousand years, which fits an int64 in microseconds. Longer delays are cut.
MAX_DELAY = 1e11


class PushLog:
    """The accepted pushes that are in no finished update, in the order of their arrival. No checkpoint contains them.

    The log is created in the strategy's scope. `is_accepted` decides on the home server, under the state's lock,
    whether a push is accepted; see `Accumulating`.
    """

    def __init__(self, state: RuleState, grads_to_wait: int, is_accepted: Callable[[Any, Any], Any]) -> None:
        self._state = state
        self._grads_to_wait = grads_to_wait
        self._is_accepted = is_accepted
        self._ready = self._new_entries()

    def waiting(self) -> Any:
        """Returns the number of gradients that are in no update yet, an int64 scalar. The caller holds the lock."""
        return tf.cast(tf.raw_ops.TensorListLength(input_handle=self._ready.read_value()), tf.int64)

    def add(
        self, push: Any, pulled_version: Any, size: Any, not_finite: Any, number: Any = None
    ) -> tuple[Any, Any, Any]:
        """Logs and counts a push that is on all servers. All arguments are on the home server.

        `pulled_version` is the version that the gradient was computed on. `size` is in bytes; `not_finite` is 1 or 0;
        `number` is the number of the range, None if ranges are not recorded. Returns whether the push is accepted, a
        bool scalar (False for a push of an abandoned call); whether it is refused because its range is committed, a
        bool scalar (None without ranges); and the result of `due`.
        """
        state, pulled_versions = self._state, self._state.workers.pulled_version
        ranges = [] if number is None else [number]
        with state.lock.hold([push, pulled_version, size, not_finite, *ranges]):
            worker, _, _ = tf.unstack(push)
            version, waiting = state.version.read_value(), self.waiting()
            is_own = self._is_own(push)
            accepted = is_own & self._is_accepted(worker, pulled_version)
            is_repeated = None
            if number is not None:
                is_repeated = state.committed.is_committed(number)
                accepted &= ~is_repeated
                state.committed.commit(number, accepted)
            in_flight = tf.where(is_own, tf.constant(NO_STEP, tf.int64), pulled_versions.sparse_read(worker))
            pulled_versions.scatter_nd_update([[worker]], [in_flight])
            # The waiting gradients are applied before this gradient.
            staleness = decisions.staleness(version + waiting // self._grads_to_wait, pulled_version)
            counted = {"bytes_pushed": size, "not_finite": not_finite, "staleness": staleness}
            ready = self._append(self._ready, accepted, push, pulled_version, *ranges, **counted)
            return accepted, is_repeated, self._due(ready, self._grads_to_wait)

    @client_may_call()
    def waiting_ranges(self) -> Any:
        """Returns the numbers of the ranges of the pushes that are in no update yet, int64 [n]."""
        with self._state.lock.hold():
            return _entries(self._ready)[:, _RANGE]

    @client_may_call(tf.TensorSpec([], tf.int32))
    def due(self, minimum: Any) -> Any:
        """Returns all ids, int64 [n, 3], the next update's ids first; n = 0 if fewer than `minimum` are ready."""
        with self._state.lock.hold():
            return self._due(_entries(self._ready), minimum)

    @client_may_call(tf.TensorSpec([None, PUSH_ID_SIZE], tf.int64), tf.TensorSpec([], tf.int32))
    def finish(self, ids: Any, minimum: Any) -> Any:
        """Counts a new update that all servers have made with `ids`, int64 [n, 3], n > 0; returns the next `due`."""
        state = self._state
        with tf.device(state.home):
            ids = tf.identity(ids)
        with state.lock.hold([ids]):
            ready = _entries(self._ready)
            is_open = tf.reduce_any(tf.reduce_all(ready[:1, :PUSH_ID_SIZE] == ids[:1], 1))
            # A flush applies fewer than `grads_to_wait` pushes, and leaves the pushes that came later.
            applied = tf.where(is_open, tf.minimum(tf.shape(ids)[0], self._grads_to_wait), 0)
            self._count_update(tf.cast(is_open, tf.int64), ready[:applied])
            ready = ready[applied:]
            _assign(self._ready, ready)
            return self._due(ready, minimum)

    def _new_entries(self) -> tf.Variable:
        """Creates a variable with an empty list of entries, on the home server."""
        with tf.distribute.get_strategy().extended.colocate_vars_with(self._state.version):
            empty = functools.partial(tf.zeros, [0, ENTRY_SIZE], tf.int64)
            return tf.Variable(lambda: vector_list(empty()), dtype=tf.variant, shape=[], trainable=False)

    def _is_own(self, push: Any) -> Any:
        """Returns False for an abandoned call on a closed connection, which must not count as a call of the worker."""
        worker, connection, _ = tf.unstack(push)
        fence = self._state.workers.fence
        is_own = connection >= fence.sparse_read(worker)
        fence.scatter_nd_max([[worker]], [connection])
        return is_own

    def _append(
        self, log: tf.Variable, accepted: Any, push: Any, pulled_version: Any, *times: Any, **counted: Any
    ) -> Any:
        """Counts a push, and appends it if it is accepted; returns all entries."""
        state, steps = self._state, tf.cast(accepted, tf.int64)
        zeros = [tf.zeros([], tf.int64)] * (ENTRY_SIZE - PUSH_ID_SIZE - 1 - len(times))
        entry = tf.concat([push, tf.stack([pulled_version, *times, *zeros])], 0)
        entries = tf.concat([_entries(log), entry[None][:steps]], 0)
        _assign(log, entries)
        state.advance_clock(push[0], steps)
        state.count(pushes=1, rejected=1 - steps, worker=push[0], steps=steps, **counted)
        return entries

    def _count_update(self, updates: Any, _: Any) -> None:
        self._state.version.assign_add(updates, read_value=False)
        self._state.count(updates=updates)

    def _due(self, ready: Any, minimum: Any, *others: Any) -> Any:
        entries = tf.concat([ready, *others], 0)
        shown = tf.where(decisions.is_complete(tf.shape(ready)[0], minimum), tf.shape(entries)[0], 0)
        return entries[:, :PUSH_ID_SIZE][:shown]


class DelayedPushes(PushLog):
    """A log whose pushes become ready after a delay, and make one update each. `QueuedGradients` saves the log.

    All times are on the home server's clock. Staleness is counted when a gradient is applied. `delay` takes a worker's
    index, an int64 scalar, and the time of a push, a float64 scalar; it returns seconds, a float64 scalar.
    """

    def __init__(self, state: RuleState, delay: Callable[[Any, Any], Any]) -> None:
        super().__init__(state, 1, lambda _, __: tf.constant(True))
        self._delay = delay
        self._delayed = self._new_entries()

    def add(self, push: Any, pulled_version: Any, size: Any, not_finite: Any, _: Any = None) -> tuple[Any, Any, Any]:
        """Adds a push like `PushLog.add`. Two results are None, since there are no ranges and no update becomes due."""
        with tf.control_dependencies([push, pulled_version, size]):
            now = tf.timestamp()
        delay = self._delay(push[0], now)
        with self._state.lock.hold([push, pulled_version, size, not_finite, now, delay]):
            is_own = self._is_own(push)
            times = _microseconds(now), _microseconds(delay)
            counted = {"bytes_pushed": size, "not_finite": not_finite}
            self._append(self._delayed, is_own, push, pulled_version, *times, **counted)
            return is_own, None, None

    @client_may_call(tf.TensorSpec([], tf.bool))
    def release(self, everything: Any) -> Any:
        """Makes the pushes ready whose delay is over, or all pushes (`everything`); returns the result of `due`."""
        with self._state.lock.hold():
            now, delayed = _microseconds(tf.timestamp()), _entries(self._delayed)
            is_over = everything | decisions.is_delay_over(now, delayed[:, _PUSHED_AT], delayed[:, _DELAY])
            ready = tf.concat([_entries(self._ready), tf.boolean_mask(delayed, is_over)], 0)
            _assign(self._ready, ready)
            _assign(self._delayed, tf.boolean_mask(delayed, ~is_over))
            return self._due(ready, 1)

    @client_may_call()
    def entries(self) -> Any:
        """Returns all pushes, the ready pushes first, int64 [n, ENTRY_SIZE]."""
        with self._state.lock.hold():
            return tf.concat([_entries(self._ready), _entries(self._delayed)], 0)

    @client_may_call(tf.TensorSpec([None, ENTRY_SIZE], tf.int64))
    def replace(self, entries: Any) -> None:
        """Replaces all pushes by entries, int64 [n, ENTRY_SIZE]; the next pull makes due entries ready."""
        with self._state.lock.hold([entries]):
            _assign(self._ready, entries[:0])
            _assign(self._delayed, entries)

    def _count_update(self, updates: Any, applied: Any) -> None:
        # `applied` has at most one entry, so the sum is the entry's version or 0.
        pulled_version = tf.reduce_sum(applied[:, _PULLED_VERSION])
        staleness = decisions.staleness(self._state.version.read_value(), pulled_version)
        self._state.version.assign_add(updates, read_value=False)
        self._state.count(updates=updates, staleness=staleness, gradients=updates)

    def _due(self, ready: Any, minimum: Any, *others: Any) -> Any:
        return super()._due(ready, minimum, _entries(self._delayed), *others)


def _microseconds(seconds: Any) -> Any:
    """Converts seconds to int64 microseconds, from 0 to MAX_DELAY; NaN becomes MAX_DELAY."""
    bounded = tf.where(seconds < MAX_DELAY, tf.maximum(seconds, 0), MAX_DELAY)
    return tf.cast(bounded * 1e6, tf.int64)


def _entries(variable: tf.Variable) -> Any:
    return vectors_of(variable.read_value(), ENTRY_SIZE)


def _assign(variable: tf.Variable, entries: Any) -> None:
    variable.assign(vector_list(entries), read_value=False)


# The worker in the ids of restored pushes. A new client numbers its connections from 1 again, so the connections in a
# checkpoint cannot be compared with later connections.
_RESTORED = -1


class QueuedGradients(tf.train.experimental.PythonState):
    """Saves and restores the queue of `Delayed`, whose stores have kinds. Used while no scheduled function runs.

    The queue is restored in its order and with its delays, on any number of servers. Rows are transferred one by one;
    the client holds all rows in memory, in one string. A gradient that some servers apply during the save is left out.
    """

    def __init__(self, pushes: DelayedPushes, stores: Sequence[GradientStore]) -> None:
        self._pushes = pushes
        self._stores = stores
        self._width = stores[0].width

    def serialize(self) -> bytes:
        entries, rows = [], []
        for entry in self._pushes.entries().numpy():
            row = [b""] * self._width
            for store in self._stores:
                strings = store.serialized(entry[:PUSH_ID_SIZE]).numpy()
                if not len(strings):
                    break
                for place, string in zip(store.places, strings, strict=True):
                    row[place] = string
            else:
                entries.append(entry[PUSH_ID_SIZE:])
                rows.append(row)
        buffer = io.BytesIO()
        np.savez(
            buffer,
            entries=np.array(entries, np.int64).reshape(len(rows), ENTRY_SIZE - PUSH_ID_SIZE),
            sizes=np.array([[len(string) for string in row] for row in rows], np.int64).reshape(-1, self._width),
            strings=np.frombuffer(b"".join(string for row in rows for string in row), np.uint8),
        )
        return buffer.getvalue()

    def deserialize(self, string_value: bytes) -> None:
        """Replaces the queue; raises ValueError if the string was saved by a rule for other variables or optimizers."""
        saved = np.load(io.BytesIO(string_value), allow_pickle=False)
        entries, sizes, strings = saved["entries"], saved["sizes"], saved["strings"].tobytes()
        if sizes.shape[1] != self._width:
            raise ValueError(
                f"The checkpoint has queued gradients of {sizes.shape[1]} columns, and this rule's have {self._width}: "
                "it was saved by a rule for other variables, or with another kind of optimizer."
            )
        ids = np.zeros([len(entries), PUSH_ID_SIZE], np.int64)
        ids[:, 0], ids[:, -1] = _RESTORED, np.arange(len(entries))
        for store in self._stores:
            store.clear()
        ends = np.cumsum(sizes).reshape(sizes.shape)
        for push, row_ends, row_sizes in zip(ids, ends, sizes, strict=True):
            row = [strings[end - size : end] for end, size in zip(row_ends, row_sizes, strict=True)]
            for store in self._stores:
                store.add_serialized(push, [row[place] for place in store.places])
        self._pushes.replace(np.concatenate([ids, entries], 1))
