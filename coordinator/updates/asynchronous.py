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

    @property
    def may_wait(self) -> bool:
        """No: every pull gives the model as it is, and every push is taken. A rule made of this one may."""
        return type(self) is not Asynchronous

    def _push(self, gradients: dict[int, Any], pulled: Pulled) -> Any:
        parts, ledger = self._parts, self.ledger
        rate = parts.optimizer.learning_rate(pulled.scalars)
        home = self._send_to(ledger.home, gradients, [*pulled.scalars, rate, pulled.version, pulled.worker])
        *scalars_there, rate_there, version, worker = home.extras
        sizes = [home.size]
        with built() as operations:
            with self._exclusively(ledger.home, home.tensors):
                staleness = decisions.staleness(ledger.version.read_value(), version)
                if self._scale is not None:
                    rate = rate_there = rate_there * tf.cast(self._scale(staleness), tf.float32)
                with built() as applied:
                    self._apply(home, scalars_there, rate_there)
                with ledger.lock.hold(applied):
                    counted = ledger.version.assign_add(1, read_value=False)
                    ledger.note_staleness(staleness)
                    ledger.note_step(worker)
            for device in (part.device for part in parts.model.parts if part.device != ledger.home):
                sent = self._send_to(device, gradients, [*pulled.scalars, rate])
                *scalars_there, rate_there = sent.extras
                with self._exclusively(device, sent.tensors):
                    self._apply(sent, scalars_there, rate_there)
                sizes.append(sent.size)
            # A worker that dies before has not made this update.
            with tf.control_dependencies([counted]):
                parts.optimizer.count()
                ledger.count(updates=1, pushes=1, bytes_pushed=tf.add_n(sizes))
        with tf.control_dependencies(operations):
            return tf.constant(True)
