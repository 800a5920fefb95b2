"""The base of the rules that collect gradients and then apply the mean of several in one update.

worker                     every server                 home
push -- the gradient --->  stored as a row
        then its id ---------------------------------->  accepted or not; the `grads_to_wait`th completes an update
                           the mean is applied     <--  the ids of the update
                                                    -->  version + 1

It promises that all servers apply the same updates, each once, whenever a worker dies: an update that was begun on a
server is finished there; the next worker that pushes, or the client, makes it on the other servers. A push is in no
update before it is accepted; one that never is, is dropped.
"""

import contextlib
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.membership.bounded_calls import UNREACHED
from coordinator.updates.settings import SynchronousSettings
from coordinator.updates.state.gradient_columns import ChosenRows, GradientColumns
from coordinator.updates.state.gradient_store import PUSH_ID_SIZE, GradientStore
from coordinator.updates.state.push_log import PendingPush, PushLog
from coordinator.updates.state.server_mutex import ServerMutex
from coordinator.updates.transport.gradients import SentGradients
from coordinator.updates.transport.model import transfer
from coordinator.updates.transport.pulled_variables import PulledModel
from coordinator.updates.update_rule import UpdateRule


@dataclasses.dataclass(frozen=True)
class _Accumulator:
    """The collected gradients. Not in checkpoints: TensorFlow does not track the attributes of a dataclass.

    Attributes:
      stores: on the servers with variables of the model, and on the one with the optimizer's count of updates.
      is_sparse: by the positions of the variables that have gradients, whether these are `tf.IndexedSlices`. Empty
        until a push is traced.
      log: which gradients make the next updates.
      due, finish, use: functions with which the client makes an update: `log.due`, `log.finish`, and the update of each
        server.
    """

    stores: Sequence[GradientStore]
    is_sparse: dict[int, bool]
    log: PushLog
    due: Any
    finish: Any
    use: Sequence[Any]


