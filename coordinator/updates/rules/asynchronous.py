"""The rules that apply every gradient as soon as it is pushed (ElasticDL, "Asynchronous SGD").

With `StaleSynchronous`, workers train local models, refresh them every few steps, and do not get too far ahead:

step         1               2               3               4 (get_model_frequency = 3)
worker    x <- model      x <- x - g1     x <- x - g2     x <- model
             g1(x)           g2(x)           g3(x)           g4(x)
servers   model - g1      model - g2      model - g3      model - g4

(Stale synchronous parallel, Ho et al., NIPS 2013; as ElasticDL, "Asynchronous SGD", describes it.)
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from typing_extensions import Unpack

from coordinator.data.epochs import Epochs
from coordinator.ps_strategy.tensorflow_internals.shared_variable import operations_added
from coordinator.updates import decisions
from coordinator.updates.gradients import flat
from coordinator.updates.model import LocalModel, PulledModel, bytes_of, restored
from coordinator.updates.rule_state import Gate
from coordinator.updates.rules.accumulating import Accumulating
from coordinator.updates.settings import AsynchronousSettings, StaleSynchronousSettings
from coordinator.updates.update_rule import CommittedSettings, RoundedSettings, UpdateRule, takes_settings


class CollectedPushes(Accumulating):
    """The pushes of an asynchronous rule that all servers store before they are applied. No push is rejected."""

    def __init__(self, rule: UpdateRule, optimizer: Any, variables: Sequence[Any], **settings: Any) -> None:
        self._may_wait = rule.may_wait
        super().__init__(optimizer, variables, **settings)
        # The dashboard shows only the asynchronous rule, which has the same state and counts as this object.
        self._strategy.extended.services.rules.discard(self)

    @property
    def may_wait(self) -> bool:
        return self._may_wait


class Asynchronous(UpdateRule):
    """Applies every gradient as soon as it arrives, to the current model.

    With `lr_staleness_modulation=True` a gradient of staleness s > 0 is applied with the learning rate divided by s
    (arXiv 1511.05950); other gradients that are pushed concurrently are not affected.

    Args:
      optimizer, variables, embeddings, learning_rate: see `UpdateRule`.
      allow_duplicate_indices, require_finite, transfer_dtype, error_feedback: see `UpdateRule`.
      once: see `UpdateRule`. A push is then stored on all servers, committed, and applied on all servers. If its worker
        dies after the commit, another worker applies the push. Pushes are always locked, and not modulated.
      use_locking: True applies one gradient at a time to the variables of a server and the optimizer's slots. False
        lets updates interleave. Updates may be lost if an optimizer reads before it writes.
      lr_staleness_modulation: False; True; or a function of the staleness, or of the staleness and the version before
        the update, int64 scalars. It returns the factor of the learning rate; AutoGraph converts its conditions.

    Raises:
      TypeError: `lr_staleness_modulation` has another type; and see `UpdateRule`.
    """

    @takes_settings
    def __init__(
        self,
        optimizer: Any,
        variables: Sequence[Any],
        *,
        use_locking: bool = True,
        lr_staleness_modulation: bool | Callable[..., Any] = False,
        allow_duplicate_indices: bool = False,
        once: Epochs | None = None,
        **settings: Unpack[RoundedSettings],
    ) -> None:
        scale = AsynchronousSettings(lr_staleness_modulation).learning_rate_scale
        super().__init__(optimizer, variables, allow_duplicate_indices=allow_duplicate_indices, **settings)
        self._use_locking = use_locking
        self._scale = tf.function(scale) if scale else None
        # Returns `CollectedPushes` if pushes are stored first. TensorFlow would save an object in an attribute twice.
        self._collected: Callable[[], CollectedPushes] | None = None
        if once is not None or self._grads_to_wait > 1:
            if scale is not None or not use_locking:
                raise ValueError(
                    "lr_staleness_modulation and use_locking=False cannot be combined with once= or with grads_to_wait "
                    "above 1: stored gradients are applied later, perhaps by another worker, one update at a time."
                )
            # This rule checks and rounds gradients before the push is stored.
            same = {name: settings.get(name) for name in ("embeddings", "learning_rate")}
            collected = CollectedPushes(
                self, optimizer, variables, once=once, grads_to_wait=self._grads_to_wait, **same
            )
            self._collected = lambda: collected
            self.state = collected.state

    # The home server counts an update when it has applied the update, before or after the other servers.
    _pulls_after_version = False
    # The number of gradients in an update. A subclass may set it before it calls `__init__`.
    _grads_to_wait = 1

    @property
    def may_wait(self) -> bool:
        """False for this rule, whose pulls and pushes never wait; True for subclasses."""
        return type(self) is not Asynchronous

    @property
    def _checks_ids(self) -> bool:  # type: ignore[override]
        return self._collected is not None

    def _push(self, gradients: dict[int, Any], pulled: PulledModel) -> Any:
        if self._collected is not None:
            return self._collected()._push(gradients, pulled)
        home = self.state.home
        rate = self._optimizer.learning_rate(pulled.scalars, pulled.version)
        scalars = [*pulled.scalars, rate]
        others = [device for device in self._model.by_device if device != home]
        # The home server gets one message, with the size of the messages to the other servers.
        of_push = [pulled.version, pulled.worker, pulled.not_finite]
        sent = [*flat(gradients), *scalars * (1 + len(others)), *of_push]
        extras = [*scalars, *of_push, bytes_of(sent, None)]
        with operations_added() as operations:
            scaled = self._update(home, gradients, extras, self._change_home)
            for device in others:
                extras = [*pulled.scalars, scaled if self._scale else rate]
                self._update(device, gradients, extras, self._change)
            # The home server makes the update before the optimizer counts it, because the worker may die in between.
            with tf.control_dependencies([scaled]):
                self._optimizer.count()
        with tf.control_dependencies(operations):
            return tf.constant(True)

    def _finish(self) -> None:
        if self._collected is not None:
            self._collected()._finish()

    def _use_state(self) -> None:
        if self._collected is not None:
            collected = self._collected()
            collected.state = self.state
            collected._use_state()

    def _update(self, device: str, gradients: dict[int, Any], extras: Sequence[Any], change: Callable[..., Any]) -> Any:
        """Sends gradients to a server, where `change(device, gradients, extras)` changes the server's variables.

        In one function, TensorFlow would make locks wait for each other, even on different servers. A lock in a
        separate function waits only for operations on the same variables. The server cannot call that function by
        itself, which would be faster to build, because an update function may use variables of other servers.
        """
        arrived, extras_there, _ = self._model.send(device, gradients, extras)
        with tf.device(device):
            if not self._use_locking:
                return change(device, arrived, extras_there)
            return tf.function(lambda: change(device, arrived, extras_there), autograph=False)()

    def _change_home(self, device: str, gradients: dict[int, Any], extras: Sequence[Any]) -> Any:
        """Changes the home server's variables, and counts the update; returns the learning rate used."""
        state = self.state
        *scalars, rate, version, worker, not_finite, size = extras
        with self._locked(device, [*flat(gradients), *extras]):
            before = state.version.read_value()
            staleness = decisions.staleness(before, version)
            if self._scale is not None:
                rate = rate * tf.cast(self._scale(staleness, before), tf.float32)
            with operations_added() as applied:
                self._apply(device, gradients, scalars, rate)
            with tf.control_dependencies(applied):
                counted = state.version.assign_add(1, read_value=False)
                state.advance_clock(worker)
        with tf.control_dependencies([counted]):
            of_push = {"bytes_pushed": size, "not_finite": not_finite, "staleness": staleness}
            state.count(updates=1, pushes=1, worker=worker, **of_push)
            return tf.identity(rate)

    def _change(self, device: str, gradients: dict[int, Any], extras: Sequence[Any]) -> None:
        *scalars, rate = extras
        with self._locked(device, [*flat(gradients), *extras]):
            self._apply(device, gradients, scalars, rate)

    @contextlib.contextmanager
    def _locked(self, device: str, after: Sequence[Any]) -> Iterator[None]:
        """Opens a scope for changes of a server's variables after `after` is available; locked with `use_locking`."""
        if self._use_locking and device in self._model.by_device:
            with self._lock(device).hold(after):
                yield
        else:
            with tf.device(device), tf.control_dependencies(list(after)):
                yield


