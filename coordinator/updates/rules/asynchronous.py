"""The asynchronous rule: every gradient is applied as soon as it is pushed (ElasticDL, "Asynchronous SGD")."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Unpack

import tensorflow as tf

from coordinator.data.epochs import Epochs
from coordinator.ps_strategy.tensorflow_internals.shared_variable import operations_added
from coordinator.updates import decisions
from coordinator.updates.gradients import flat
from coordinator.updates.model import PulledModel, bytes_of
from coordinator.updates.rules.accumulating import Accumulating
from coordinator.updates.settings import AsynchronousSettings
from coordinator.updates.update_rule import RoundedSettings, UpdateRule, takes_settings


class CollectedPushes(Accumulating):
    """The pushes of an asynchronous rule that are stored on all servers before they are applied: none is rejected."""

    def __init__(self, rule: UpdateRule, optimizer: Any, variables: Sequence[Any], **settings: Any) -> None:
        self._may_wait = rule.may_wait
        super().__init__(optimizer, variables, **settings)
        # The dashboard shows the rule, which counts for both.
        self._strategy.extended.services.rules.discard(self)

    @property
    def may_wait(self) -> bool:
        """Whether the rule that stores its pushes here may wait."""
        return self._may_wait


class Asynchronous(UpdateRule):
    """Applies every gradient when it arrives, to the model of that moment.

    With `lr_staleness_modulation=True` a gradient of staleness s > 0 is applied with the learning rate divided by s
    (arXiv 1511.05950); other gradients that are pushed concurrently are not affected.

    Args:
      optimizer, variables, embeddings, learning_rate, allow_duplicate_indices, require_finite, transfer_dtype,
        error_feedback: see `UpdateRule`.
      once: see `UpdateRule`. A push is then stored on all servers, committed, and applied on all. If its worker dies
        after the commit, another one applies it. Always locked, and without modulation.
      use_locking: True applies one gradient at a time to the variables of a server and the optimizer's slots. False
        lets updates interleave, which loses some if an optimizer reads before it writes.
      lr_staleness_modulation: False; True; or a function of the staleness, or of the staleness and the version before
        the update, int64 scalars. It returns the factor of the learning rate; AutoGraph converts its conditions.

    Raises:
      TypeError: `lr_staleness_modulation` is something else; and see `UpdateRule`.
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
        # Set if pushes are stored first. A function, so that TensorFlow does not save the object twice.
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

    # An update is counted when the home server has applied it, which may be before or after the other servers do.
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
        # One message to the home server, with the size of the messages to the others.
        of_push = [pulled.version, pulled.worker, pulled.not_finite]
        sent = [*flat(gradients), *scalars * (1 + len(others)), *of_push]
        extras = [*scalars, *of_push, bytes_of(sent, None)]
        with operations_added() as operations:
            scaled = self._update(home, gradients, extras, self._change_home)
            for device in others:
                extras = [*pulled.scalars, scaled if self._scale else rate]
                self._update(device, gradients, extras, self._change)
            # A worker that dies before this has not made the update.
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
        """Sends gradients to a server, and has `change(device, gradients, extras)` change its variables there.

        TensorFlow would have locks in one function wait for each other, even on different servers. A lock in a separate
        function waits only for what uses the same variables. The server cannot call that function by itself, which
        would be faster to build: an update function may use variables of other servers.
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
        """Opens a scope for changes of a server's variables after some tensors; locked with `use_locking`."""
        if self._use_locking and device in self._model.by_device:
            with self._lock(device).hold(after):
                yield
        else:
            with tf.device(device), tf.control_dependencies(list(after)):
                yield
