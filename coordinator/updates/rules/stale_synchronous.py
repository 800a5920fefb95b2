"""The stale synchronous rule: workers train local models that they refresh now and then, not too far apart.

step         1               2               3               4 (get_model_frequency = 3)
worker    x <- model      x <- x - g1     x <- x - g2     x <- model
             g1(x)           g2(x)           g3(x)           g4(x)
servers   model - g1      model - g2      model - g3      model - g4

(Stale synchronous parallel, Ho et al., NIPS 2013; as ElasticDL, "Asynchronous SGD", describes it.)
"""

from collections.abc import Callable, Sequence
from typing import Any, Unpack

import tensorflow as tf

from coordinator.updates import decisions
from coordinator.updates.model import LocalModel, PulledModel, restored
from coordinator.updates.rule_state import Gate
from coordinator.updates.rules.accumulating import Accumulating
from coordinator.updates.rules.asynchronous import Asynchronous
from coordinator.updates.settings import StaleSynchronousSettings
from coordinator.updates.update_rule import CommittedSettings, takes_settings


class StaleSynchronous(Asynchronous):
    """Pulls every few steps; in between, a worker applies its gradients to its own copy as well as pushing them.

    A push does what a push of `Asynchronous` does. The staleness of a step's gradients counts from the worker's last
    pull. A new or restarted worker pulls first. Values that were restored from a checkpoint, or assigned to the model,
    reach a worker with its next pull.

    Embeddings have no local copies: each step looks up their rows on the parameter servers. The optimizer's count of
    updates and its learning rate have none either, so a push is as exact as with `Asynchronous`.

    With `max_lead`, a worker begins a step only if it is fewer than `max_lead` steps ahead of the slowest worker that
    has steps to do; idle and dead workers hold up nobody. A worker that returns continues at the clock of the slowest
    worker. The first of all workers continues at the greatest clock.

    Args:
      optimizer, variables, embeddings, learning_rate, require_finite, transfer_dtype, error_feedback: see `UpdateRule`.
        Each worker has an optimizer of this kind for its copy, with its own slots and the shared learning rate.
      get_model_frequency: a worker pulls once in this number of steps; 1 pulls before each.
      max_lead: at least 1, with which the workers run in lockstep; None never waits.
      grads_to_wait: the number of gradients in an update of the shared model, which applies their mean; each worker
        still applies its own gradients to its copy. Above 1, `flush` applies the gradients that are left at the end,
        and modulation is not allowed.
      use_locking, lr_staleness_modulation, once: see `Asynchronous`; the local copy is changed with the full rate.

    Raises:
      ValueError: `get_model_frequency`, `max_lead` or `grads_to_wait` is not at least 1.
      TypeError: they are not integers; and see `Asynchronous`.
    """

    @takes_settings
    def __init__(
        self,
        optimizer: Any,
        variables: Sequence[Any],
        *,
        get_model_frequency: int,
        max_lead: int | None = None,
        grads_to_wait: int = 1,
        use_locking: bool = True,
        lr_staleness_modulation: bool | Callable[..., Any] = False,
        **settings: Unpack[CommittedSettings],
    ) -> None:
        StaleSynchronousSettings(get_model_frequency, max_lead, lr_staleness_modulation, grads_to_wait)
        self._grads_to_wait = grads_to_wait
        super().__init__(
            optimizer, variables, use_locking=use_locking, lr_staleness_modulation=lr_staleness_modulation, **settings
        )
        self._frequency = get_model_frequency
        self._max_lead = max_lead
        self._local = LocalModel(self._model, self._optimizer)
        self._use_state()

    flush = Accumulating.flush
    settle = Accumulating.settle

    def _make_last_updates(self) -> int:
        return self._collected().flush() if self._collected is not None else 0

    def _use_state(self) -> None:
        super()._use_state()
        state, max_lead = self.state, self._max_lead
        self._gate = None
        if max_lead is not None:
            self._gate = Gate(
                self._strategy,
                state,
                lambda worker, clock: decisions.may_lead(clock, state.slowest_clock(besides=worker), max_lead),
            )

    def _pull_model(self, version: Any) -> PulledModel:
        local, optimizer = self._local, self._optimizer
        is_due = tf.function(decisions.is_pull_due)

        def pull_all() -> list[Any]:
            """Refreshes the local copies; returns the dense variables, their version, the size in bytes, and 1 pull."""
            variables = [self._model.variables[number] for number in local.numbers]
            values, size = self._model.pull(variables, [version])
            local.assign(values)
            local.steps.assign(0, read_value=False)
            local.version.assign(version, read_value=False)
            return [*values, tf.identity(version), size, tf.constant(1, tf.int64)]

        # Without a gate, a step that pulls nothing need not wait for the version.
        opened = [] if self._gate is None else [version]
        with tf.control_dependencies(opened):
            *values, pulled_version, size, pulls = tf.cond(
                is_due(local.steps.read_value(), self._frequency),
                pull_all,
                lambda: [*local.values(), local.version.read_value(), *[tf.constant(0, tf.int64)] * 2],
            )
        scalars, size_of_scalars = self._model.pull(optimizer.scalars, opened)
        copies = dict(zip(local.numbers, values, strict=True))
        return PulledModel(pulled_version, scalars, copies, size + size_of_scalars, pulls)

    def _push(self, gradients: dict[int, Any], pulled: PulledModel) -> Any:
        is_accepted = super()._push(gradients, pulled)
        local, model = self._local, self._model
        dense = {
            number: restored(gradient, model.variables[number])
            for number, gradient in gradients.items()
            if number not in model.embeddings
        }
        with tf.control_dependencies(list(pulled.checks)):
            local.apply(dense, self._optimizer.learning_rate(pulled.scalars, pulled.version))
            local.steps.assign_add(1, read_value=False)
        return is_accepted
