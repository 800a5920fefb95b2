"""The asynchronous rule: every gradient that is pushed is applied at once (ElasticDL, "Asynchronous SGD")."""

from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from coordinator.updates import decisions
from coordinator.updates.parcel import bytes_of
from coordinator.updates.pulled import Pulled
from coordinator.updates.sent_gradients import SentGradients
from coordinator.updates.state.server_mutex import built
from coordinator.updates.transport.model import flat
from coordinator.updates.update_rule import UpdateRule


class Asynchronous(UpdateRule):
    """Applies every gradient as it comes, on whatever the model has become meanwhile.

    With `lr_staleness_modulation` a gradient of staleness s > 0 is applied with the learning rate divided by s
    (arXiv 1511.05950); other gradients that are pushed at the same time are not touched.

    Args:
      optimizer, variables, embeddings, learning_rate, allow_duplicate_indices: see `UpdateRule`.
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
        allow_duplicate_indices: bool = False,
    ) -> None:
        if not (isinstance(lr_staleness_modulation, bool) or callable(lr_staleness_modulation)):
            raise TypeError(
                f"lr_staleness_modulation must be True, False or a function of the staleness, got "
                f"{lr_staleness_modulation!r}."
            )
        super().__init__(
            optimizer,
            variables,
            embeddings=embeddings,
            learning_rate=learning_rate,
            use_locking=use_locking,
            allow_duplicate_indices=allow_duplicate_indices,
        )
        scale = decisions.learning_rate_scale if lr_staleness_modulation is True else lr_staleness_modulation or None
        self._scale = tf.function(scale) if scale else None

    @property
    def may_wait(self) -> bool:
        """No: every pull gives the model as it is, and every push is taken. A rule made of this one may."""
        return type(self) is not Asynchronous

    @property
    def _is_version_for_all_servers(self) -> bool:
        # An update counts when it is made on the home server, be it made on the others by then or not.
        return False

    def _push(self, gradients: dict[int, Any], pulled: Pulled) -> Any:
        parts, home = self._parts, self.ledger.home
        rate = parts.optimizer.learning_rate(pulled.scalars)
        scalars = [*pulled.scalars, rate]
        others = [part.device for part in parts.model.parts if part.device != home]
        # All that the home server is told goes with its gradients, how much the others are sent as well.
        sent = [*flat(gradients, list(gradients)), *scalars * (1 + len(others)), pulled.version, pulled.worker]
        there = self._send_to(home, gradients, [*scalars, pulled.version, pulled.worker, bytes_of(sent, None)])
        with built() as operations:
            scaled = self._on_its_server(self._update_home, there)
            for device in others:
                sent_there = self._send_to(device, gradients, [*pulled.scalars, scaled if self._scale else rate])
                self._on_its_server(self._update, sent_there)
            # A worker that dies before has not made this update.
            with tf.control_dependencies([scaled]):
                parts.optimizer.count()
        with tf.control_dependencies(operations):
            return tf.constant(True)

    def _update_home(self, sent: SentGradients) -> Any:
        """Changes the variables of the home server, and counts the update; returns the learning rate that it took."""
        ledger = self.ledger
        *scalars, rate, version, worker, size = sent.extras
        with self._exclusively(ledger.home, sent.tensors):
            staleness = decisions.staleness(ledger.version.read_value(), version)
            if self._scale is not None:
                rate = rate * tf.cast(self._scale(staleness), tf.float32)
            with built() as applied:
                self._apply(sent, scalars, rate)
            with tf.control_dependencies(applied):
                counted = ledger.version.assign_add(1, read_value=False)
                ledger.note_step(worker)
        with tf.control_dependencies([counted]):
            ledger.count(updates=1, pushes=1, bytes_pushed=size, staleness=staleness, worker=worker)
            return tf.identity(rate)

    def _update(self, sent: SentGradients) -> None:
        """Changes the variables of another server."""
        *scalars, rate = sent.extras
        with self._exclusively(sent.device, sent.tensors):
            self._apply(sent, scalars, rate)

    def _on_its_server(self, update: Callable[[SentGradients], Any], sent: SentGradients) -> Any:
        """Calls a function in the graph, where gradients were sent to.

        What is locked in a function of its own waits for what uses the same variables; TensorFlow would have locks in
        one function wait for each other, on whatever servers they are.
        """
        with tf.device(sent.device):
            if not self._use_locking:
                return update(sent)
            return tf.function(lambda: update(sent), autograph=False)()
