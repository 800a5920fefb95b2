"""What the rules have in common that collect gradients before they make an update of their mean.

worker                     every server                 home
push -- the gradient --->  added to what waits there
        then the id ---------------------------------->  accepted or not; the `grads_to_wait`th completes an update
                           the update's mean is applied <-- its ids
                                                    -->  version + 1

It promises that all servers make an update of the same gradients, and each makes it once, whenever a worker dies: what
was begun on a server is finished there, what was not begun is done by the next worker that pushes, or by the client.
Until a push is accepted it is in no update; one that never is, is dropped.
"""

import contextlib
import dataclasses
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.failure_table import UNREACHED
from coordinator.updates.committed_pushes import Arrival, CommittedPushes
from coordinator.updates.gradient_columns import GradientColumns
from coordinator.updates.gradient_store import PUSH_ID_SIZE, ChosenRows, GradientStore
from coordinator.updates.parcel import send
from coordinator.updates.pulled import Pulled
from coordinator.updates.sent_gradients import SentGradients
from coordinator.updates.state.server_mutex import Exclusive
from coordinator.updates.update_rule import UpdateRule


@dataclasses.dataclass(frozen=True)
class _Server:
    """What waits on one server, and how it is laid out."""

    store: GradientStore
    columns: Any


@dataclasses.dataclass(frozen=True)
class _Accumulator:
    """What accumulates. TensorFlow does not look into it, so it is no part of a checkpoint.

    Attributes:
      servers: those with variables of the model, and the one with the optimizer's count of updates.
      is_sparse: by the positions of the variables that there are gradients of, whether they are `tf.IndexedSlices`.
        Empty until a push is traced.
      committed: which gradients make the next updates: `CommittedPushes`, or what a rule has in its place.
      complete, use, close: the functions with which the client makes an update; `use` by server.
    """

    servers: Sequence[_Server]
    is_sparse: dict[int, bool]
    committed: Any
    complete: Any
    use: Sequence[Any]
    close: Any


