"""The variables and mutable lookup tables on the parameter servers. `renew` makes them again after a loss.

A variable or table is a Python object that holds the handle of a resource, which is lost with its server. A recovery
keeps the Python object. The recovery gives the handle of a new resource to the object, and to every function that
captured the old handle.

Promise: after `renew`, the restoring of a checkpoint and `initialize_rest`, all variables have the values that a
restarted client would find after restoring that checkpoint. Variables on surviving servers are therefore renewed too.
So a metric whose total and count are on two servers stays consistent, even if no checkpoint contains the metric. The
initial content of a table is its content at the first `note_tables`.
"""

import collections
import contextlib
import itertools
import logging
import threading
import weakref
from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol

import tensorflow as tf

from coordinator.errors import add_note
from coordinator.ps_strategy.sharded.creation import RowsInBlocks
from coordinator.ps_strategy.tensorflow_internals.handles import (
    TableResource,
    TracedFunctions,
    forget_handles,
    is_on_parameter_server,
    new_handle,
    replace_handles,
    set_table_content,
    table_content,
    table_name,
)

_logger = logging.getLogger("coordinator")

# `_MOST_ENTRIES` is the largest initial content of a table that is copied to the client, in entries. `_LARGEST_COPY` is
# the largest array that is kept as an initial value, in bytes.
_MOST_ENTRIES, _LARGEST_COPY = 2**20, 2**20
# The name of a variable's attribute with its initial value, or with the function that returns this value. The function
# for a Keras variable refers to the variable, and would keep the variable alive if it were kept elsewhere.
_INITIAL_VALUE = "_coordinator_initial_value"


class _Table(NamedTuple):
    """A table's resource, its initial content (empty for none), and whether the initial content is known.

    The content is None before `note_tables`. A content that was too large to be copied is not known.
    """

    resource: TableResource
    content: dict[str, Any] | None = None
    is_known: bool = True


class Recovered(Protocol):
    """An object with state on the servers that is no variable or table, or is derived from variables or tables."""

    def recover(self) -> None:
        """Makes the state fit the present values of the variables; called on the client."""


class ClientState:
    """State of an object on the client that belongs to the variables, such as a position in the data.

    The methods do nothing here. A class of a lower layer has methods of these names instead of this base class.
    """

    def serialize(self) -> Any:
        """Returns the state, while no function runs."""

    def deserialize(self, state: Any) -> None:
        """Sets a state that `serialize` has returned."""

    def reset(self) -> None:
        """Sets the initial state; a checkpoint may be restored afterwards."""

    def hold(self) -> None:
        """Makes users of the state wait until `resume`, because the state will be replaced."""

    def resume(self) -> None:
        """Undoes `hold`."""


# The living states, each with the result of its `serialize`.
States = weakref.WeakKeyDictionary[ClientState, Any]


