"""The stale synchronous rule: workers train on local models that they renew now and then, not too far apart.

step         1               2               3               4 (get_model_frequency = 3)
worker    x <- model      x <- x - g1     x <- x - g2     x <- model
             g1(x)           g2(x)           g3(x)           g4(x)
servers   model - g1      model - g2      model - g3      model - g4

(Stale synchronous parallel, Ho et al., NIPS 2013; in the reading of ElasticDL, "Asynchronous SGD".)
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from coordinator.updates import decisions
from coordinator.updates.pulled import ModelCopies, Pulled
from coordinator.updates.rules.asynchronous import Asynchronous
from coordinator.updates.state.gate import Gate
from coordinator.updates.state.local_model import LocalModel
from coordinator.updates.transport.model import pull
from coordinator.updates.update_rule import UpdateRule


@dataclasses.dataclass(frozen=True)
class _Kept:
    """What each worker keeps. Not in checkpoints: TensorFlow does not look into an object of this kind.

    Attributes:
      model: its copies of the dense variables.
      version: the model version that they were pulled at; a per-worker int64 scalar.
    """

    model: LocalModel
    version: tf.Variable


class StaleSynchronous(Asynchronous):
    """Pulls every few steps; in between, a worker applies its gradients to its own copy as well as pushing them.

    A push is that of `Asynchronous`. The version of a step, which the staleness of its gradients counts from, is that
    of the worker's last pull. A worker that is new or was restarted pulls first. What was restored from a checkpoint,
    or assigned to the model, reaches a worker with its next pull.

    Embeddings are never kept: each step looks up their rows on the parameter servers. Nor are the optimizer's count of
    updates and its learning rate, so that a push is as exact as with `Asynchronous`.

    With `max_lead`, a worker begins a step only when it has finished fewer than so many steps more than the slowest one
    that has steps to do. Nobody waits for one that has none or died; one that returns goes on at the clock of the
    slowest.

    Args:
      optimizer, variables, embeddings, learning_rate: see `UpdateRule`. Each worker has an optimizer of this kind for
        its own copy, with slots of its own and the learning rate of the shared one.
      get_model_frequency: a worker pulls before every so many of its steps; 1 pulls before each.
      max_lead: at least 1, with which the workers go in step; None never waits.
      use_locking, lr_staleness_modulation: see `Asynchronous`; the local copy is changed with the full rate.

    Raises:
      ValueError: `get_model_frequency` is not at least 1, or `max_lead` not at least 1.
      TypeError: they are no integers; and see `Asynchronous`.
    """

    def __init__(
        self,
        optimizer: Any,
        variables: Sequence[Any],
        get_model_frequency: int,
        max_lead: int | None = None,
        *,
        use_locking: bool = True,
        lr_staleness_modulation: bool | Callable[[Any], Any] = False,
        embeddings: Sequence[Any] = (),
        learning_rate: Any = None,
    ) -> None:
        _check("get_model_frequency", get_model_frequency, least=1)
        if max_lead is not None:
            _check("max_lead", max_lead, least=1, because="; with 1 the workers go in step")
        super().__init__(
            optimizer,
            variables,
            use_locking,
            lr_staleness_modulation,
            embeddings=embeddings,
            learning_rate=learning_rate,
        )
        self._frequency = get_model_frequency
        self._max_lead = max_lead
        model = self._parts.model
        version = tf.Variable(
            lambda: tf.zeros([], tf.int64), trainable=False, name="pulled_version", per_worker_variable=True
        )
        self._kept = _Kept(LocalModel(model, model.dense, optimizer, learning_rate), version)
        self._gate = self._new_gate()

    def _begin(self) -> Any:
        return super()._begin() if self._gate is None else self._gate.wait_open()[0]

    def _model_copies(self, version: Any) -> ModelCopies:
        local, optimizer = self._kept.model, self._parts.optimizer
        is_due = tf.function(decisions.is_pull_due)
        # Without a gate, a step that pulls nothing has no need to wait for the version.
        opened = [] if self._gate is None else [version]
        with tf.control_dependencies(opened):
            *values, pulled_version, size, pulls = tf.cond(
                is_due(local.steps.read_value(), self._frequency), lambda: self._pull_all(version), self._read_kept
            )
        scalars, size_of_scalars = pull(optimizer.scalars, opened)
        copies = dict(zip(local.numbers, values, strict=True))
        return ModelCopies(copies, scalars, pulled_version, size + size_of_scalars, pulls)

    def _push(self, gradients: dict[int, Any], pulled: Pulled) -> Any:
        is_accepted = super()._push(gradients, pulled)
        local, parts = self._kept.model, self._parts
        dense = {number: gradient for number, gradient in gradients.items() if number not in parts.model.embeddings}
        with tf.control_dependencies(list(pulled.checks)):
            local.apply(dense, parts.optimizer.learning_rate(pulled.scalars))
            local.steps.assign_add(1, read_value=False)
        return is_accepted

    def _go_on_from(self, rule: UpdateRule) -> None:
        super()._go_on_from(rule)
        self._gate = self._new_gate()

    def _pull_all(self, version: Any) -> list[Any]:
        """Renews what the worker keeps: the dense variables, their version, how many bytes, and 1 for one pull."""
        local = self._kept.model
        values, size = pull([self._parts.model.variables[number] for number in local.numbers], [version])
        local.assign(dict(zip(local.numbers, values, strict=True)))
        local.steps.assign(0, read_value=False)
        self._kept.version.assign(version, read_value=False)
        return [*values, tf.identity(version), size, tf.constant(1, tf.int64)]

    def _read_kept(self) -> list[Any]:
        """The same of what is there, which no bytes were brought for."""
        nothing = tf.constant(0, tf.int64)
        return [*self._kept.model.values().values(), self._kept.version.read_value(), nothing, nothing]

    def _new_gate(self) -> Gate | None:
        ledger, max_lead = self.ledger, self._max_lead
        if max_lead is None:
            return None
        return Gate(
            self._parts.strategy,
            ledger,
            lambda worker, clock: decisions.may_lead(clock, ledger.slowest_clock(besides=worker), max_lead),
        )


def _check(name: str, value: Any, *, least: int, because: str = "") -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be an integer, got {value!r}.")
    if value < least:
        raise ValueError(f"{name} must be at least {least}, got {value}{because}.")
