"""The asynchronous rule: every gradient that is pushed is applied at once (ElasticDL, "Asynchronous SGD")."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from coordinator.updates import decisions
from coordinator.updates.exclusive import built
from coordinator.updates.pulled import Pulled
from coordinator.updates.update_rule import UpdateRule


class Asynchronous(UpdateRule):
    """Applies every gradient as it comes, on whatever the model has become meanwhile.

    With `lr_staleness_modulation` a gradient of staleness s > 0 is applied with the learning rate divided by s
    (arXiv 1511.05950); other gradients that are pushed at the same time are not touched.

    Args:
      optimizer, variables, embeddings, learning_rate: see `UpdateRule`.
      use_locking: True applies one gradient at a time to the variables of a server, its optimizer's slots included.
        False lets updates mix, which loses some where an optimizer reads before it writes.
      lr_staleness_modulation: False; True; or a function that takes the staleness, an int64 scalar, and returns what
        the learning rate is multiplied by. AutoGraph turns its conditions into graph operations.

    Raises:
      TypeError: `lr_staleness_modulation` is something else; and see `UpdateRule`.
    """

    def __init__(
        self,
        optimizer: Any,
        variables: Sequence[Any],
        use_locking: bool = True,
        lr_staleness_modulation: bool | Callable[[Any], Any] = False,
        *,
        embeddings: Sequence[Any] = (),
        learning_rate: Any = None,
    ) -> None:
        if not (isinstance(lr_staleness_modulation, bool) or callable(lr_staleness_modulation)):
            raise TypeError(
                f"lr_staleness_modulation must be True, False or a function of the staleness, got "
                f"{lr_staleness_modulation!r}."
            )
        super().__init__(
            optimizer, variables, embeddings=embeddings, learning_rate=learning_rate, use_locking=use_locking
        )
        scale = decisions.learning_rate_scale if lr_staleness_modulation is True else lr_staleness_modulation or None
        self._scale = tf.function(scale) if scale else None

    def _push(self, gradients: dict[int, Any], pulled: Pulled) -> Any:
        parts, ledger = self._parts, self.ledger
        home = self._send_to(ledger.home, gradients, [*self._known(pulled), pulled.version, pulled.worker])
        *scalars, rate, version, worker = home.extras
        others = [part.device for part in parts.model.parts if part.device != ledger.home]
        sent = (
            []
            if self._scale is not None
            else [self._send_to(device, gradients, self._known(pulled)) for device in others]
        )
        with built() as operations:
            with self._exclusively(ledger.home, home.tensors):
                staleness = decisions.staleness(ledger.version.read_value(), version)
                scale = self._scale_for(staleness)
                with built() as applied:
                    self._apply(home, scalars, rate if scale is None else rate * scale)
                with ledger.lock.hold(applied):
                    counted = ledger.version.assign_add(1, read_value=False)
                    ledger.note_staleness(staleness)
                    ledger.note_step(worker)
            if scale is not None:
                sent = [self._send_to(device, gradients, self._known(pulled, scale)) for device in others]
            for there in sent:
                *scalars, rate = there.extras
                with self._exclusively(there.device, there.tensors):
                    self._apply(there, scalars, rate)
            # A worker that dies before has not made this update.
            with tf.control_dependencies([counted]):
                parts.optimizer.count()
                ledger.count(updates=1, pushes=1, bytes_pushed=tf.add_n([home.size, *(there.size for there in sent)]))
        with tf.control_dependencies(operations):
            return tf.constant(True)

    def _known(self, pulled: Pulled, scale: Any = None) -> list[Any]:
        """What an update needs to know on each server: the optimizer's scalars, and the learning rate."""
        rate = self._parts.optimizer.learning_rate(pulled.scalars)
        return [*pulled.scalars, rate if scale is None else rate * scale]

    def _scale_for(self, staleness: Any) -> Any:
        return None if self._scale is None else tf.cast(self._scale(staleness), tf.float32)