class Accumulating(UpdateRule):
    """Collects gradients on the parameter servers, and applies the mean of each `grads_to_wait` of them.

    Updates are made one after another, so there is nothing to choose about locking. One push belongs to each pull, and
    all pushes have gradients for the same variables: another variable's gradient cannot be None.

    Args:
      optimizer, variables, embeddings, learning_rate: see `UpdateRule`.
      grads_to_wait: how many gradients make an update, at least 1.

    Raises:
      ValueError: `grads_to_wait` is no whole number of at least 1; and see `UpdateRule`.
    """

    def __init__(
        self,
        optimizer: Any,
        variables: Sequence[Any],
        grads_to_wait: int,
        *,
        embeddings: Sequence[Any] = (),
        learning_rate: Any = None,
    ) -> None:
        if isinstance(grads_to_wait, bool) or not isinstance(grads_to_wait, int) or grads_to_wait < 1:
            raise ValueError(f"grads_to_wait must be a whole number of at least 1, got {grads_to_wait!r}.")
        super().__init__(optimizer, variables, embeddings=embeddings, learning_rate=learning_rate)
        self._grads_to_wait = grads_to_wait
        self._accumulator = self._new_accumulator(self._new_servers(), {})
        self._parts.strategy.cluster.when_worker_rests(self._finish_updates)

    def flush(self) -> int:
        """Makes an update of the gradients that wait, though they are too few; to be called after `strategy.join()`.

        What waits is in no checkpoint, so call it before one is saved or restored that is to have everything.

        Returns:
          How many there were.

        Raises:
          StrategyClosedError: the strategy is closed.
          tf.errors.OpError: a parameter server does not answer.
        """
        self._refuse_closed("flush")
        present = self._present()
        if present is self:
            return self._make_last_updates()
        return present.flush() if isinstance(present, Accumulating) else 0

    # What a rule of its own kind overrides.

    def _is_accepted(self, push: Arrival) -> Any:
        """Whether a push is taken, a bool scalar; asked on the home server, under the ledger's lock."""
        raise NotImplementedError

    def _new_columns(self, device: str, scalars: Sequence[tf.DType]) -> Any:
        """How gradients are laid out on a server, as `GradientColumns`."""
        return GradientColumns(self._parts.model, device, scalars)

    def _new_committed(self) -> Any:
        """Which gradients make the next updates; called in the strategy's scope."""
        return CommittedPushes(self.ledger, self._grads_to_wait, self._is_accepted)

    def _make_last_updates(self) -> int:
        """Makes updates of all that waits, on the client; returns of how many gradients."""
        return self._make_updates(1)

    # What they share.

    @property
    def _looks_at_ids(self) -> bool:
        # A row that is no row would fail the update of which it is a part, in a later step perhaps, and on its server.
        return True

    def _push(self, gradients: dict[int, Any], pulled: Pulled) -> Any:
        self._settle_kinds(gradients)
        there, added = self._bring(gradients, pulled)
        with tf.device(self.ledger.home), tf.control_dependencies(added):
            accepted, committed = self._accumulator.committed.commit(*there)
        with tf.control_dependencies(self._build_updates(committed)):
            return tf.identity(accepted)

    def _bring(self, gradients: dict[int, Any], pulled: Pulled) -> tuple[list[Any], list[Any]]:
        """Adds a push to what waits on all servers.

        Returns:
          Its id, the version that it was computed on, and how many bytes it has, on the home server; and what has to be
          done before it may be committed.
        """
        accumulator, parts, home = self._accumulator, self._parts, self.ledger.home
        # Not before the pull, also if no gradient depends on it: a pull that makes updates takes the same locks, and
        # whoever held one here would wait for it, for it comes first on the same variables.
        with tf.control_dependencies([pulled.version]):
            microseconds = tf.cast(tf.timestamp() * 1e6, tf.int64)
            push = tf.stack([pulled.worker, parts.strategy.connection_number(), microseconds])
        scalars = [*pulled.scalars, parts.optimizer.learning_rate(pulled.scalars)]
        sizes, added = [], []
        for server in accumulator.servers:
            sent = self._send_to(server.store.device, gradients, [push, *scalars])
            push_there, *scalars_there = sent.extras
            added.append(server.store.add(push_there, server.columns.row(sent, scalars_there)))
            sizes.append(sent.size)
        return send([push, pulled.version, tf.add_n(sizes)], None, home).tensors, added

    def _build_updates(self, committed: Any) -> Any:
        """Makes the updates of some committed pushes, and of what else is complete by then; returns what comes last."""
        # On the home server, so that an update does not wait for a worker that was stopped on the way.
        with tf.device(self.ledger.home):
            return tf.while_loop(
                lambda committed: tf.size(committed) > 0,
                self._build_update,
                [committed],
                shape_invariants=[tf.TensorShape([None, PUSH_ID_SIZE])],
                parallel_iterations=1,
            )

    def _build_update(self, committed: Any) -> Any:
        """Makes the first update of some committed pushes on all servers; returns those of the next."""
        made = [self._use(server, committed) for server in self._accumulator.servers]
        with tf.control_dependencies(made):
            return self._accumulator.committed.close(committed, self._grads_to_wait)

    def _use(self, server: _Server, committed: Any) -> Any:
        """Makes that update on one server."""
        is_sparse = self._accumulator.is_sparse

        def apply(rows: ChosenRows) -> None:
            self._apply_rows(server, rows)
            if server.store.device == self._counting_device():
                self._parts.optimizer.count()

        return server.store.use_once(committed, server.columns.used(is_sparse), apply)

    def _apply_rows(self, server: _Server, rows: ChosenRows) -> None:
        """Has the optimizer change a server's variables by the mean of some gradients."""
        numbers, gradients = server.columns.mean(rows, self._accumulator.is_sparse)
        *scalars, rate = server.columns.scalars(rows)
        self._apply(SentGradients(server.store.device, numbers, gradients, [], 0), scalars, rate)

    def _counting_device(self) -> str:
        """Where the optimizer counts updates: together with that server's part of them, so that none is missed."""
        scalars = self._parts.optimizer.scalars
        return str(scalars[0].device) if scalars else self._parts.model.parts[0].device

    def _settle_kinds(self, gradients: dict[int, Any]) -> None:
        """Notes which gradients there are, and which are sparse: the rows that wait are all alike."""
        kinds = {number: isinstance(gradient, tf.IndexedSlices) for number, gradient in gradients.items()}
        settled = self._accumulator.is_sparse
        if settled and kinds != settled:
            names = [
                self._parts.model.variables[number].name
                for number in sorted(kinds.keys() | settled.keys())
                if kinds.get(number) != settled.get(number)
            ]
            raise ValueError(
                f"This push and an earlier one differ in which gradients are there or are tf.IndexedSlices: those of "
                f"{', '.join(names)}. They cannot have a mean; push zeros, or use a rule for each set of variables."
            )
        settled.update(kinds)

    def _make_updates(self, least: int) -> int:
        """Makes the updates that wait, on the client; returns of how many gradients.

        A call for each server: functions of several servers that are called at the same time may wait for each other.
        """
        accumulator, made = self._accumulator, 0
        if not self._is_layout_known():
            return 0
        committed = accumulator.complete(tf.constant(least))
        while len(committed):
            for use in accumulator.use:
                use(committed)
            made += min(len(committed), self._grads_to_wait)
            committed = accumulator.close(committed, tf.constant(least))
        return made

    def _is_layout_known(self) -> bool:
        """Whether it is known how the rows that wait are to be read; before a push is traced there are none."""
        return bool(self._accumulator.is_sparse)

    def _finish_updates(self, _: int) -> None:
        """Makes the updates that are complete and that a worker that rests may have left behind when it died."""
        # If a server is away, what waits is gone when it returns.
        with contextlib.suppress(*UNREACHED):
            self._make_updates(self._grads_to_wait)

    def _end(self) -> None:
        self._make_last_updates()

    def _go_on_from(self, rule: UpdateRule) -> None:
        super()._go_on_from(rule)
        self._accumulator = self._new_accumulator(self._accumulator.servers, self._accumulator.is_sparse)

    def _new_servers(self) -> list[_Server]:
        parts = self._parts
        beside = {part.device: parts.model.variables[part.numbers[0]] for part in parts.model.parts}
        scalars = parts.optimizer.scalars
        if scalars:
            beside.setdefault(scalars[0].device, scalars[0])
        dtypes = [*(scalar.dtype for scalar in scalars), tf.float32]
        servers = []
        for device, variable in beside.items():
            lock = parts.locks.get(device) or Exclusive(f"coordinator/updates/{self.ledger.number}/count", device)
            columns = self._new_columns(device, dtypes)
            store = GradientStore(lock, variable, columns.dtypes, self._grads_to_wait, may_reject=self.may_reject)
            servers.append(_Server(store, columns))
        return servers

    def _new_accumulator(self, servers: Sequence[_Server], is_sparse: dict[int, bool]) -> _Accumulator:
        with self._parts.strategy.scope():
            committed = self._new_committed()
        ids, least = tf.TensorSpec([None, PUSH_ID_SIZE], tf.int64), tf.TensorSpec([], tf.int32)
        return _Accumulator(
            servers,
            is_sparse,
            committed,
            tf.function(committed.complete, input_signature=[least], autograph=False),
            [self._use_on_client(server, ids) for server in servers],
            tf.function(committed.close, input_signature=[ids, least], autograph=False),
        )

    def _use_on_client(self, server: _Server, ids: tf.TensorSpec) -> Any:
        strategy = self._parts.strategy

        def use(committed: Any) -> Any:
            # As in a scheduled function: optimizers need it.
            with strategy.scope(), tf.distribute.ReplicaContext(strategy, 0):
                return self._use(server, committed)

        return tf.function(use, input_signature=[ids], autograph=False)