class Accumulating(UpdateRule):
    """Collects gradients on the parameter servers, and applies the mean of each `grads_to_wait` of them.

    Updates are made one after another, so there is no choice of locking. Each pull is followed by one push, and all
    pushes have gradients for the same variables.

    Args:
      optimizer, variables, embeddings, learning_rate: see `UpdateRule`.
      grads_to_wait: the number of gradients in an update, at least 1.

    Raises:
      ValueError: `grads_to_wait` is not an integer of at least 1; and see `UpdateRule`.
    """

    def __init__(
        self,
        optimizer: Any,
        variables: Sequence[Any],
        *,
        grads_to_wait: int,
        embeddings: Sequence[Any] = (),
        learning_rate: Any = None,
    ) -> None:
        SynchronousSettings(grads_to_wait)
        super().__init__(optimizer, variables, embeddings=embeddings, learning_rate=learning_rate)
        self._grads_to_wait = grads_to_wait
        self._accumulator = self._new_accumulator(self._new_stores(), {})
        self._parts.strategy.extended.services.add_idle_callback(self._finish_updates)

    def flush(self) -> int:
        """Applies all waiting gradients, though they are too few or due later; called after `strategy.join()`.

        Waiting gradients are in no checkpoint, except those of `Delayed`, so call it before saving or restoring one
        that should be complete.

        Returns:
          The number of gradients.

        Raises:
          StrategyClosedError: the strategy is closed.
          tf.errors.OpError: a parameter server does not answer.
        """
        self._refuse_closed("flush")
        current = self._current()
        if current is self:
            return self._make_last_updates()
        return current.flush() if isinstance(current, Accumulating) else 0

    # Overridden by the rules.

    # Whether each push may have other kinds of gradients; see `GradientColumns`.
    _has_kinds = False
    # A wrong id would fail the update that contains it, perhaps in a later step, and on one server only.
    _checks_ids = True

    def _is_accepted(self, push: PendingPush) -> Any:
        """Decides about a push on the home server, under the state's lock; returns a bool scalar."""
        raise NotImplementedError

    def _new_log(self) -> PushLog:
        """Creates the log of pushes; called in the strategy's scope."""
        return PushLog(self.state, self._grads_to_wait, self._is_accepted)

    def _make_last_updates(self) -> int:
        """Applies all waiting gradients, on the client; returns their number."""
        return self._make_updates(1)

    def _push(self, gradients: dict[int, Any], pulled: PulledModel) -> Any:
        if not self._has_kinds:
            self._check_kinds(gradients)
        arrived, stored = self._store(gradients, pulled)
        with tf.device(self.state.home), tf.control_dependencies(stored):
            accepted, ids = self._accumulator.log.add(*arrived)
        if ids is None:
            return accepted
        with tf.control_dependencies(self._build_updates(ids)):
            return tf.identity(accepted)

    def _apply_rows(self, store: GradientStore, rows: ChosenRows) -> None:
        """Has the optimizer change a server's variables by the mean of some gradients."""
        numbers, gradients = store.columns.mean(rows, self._accumulator.is_sparse)
        *scalars, rate = store.columns.scalars(rows)
        self._apply(SentGradients(store.device, numbers, gradients, [], 0), scalars, rate)

    def _build_updates(self, ids: Any) -> Any:
        """Makes the updates of some accepted pushes, and of those that are complete by then; returns a dependency."""
        # On the home server, so that an update does not wait for a worker that was stopped meanwhile.
        with tf.device(self.state.home):
            return tf.while_loop(
                lambda ids: tf.size(ids) > 0,
                self._build_update,
                [ids],
                shape_invariants=[tf.TensorShape([None, PUSH_ID_SIZE])],
                parallel_iterations=1,
            )

    def _finish(self) -> None:
        self._make_last_updates()

    def _take_over(self, rule: UpdateRule) -> None:
        super()._take_over(rule)
        self._accumulator = self._new_accumulator(self._accumulator.stores, self._accumulator.is_sparse)

    def _check_kinds(self, gradients: dict[int, Any]) -> None:
        """Checks that all pushes have gradients for the same variables, each either dense or sparse."""
        kinds = {number: isinstance(gradient, tf.IndexedSlices) for number, gradient in gradients.items()}
        earlier = self._accumulator.is_sparse
        if earlier and kinds != earlier:
            names = [
                self._parts.model.variables[number].name
                for number in sorted(kinds.keys() | earlier.keys())
                if kinds.get(number) != earlier.get(number)
            ]
            raise ValueError(
                f"This push and an earlier one differ in which gradients are None or tf.IndexedSlices: those of "
                f"{', '.join(names)}. They cannot have a mean; push zeros, or use a rule for each set of variables."
            )
        earlier.update(kinds)

    def _store(self, gradients: dict[int, Any], pulled: PulledModel) -> tuple[list[Any], list[Any]]:
        """Adds a push to the stores of all servers.

        Returns:
          Its id, its pulled version and its size in bytes, on the home server; and the operations that store it.
        """
        accumulator, parts, home = self._accumulator, self._parts, self.state.home
        # After the pull, even if no gradient depends on it: a pull that makes updates takes the same locks. A push that
        # held one of them here would wait for the pull, which comes first on the same variables.
        with tf.control_dependencies([pulled.version]):
            microseconds = tf.cast(tf.timestamp() * 1e6, tf.int64)
            push = tf.stack([pulled.worker, parts.strategy.extended.services.connection_number(), microseconds])
        scalars = [*pulled.scalars, parts.optimizer.learning_rate(pulled.scalars)]
        sizes, stored = [], []
        for store in accumulator.stores:
            sent = self._send_to(store.device, gradients, [push, *scalars])
            push_there, *scalars_there = sent.extras
            stored.append(store.add(push_there, store.columns.row(sent, scalars_there)))
            sizes.append(sent.size)
        return transfer([push, pulled.version, tf.add_n(sizes)], None, home)[0], stored

    def _build_update(self, ids: Any) -> Any:
        """Makes the first update of some accepted pushes on all servers; returns the ids of the next."""
        used = [self._use(store, ids) for store in self._accumulator.stores]
        with tf.control_dependencies(used):
            return self._accumulator.log.finish(ids, self._grads_to_wait)

    def _use(self, store: GradientStore, ids: Any) -> Any:
        """Makes that update on one server."""
        # The optimizer's count is on one server: changed with the update there, so that none is missed.
        scalars = self._parts.optimizer.scalars
        counting_device = scalars[0].device if scalars else next(iter(self._parts.model.by_device))

        def apply(rows: ChosenRows) -> None:
            self._apply_rows(store, rows)
            if store.device == counting_device:
                self._parts.optimizer.count()

        return store.use_once(ids, self._accumulator.is_sparse, apply)

    def _make_updates(self, minimum: int) -> int:
        """Makes the updates that are due, on the client; returns the number of gradients.

        One call per server: concurrent functions of several servers could wait for each other.
        """
        accumulator, applied = self._accumulator, 0
        if not self._has_kinds and not accumulator.is_sparse:
            # No push is traced yet, so there are no rows, and their layout is unknown.
            return 0
        ids = accumulator.due(tf.constant(minimum))
        while len(ids):
            for use in accumulator.use:
                use(ids)
            applied += min(len(ids), self._grads_to_wait)
            ids = accumulator.finish(ids, tf.constant(minimum))
        return applied

    def _finish_updates(self, _: int) -> None:
        """Makes complete updates that a worker, idle now, may have left behind when it died."""
        # If a server is down, its rows are lost with it.
        with contextlib.suppress(*UNREACHED):
            self._make_updates(self._grads_to_wait)

    def _new_stores(self) -> list[GradientStore]:
        parts = self._parts
        beside = {device: parts.model.variables[numbers[0]] for device, numbers in parts.model.by_device.items()}
        scalars = parts.optimizer.scalars
        if scalars:
            beside.setdefault(scalars[0].device, scalars[0])
        dtypes = [*(scalar.dtype for scalar in scalars), tf.float32]
        stores = []
        for device, variable in beside.items():
            lock = parts.locks.get(device) or ServerMutex(f"{parts.key}/count", device)
            columns = GradientColumns(parts.model, device, dtypes, has_kinds=self._has_kinds)
            stores.append(GradientStore(lock, variable, columns, self._grads_to_wait, may_reject=self.may_reject))
        return stores

    def _new_accumulator(self, stores: Sequence[GradientStore], is_sparse: dict[int, bool]) -> _Accumulator:
        strategy = self._parts.strategy
        with strategy.scope():
            log = self._new_log()

        def use_on(store: GradientStore) -> Callable[[Any], Any]:
            def use(ids: Any) -> Any:
                # As in a scheduled function, which optimizers need.
                with strategy.scope(), tf.distribute.ReplicaContext(strategy, 0):
                    return self._use(store, ids)

            return use

        def on_client(function: Any, *signature: tf.TensorSpec) -> Any:
            return tf.function(function, input_signature=signature, autograph=False)

        ids, minimum = tf.TensorSpec([None, PUSH_ID_SIZE], tf.int64), tf.TensorSpec([], tf.int32)
        return _Accumulator(
            stores,
            is_sparse,
            log,
            on_client(log.due, minimum),
            on_client(log.finish, ids, minimum),
            [on_client(use_on(store), ids) for store in stores],
        )