class VariableStore:
    """Weak references to every variable and table on a parameter server. Any thread may call every method.

    `renew` and `initialize_rest` are called while no function runs. `traced` has every function that may have captured
    the handle of a variable or table.
    """

    def __init__(self, traced: TracedFunctions) -> None:
        self._traced = traced
        # The keys are running numbers, in the order of creation, because variables cannot be hashed.
        self._variables: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._numbers = itertools.count()
        self._tables: weakref.WeakKeyDictionary[Any, _Table] = weakref.WeakKeyDictionary()
        self._recovered: weakref.WeakSet[Recovered] = weakref.WeakSet()
        # The resources of deleted tables. They are freed later, because the garbage collector may delete a table on any
        # thread at any time, and must not wait for a server.
        self._deleted: collections.deque[TableResource] = collections.deque()
        self._states: weakref.WeakSet[ClientState] = weakref.WeakSet()
        self._states_lock = threading.Lock()
        self._are_held = False
        self.is_restored = False

    def add(self, variable: Any, initial_value: Any) -> None:
        """Adds a new variable with its constructor's `initial_value`, if it is on a parameter server."""
        if not is_on_parameter_server(variable.device):
            return
        setattr(variable, _INITIAL_VALUE, _repeatable(variable, initial_value))
        self._variables[next(self._numbers)] = variable

    def variables(self) -> list[Any]:
        """Returns the living variables in the order of their creation."""
        # `valuerefs` copies the references in one step, because other threads may be creating variables.
        return [variable for reference in self._variables.valuerefs() if (variable := reference()) is not None]

    def forget(self) -> None:
        """Makes all variables and tables refer to nothing: TensorFlow was reset, and their resources are gone."""
        forget_handles([*self.variables(), *self.tables()])

    @contextlib.contextmanager
    def states_held(self) -> Iterator[None]:
        """A scope in which the client uses no state, because states are reset and then restored."""
        with self._states_lock:
            self._are_held = True
            for state in self._states:
                state.hold()
        try:
            yield
        finally:
            with self._states_lock:
                self._are_held = False
                held = list(self._states)
            for state in held:
                state.resume()

    def copied_states(self) -> "States":
        """Returns the present states; called when no function runs."""
        return weakref.WeakKeyDictionary({state: state.serialize() for state in list(self._states)})

    def add_state(self, state: ClientState) -> None:
        """Adds a state that is rolled back with the variables, by a weak reference. A second call has no effect."""
        with self._states_lock:
            self._states.add(state)
            if self._are_held:
                state.hold()

    def add_recovered(self, recovered: Recovered) -> None:
        """Adds an object with other state on the servers, by a weak reference."""
        self._recovered.add(recovered)

    def add_table(self, table: Any, resource: TableResource, recovered_by: Recovered | None = None) -> None:
        """Adds a mutable table that was just created on a parameter server, and frees deleted tables.

        After a recovery, `recovered_by` fills the table again; by default the table gets its initial content.
        """
        self._tables[table] = _Table(resource, None if recovered_by is None else {})
        if recovered_by is not None:
            self.add_recovered(recovered_by)
        weakref.finalize(table, self._deleted.append, resource).atexit = False
        self._free_deleted()

    def _free_deleted(self) -> None:
        with contextlib.suppress(IndexError):
            while True:
                with contextlib.suppress(tf.errors.OpError):
                    self._deleted.popleft().free()

    def tables(self) -> list[Any]:
        return [table for reference in self._tables.keyrefs() if (table := reference()) is not None]

    def resource_of(self, table: Any) -> TableResource:
        return self._tables[table].resource

    def note_tables(self) -> None:
        """Copies the content of each table that was not noted before; the copy becomes the table's initial content."""
        for table in self.tables():
            if self._tables[table].content is not None:
                continue
            # The recovery reports a lost server.
            with contextlib.suppress(tf.errors.OpError):
                entries = int(table.size())
                content = table_content(table) if 0 < entries <= _MOST_ENTRIES else {}
                self._tables[table] = self._tables[table]._replace(content=content, is_known=entries <= _MOST_ENTRIES)

    def renew(self) -> None:
        """Gives every variable and table a new resource on its server, and every function the new handles.

        Afterwards, variables have no value, tables have their initial content, and states on the client are reset.
        Raises `tf.errors.OpError` if a server does not answer.
        """
        variables, tables = self.variables(), self.tables()
        # All handles are created before the first is replaced, so that none is replaced if a server does not answer.
        renewed = [(variable, new_handle(variable)) for variable in variables]
        for table in tables:
            # If the table were not freed, a surviving server would return the same table, with its content.
            self.resource_of(table).free()
            renewed.append((table, self.resource_of(table).handle()))
        replace_handles(renewed, self._traced)
        self._free_deleted()
        for state in list(self._states):
            state.reset()
        for table in tables:
            if content := self._tables[table].content:
                set_table_content(table, content)

    def initialize_rest(self) -> None:
        """Assigns initial values to variables without a value, warns of empty tables, then calls `Recovered.recover`.

        If the function of a variable raises an error, a note in the error names the variable.
        """
        for variable in self.variables():
            if not variable.is_initialized():
                try:
                    _initialize(variable)
                except Exception as error:
                    add_note(error, f"Raised while the variable {variable.name!r} was initialized again.")
                    raise
        for table in self.tables():
            if not self._tables[table].is_known and not int(table.size()):
                _logger.warning(
                    "The table %r is not in the checkpoint, and its content was too large to be copied: it is empty "
                    "now. Add it to the checkpoint, or fill it in on_rollback.",
                    table_name(table),
                )
        for recovered in list(self._recovered):
            recovered.recover()


def _repeatable(variable: Any, initial_value: Any) -> Any:
    """Returns a function or a small array that gives the initial value again; None if there is none."""
    if initial_value is None or callable(initial_value):
        return initial_value
    if tf.is_symbolic_tensor(initial_value) or variable.dtype in (tf.resource, tf.variant):
        return None
    elements = variable.shape.num_elements()
    if elements is not None and elements * variable.dtype.size > _LARGEST_COPY:
        return None
    with tf.init_scope():
        value = tf.convert_to_tensor(initial_value, variable.dtype).numpy()
    return value.copy() if value.nbytes <= _LARGEST_COPY else None


def _initialize(variable: Any) -> None:
    known = getattr(variable, _INITIAL_VALUE)
    with tf.device(variable.device):
        initial_value = known() if callable(known) else known
        if initial_value is None:
            _logger.warning(
                "The variable %r is not in the checkpoint, and its initial value is no longer known: it is zero now. "
                "Add it to the checkpoint, or create it with a function as its initial value.",
                variable.name,
            )
            # The smallest shape that is compatible with a partly unknown one.
            shape = [] if variable.shape.rank is None else [size or 0 for size in variable.shape]
            initial_value = tf.zeros(shape, variable.dtype)
        variable.assign(initial_value, read_value=False)
        if isinstance(known, RowsInBlocks):
            del initial_value
            known.write(variable)
