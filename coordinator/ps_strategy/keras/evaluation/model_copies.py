"""Copies of a model's variables, on their parameter servers, as they were at one moment."""

from collections.abc import Iterable
from typing import Any

import keras
import tensorflow as tf

from coordinator.ps_strategy.keras.internals.evaluation_scope import stored_variable
from coordinator.ps_strategy.keras.internals.parts import parts_of
from coordinator.ps_strategy.tensorflow_internals.calls import captured_inputs
from coordinator.ps_strategy.tensorflow_internals.handles import is_on_parameter_server, owner_of_handle
from coordinator.ps_strategy.tensorflow_internals.table_variable import TableVariable


class ModelCopies:
    """Variables in which the weights of a model are kept while it is trained on.

    A server shares the memory of both until one of them changes.

    Args:
      model: its weights exist.

    Attributes:
      was_reset: whether a recovery has replaced the copies since they were last taken.

    Raises:
      ValueError: a weight is a table.
    """

    def __init__(self, model: keras.Model) -> None:
        strategy = self._strategy = model.distribute_strategy
        self._originals = {id(each): stored_variable(each) for each in model.weights}
        _refuse_tables(self._originals.values())
        with strategy.scope():
            self._copies = {key: _copy_of(each, strategy) for key, each in self._originals.items()}
        self.was_reset = False
        strategy.extended.services.variables.add_state(self)

    def take(self) -> None:
        """Copies all weights, while no scheduled function runs."""
        with self._strategy.quiet():
            self.was_reset = False
            for key, original in self._originals.items():
                for part, copy in zip(parts_of(original), parts_of(self._copies[key]), strict=True):
                    copy.assign(part, read_value=False)

    def stored(self, variable: keras.Variable) -> Any:
        """Returns the copy of a weight; another variable itself."""
        return self._copies.get(id(variable), stored_variable(variable))

    def check(self, concrete: Any) -> None:
        """Raises ValueError if a function reads a variable or table on a parameter server that has no copy."""
        handles = {id(part.handle) for copy in self._copies.values() for part in parts_of(copy)}
        for captured in captured_inputs(concrete):
            if is_on_parameter_server(captured) and id(captured) not in handles:
                owner = owner_of_handle(captured)
                raise ValueError(
                    f'model_state="snapshot" copies the weights of Keras layers alone, and the model reads '
                    f"{getattr(owner, 'name', owner)!r}, which is none. Leave it out, while nothing is scheduled."
                )

    def reset(self) -> None:
        """Called when all variables were lost."""
        self.was_reset = True

    def hold(self) -> None:
        """Called before that."""

    def resume(self) -> None:
        """Called when the variables have been restored."""


def _refuse_tables(variables: Iterable[Any]) -> None:
    """Raises ValueError if a variable is that of a table, whose rows are elsewhere; a copy would have all of them."""
    tables = [variable.name.partition(":")[0] for variable in variables if isinstance(variable, TableVariable)]
    if tables:
        raise ValueError(
            f'model_state="snapshot" cannot copy the rows of tables, and the model has {", ".join(map(repr, tables))}. '
            "Leave it out, while nothing is scheduled."
        )


def _copy_of(variable: Any, strategy: Any) -> Any:
    with strategy.extended.colocate_vars_with(variable):
        return tf.Variable(
            lambda: tf.zeros(variable.shape, variable.dtype),
            trainable=False,
            dtype=variable.dtype,
            shape=variable.shape,
        )
