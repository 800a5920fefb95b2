"""Tables among the variables of a rule: they update their rows themselves, by key, on all servers."""

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.keras.internals.parts import variable_of
from coordinator.ps_strategy.tensorflow_internals.table_variable import TableVariable
from coordinator.updates.transport.gradients import value_checks


class TablesOfRule:
    """Finds the tables among a rule's variables, and their gradients among those that are pushed.

    Args:
      variables: of the rule, as given.

    Attributes:
      given: all variables of the rule.
      variables: those that are the `variable` of a table, by their positions.
    """

    def __init__(self, variables: Sequence[Any]) -> None:
        # Here and not in the rule, since TensorFlow would save them with the rule's checkpoints.
        self.given = tuple(variables)
        self.variables: dict[int, TableVariable] = {
            number: variable
            for number, variable in enumerate(map(variable_of, variables))
            if isinstance(variable, TableVariable)
        }

    def others(self, values: Sequence[Any]) -> list[Any]:
        """Returns the variables, or their gradients, that are not of tables."""
        return [value for number, value in enumerate(values) if number not in self.variables]

    def value_checks(self, gradients: Sequence[Any]) -> list[Any]:
        """Returns operations that fail if a gradient of a table, of those of a push, is not finite."""
        given = [(gradients[number], table) for number, table in self.variables.items()]
        return [check for gradient, table in given if gradient is not None for check in value_checks(gradient, table)]

    def apply(self, gradients: Sequence[Any], checks: Sequence[Any], accepted: Any, *, may_reject: bool) -> Any:
        """Applies the gradients of tables if the others were accepted; returns `accepted`.

        Args:
          gradients: those of a push, of all variables; None for a table that the step did not use.
          checks: operations before which nothing is changed.
          accepted: a bool scalar.
          may_reject: whether `accepted` may be False.
        """
        given = [
            (table, gradients[number]) for number, table in self.variables.items() if gradients[number] is not None
        ]

        def apply_all() -> Any:
            with tf.control_dependencies(list(checks)):
                for table, gradient in given:
                    table.apply_gradients(gradient)
            return tf.constant(True)

        if given and may_reject:
            tf.cond(accepted, apply_all, lambda: tf.constant(False))
        elif given:
            apply_all()
        return accepted