class StaleSynchronous(Asynchronous):
    """Pulls every few steps. In between, a worker pushes its gradients, and also applies them to its own copy.

    A push does what a push of `Asynchronous` does. The staleness of a step's gradients counts from the worker's last
    pull. A new or restarted worker pulls first. Values that were restored from a checkpoint, or assigned to the model,
    reach a worker with its next pull.

    Workers have no copies of embeddings: each step looks up their rows on the parameter servers. Workers have no copies
    of the optimizer's count of updates and learning rate either, so a push is as exact as with `Asynchronous`.

    With `max_lead`, a worker begins a step only if it is fewer than `max_lead` steps ahead of the slowest worker that
    has steps to do. Idle and dead workers hold up nobody. A worker that returns continues at the clock of the slowest
    worker, or, if no other worker is active, at the greatest clock of all workers.

    Args:
      optimizer, variables, embeddings, learning_rate, require_finite, transfer_dtype, error_feedback: see `UpdateRule`.
        Each worker has an optimizer of this kind for its copy, with its own slots and the shared learning rate.
      get_model_frequency: a worker pulls once in this number of steps; with 1, it pulls before each step.
      max_lead: the largest lead, at least 1. With 1, the workers run in lockstep; with None, no worker waits.
      grads_to_wait: the number of gradients in an update of the shared model, which applies their mean; each worker
        still applies its own gradients to its copy. Above 1, `flush` applies the gradients that are left at the end,
        and modulation is not allowed.
      use_locking, lr_staleness_modulation, once: see `Asynchronous`. The local copy is changed with the full rate.

    Raises:
      ValueError: `get_model_frequency`, `max_lead` or `grads_to_wait` is not at least 1.
      TypeError: one of them is not an integer; and see `Asynchronous`.
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
