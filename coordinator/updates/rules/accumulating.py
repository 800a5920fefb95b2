"""The rules that collect gradients on the servers and apply the mean of several in one update, and their base class.

worker                     every server                 home
push -- the gradient --->  stored as a row
        then its id ---------------------------------->  accepted or not; the `grads_to_wait`th completes an update
                           the mean is applied     <--  the ids of the update
                                                    -->  version + 1

All servers apply the same updates, each once, even if a worker dies. A server finishes an update that it has begun; the
next worker that pushes, or the client, makes this update on the other servers. A push is in no update before it is
accepted; a push that is never accepted is dropped.

AutoGraph converts the conditions of the methods that user-defined rules override, as in a step. The methods add
operations to the caller's graph, because reads of variables in another function would not wait for the caller's lock.

With `Delayed`, a pushed gradient is applied by the first pull after its delay is over:

worker 0   pull v0 -- push g1                         pull: g1 is due    v1 ...
worker 1   pull v0 ------- push g2     pull v0                  pull: g2 is due    v2 ...
servers               g1   g1 g2       g1 g2          g2

(After the paper "Asynchronous Deep Learning Test-bed to Analyze Gradient Staleness Effect".)
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import tensorflow as tf
from typing_extensions import Unpack

from coordinator.ps_strategy.membership.cluster_definition import MAX_WORKERS
from coordinator.updates import decisions
from coordinator.updates.gradient_store import (
    PUSH_ID_SIZE,
    ChosenRows,
    DelayedPushes,
    GradientStore,
    PushLog,
    QueuedGradients,
)
from coordinator.updates.model import PulledModel, transfer
from coordinator.updates.rule_state import NO_STEP, Gate
from coordinator.updates.settings import BoundedDelaySettings, DelayedSettings, SynchronousSettings
from coordinator.updates.update_rule import CommittedSettings, RoundedSettings, UpdateRule, takes_settings


def decided(method: Callable[[Any, Any], Any], worker: Any, number: Any) -> Any:
    """Returns the decision of `may_begin` or `is_accepted`; raises TypeError if the decision is not a bool scalar."""
    decision = _called(method, worker, number)
    if not _is_like(decision, tf.bool, tf.TensorShape([])):
        raise TypeError(f"{_named(method)} must return a bool scalar, got {decision!r}.")
    return decision


def combined_by(method: Callable[..., Any], variable: tf.Variable, gradients: Any, workers: Any, pulled: Any) -> Any:
    """Returns the result of `combine`; raises TypeError if its dtype or shape is wrong."""
    combined = _called(method, variable, gradients, workers, pulled)
    if not _is_like(combined, gradients.dtype, variable.shape):
        raise TypeError(
            f"{_named(method)} must return {gradients.dtype.name} of shape {variable.shape} for the variable "
            f"{variable.name}, got {combined!r}. `gradients` has one for each push: their first dimension has to go."
        )
    return tf.ensure_shape(combined, variable.shape)


def _called(method: Any, *arguments: Any) -> Any:
    # The library's own decisions have no conditions to convert, which takes longer than tracing them.
    is_own = method.__func__.__module__ == __name__
    result = method(*arguments) if is_own else tf.autograph.to_graph(method.__func__)(method.__self__, *arguments)
    return tf.convert_to_tensor(result) if isinstance(result, bool) else result


def _is_like(value: Any, dtype: tf.DType, shape: tf.TensorShape) -> bool:
    return tf.is_tensor(value) and value.dtype == dtype and value.shape.is_compatible_with(shape)


def _named(method: Any) -> str:
    return f"{type(method.__self__).__name__}.{method.__name__}"


class Accumulating(UpdateRule):
    """Collects gradients on the parameter servers, and applies the mean of every `grads_to_wait` gradients.

    Updates are made one after another, so there is no choice of locking. One push follows each pull, and all pushes
    have gradients for the same variables. `Accumulating` itself accepts each gradient, and makes no worker wait.

    User-defined rules are subclasses that override `may_begin`, `is_accepted` or `combine`. These methods are called
    while a step is traced, and AutoGraph converts their conditions. On the home server, the first two may read
    `self.version`, `self.waiting()`, `self.state.slowest_clock(besides=worker)`, and the rule's own variables there.

    Args:
      optimizer, variables, embeddings, learning_rate, once, require_finite, transfer_dtype, error_feedback: see
        `UpdateRule`.
      grads_to_wait: the number of gradients in an update, at least 1.

    Attributes:
      sends_pulled_values: whether `combine` gets the values that dense gradients were computed on. A subclass may set
        it to True. Then a push is about twice as large.

    Raises:
      ValueError: `grads_to_wait` is not an integer of at least 1; and see `UpdateRule`.
    """

    @takes_settings
    def __init__(
        self, optimizer: Any, variables: Sequence[Any], *, grads_to_wait: int = 1, **settings: Unpack[CommittedSettings]
    ) -> None:
        SynchronousSettings(grads_to_wait)
        super().__init__(optimizer, variables, **settings)
        self._grads_to_wait = grads_to_wait
        self._stores = self._new_stores()
        self._use_state()
        self._strategy.extended.services.add_idle_callback(self._finish_updates)

    def flush(self) -> int:
        """Applies all waiting gradients, even if they are too few or not due yet; called after `strategy.join()`.

        Except with `Delayed`, no checkpoint contains waiting gradients: flush before you save or restore a checkpoint.

        Returns:
          The number of applied gradients.

        Raises:
          StrategyClosedError: the strategy is closed.
          tf.errors.OpError: a parameter server does not answer.
        """
        self._refuse_closed("flush")
        current = self.current
        if current is self:
            return self._make_last_updates()
        return current.flush() if hasattr(current, "flush") else 0

    def settle(self) -> None:
        """Applies all waiting gradients; see `UpdateRule`."""
        self.flush()

    # Overridden by the rules.

    # Whether each push may have other kinds of gradients; see `GradientStore`.
    _has_kinds = False
    # Ids are checked: an update with a wrong id would fail, perhaps in a later step, and only on one server.
    _checks_ids = True

    def may_begin(self, worker: Any, clock: Any) -> Any:
        """Decides whether a worker may begin a step, on the home server, under the lock of the rule's state.

        If a subclass overrides this method, a worker that may not begin asks again. Idle and lost workers do not ask.

        Args:
          worker: the index of the worker, an int64 scalar.
          clock: the number of steps that the worker has finished, an int64 scalar.

        Returns:
          A bool scalar.
        """
        del worker, clock
        return tf.constant(True)

    def is_accepted(self, worker: Any, pulled_version: Any) -> Any:
        """Decides whether a push is accepted, on the home server, under the lock of the rule's state.

        If a subclass overrides this method, `push` may return False; `run` then repeats the step.

        Args:
          worker: the index of the worker that has pushed, an int64 scalar.
          pulled_version: the version that the pushed gradients were computed on, an int64 scalar.

        Returns:
          A bool scalar.
        """
        del worker, pulled_version
        return tf.constant(True)

    def combine(self, variable: tf.Variable, gradients: Any, workers: Any, pulled: Any) -> Any:
        """Returns the gradient of an update, on the server of its variable, under that server's lock.

        Called for each variable, or part of a sharded variable, with dense gradients. `tf.IndexedSlices` are averaged.

        Args:
          variable: the variable, before the update.
          gradients: the gradients of the update's pushes, `[n, *shape]`; float32 if the variable has 16 bits.
          workers: the indices of the workers that have pushed the gradients, int64 [n].
          pulled: the values of the variable that the gradients were computed on, with the shape and dtype of
            `gradients`; None without `sends_pulled_values`.

        Returns:
          A tensor of the shape of the variable. The optimizer applies it.
        """
        del variable, pulled
        return tf.reduce_sum(gradients, 0) / tf.cast(tf.size(workers), gradients.dtype)

    @property
    def may_reject(self) -> bool:
        """Whether `push` may return False, because a subclass overrides `is_accepted`."""
        return type(self).is_accepted is not Accumulating.is_accepted

    @property
    def may_wait(self) -> bool:
        """Whether a step may wait for other workers, or repeats until they have pushed. Such steps are not fused."""
        return self._has_gate or self.may_reject

    @property
    def _has_gate(self) -> bool:
        return type(self).may_begin is not Accumulating.may_begin

    @tf.autograph.experimental.do_not_convert
    def waiting(self) -> Any:
        """Returns the number of accepted gradients that are in no update yet, an int64 scalar; for decisions."""
        return self._log.waiting()

    def _new_log(self) -> PushLog:
        return PushLog(self.state, self._grads_to_wait, self._accepts)

    def _accepts(self, worker: Any, pulled_version: Any) -> Any:
        if self._gate is None:
            return decided(self.is_accepted, worker, pulled_version)
        # This check refuses a push of an abandoned call, which did not wait at the gate.
        is_awaited = self.state.workers.pulled_version.sparse_read(worker) == pulled_version
        return is_awaited & decided(self.is_accepted, worker, pulled_version)

    def _make_last_updates(self) -> int:
        return self._make_updates(1)

    def _push(self, gradients: dict[int, Any], pulled: PulledModel) -> Any:
        if not self._has_kinds:
            self._check_kinds(gradients)
        arrived, stored = self._store(gradients, pulled)
        with tf.device(self.state.home), tf.control_dependencies(stored):
            accepted, is_repeated, ids = self._log.add(*arrived)
        if ids is None:
            return accepted
        made = self._build_updates(ids)

        def drop() -> Any:
            with tf.control_dependencies([store.drop(arrived[0]) for store in self._stores]):
                return tf.constant(True)

        if is_repeated is not None:
            with tf.device(self.state.home):
                made = [made, tf.cond(is_repeated, drop, lambda: tf.constant(False))]
            accepted |= is_repeated
        with tf.control_dependencies(tf.nest.flatten(made)):
            return tf.identity(accepted)

    def _apply_rows(self, store: GradientStore, rows: ChosenRows) -> None:
        *scalars, rate = store.scalars(rows)
        combined = store.combined(rows, functools.partial(combined_by, self.combine))
        self._apply(store.device, combined, scalars, rate)

    def _build_updates(self, ids: Any) -> Any:
        """Makes the update of the pushes `ids`, and all updates that are complete afterwards; returns a dependency."""

        def make_first(ids: Any) -> Any:
            with tf.control_dependencies([store.use_once(ids) for store in self._stores]):
                return self._log.finish(ids, self._grads_to_wait)

        # The loop is on the home server, because an update must not wait for a worker that has been stopped.
        with tf.device(self.state.home):
            return tf.while_loop(
                lambda ids: tf.size(ids) > 0,
                make_first,
                [ids],
                shape_invariants=[tf.TensorShape([None, PUSH_ID_SIZE])],
                parallel_iterations=1,
            )

    def _finish(self) -> None:
        self._make_last_updates()

    def _use_state(self) -> None:
        with self._strategy.scope():
            self._log = self._new_log()
        begins = functools.partial(decided, self.may_begin)
        self._gate = Gate(self._strategy, self.state, begins) if self._has_gate else None
        if self._once is not None:
            self.state.committed.read_waiting = self._log.waiting_ranges

    def _check_kinds(self, gradients: dict[int, Any]) -> None:
        """Raises ValueError if an earlier push has gradients for other variables or of other kinds (dense, sparse)."""
        kinds = {number: isinstance(gradient, tf.IndexedSlices) for number, gradient in gradients.items()}
        earlier = self._stores[0].is_sparse
        if earlier and kinds != earlier:
            names = [
                self._model.variables[number].name
                for number in sorted(kinds.keys() | earlier.keys())
                if kinds.get(number) != earlier.get(number)
            ]
            raise ValueError(
                f"This push and an earlier one differ in which gradients are None or tf.IndexedSlices: those of "
                f"{', '.join(names)}. They cannot have a mean; push zeros, or use a rule for each set of variables."
            )
        earlier.update(kinds)

    def _store(self, gradients: dict[int, Any], pulled: PulledModel) -> tuple[list[Any], list[Any]]:
        """Adds a push to all stores; returns the arguments of `PushLog.add`, on the home server, and the operations."""
        # The push waits for the pull, even if no gradient depends on it. A pull that makes updates takes the same
        # locks. If the push held a lock, it would wait for the pull, which comes first on the same variables.
        with tf.control_dependencies([pulled.version]):
            microseconds = tf.cast(tf.timestamp() * 1e6, tf.int64)
            push = tf.stack([pulled.worker, self._strategy.extended.services.connection_number(), microseconds])
        scalars = [*pulled.scalars, self._optimizer.learning_rate(pulled.scalars, pulled.version)]
        values_of = pulled.values_of(gradients, self._model.variables) if self.sends_pulled_values else {}
        sizes, stored = [], []
        for store in self._stores:
            values = {n: values_of[n] for n in self._model.by_device.get(store.device, ()) if n in values_of}
            extras = [push, *values.values(), *scalars]
            arrived, (push_there, *others), size = self._model.send(store.device, gradients, extras)
            values_there, scalars_there = dict(zip(values, others, strict=False)), others[len(values) :]
            stored.append(store.add(push_there, store.row(arrived, scalars_there, values_there)))
            sizes.append(size)
        ranges = [] if pulled.number is None else [pulled.number]
        entry = [push, pulled.version, tf.add_n(sizes), pulled.not_finite, *ranges]
        return transfer(entry, None, self.state.home)[0], stored

    def _make_updates(self, minimum: int) -> int:
        """Makes the updates that are due, on the client; returns the number of gradients.

        The client calls the servers one after another, because concurrent functions of several servers could deadlock.
        """
        applied = 0
        if not self._has_kinds and not self._stores[0].is_sparse:
            # No push has been traced: there are no rows, and their layout is unknown.
            return 0
        ids = self._log.due(minimum)
        while len(ids):
            # Optimizers need a replica context in the strategy's scope, as in a scheduled function.
            with self._strategy.scope(), tf.distribute.ReplicaContext(self._strategy, 0):
                for store in self._stores:
                    store.use_once(ids)
            applied += min(len(ids), self._grads_to_wait)
            ids = self._log.finish(ids, minimum)
        return applied

    def _finish_updates(self, _: int) -> None:
        """Makes complete updates that an idle or lost worker may have left unfinished."""
        # If a server is down, its rows are lost, too.
        self._make_updates(self._grads_to_wait)

    def _new_stores(self) -> tuple[GradientStore, ...]:
        """Creates a store on each server with variables of the model, and on the server with the optimizer's count."""
        near = {device: self._model.variables[numbers[0]] for device, numbers in self._model.by_device.items()}
        scalars = self._optimizer.scalars
        if scalars:
            near.setdefault(scalars[0].device, scalars[0])
        # One server has the optimizer's count, and counts an update when it makes the update, so that none is missed.
        counting_device = scalars[0].device if scalars else next(iter(near))
        dtypes = [*(scalar.dtype for scalar in scalars), tf.float32]
        is_sparse: dict[int, bool] | None = None if self._has_kinds else {}

        def use(store: GradientStore, rows: ChosenRows) -> None:
            self._apply_rows(store, rows)
            if store.device == counting_device:
                self._optimizer.count()

        new_store = functools.partial(
            GradientStore,
            self._model,
            scalars=dtypes,
            is_sparse=is_sparse,
            update_size=self._grads_to_wait,
            use=use,
            has_pulled=self.sends_pulled_values,
            may_reject=self.may_reject,
        )
        return tuple(new_store(self._lock(device), variable) for device, variable in near.items())


class Synchronous(Accumulating):
    """Applies the mean of `grads_to_wait` gradients of the current model version; rejects gradients of older versions.

    A single process that applies the mean gets the same result, except with `global_clipnorm`, and with `clipnorm` of a
    sharded variable, where each gradient is clipped before the mean. No worker waits. If a gradient is late, or the
    update has enough gradients, `rule.run` repeats the minibatch with the new model. Workers beyond `grads_to_wait` are
    backup workers (Chen et al., arXiv 1604.00981): an update needs only the fastest workers, and a dead worker delays
    no update. A worker may also give several gradients to one update. A gradient whose push returned False is in no
    update. (ElasticDL, "Asynchronous SGD": synchronous mode.)

    Args:
      optimizer, variables, embeddings, learning_rate, once, require_finite, transfer_dtype, error_feedback: see
        `UpdateRule`.
      grads_to_wait: the number of gradients in an update, at least 1.

    Raises:
      ValueError: `grads_to_wait` is not an integer of at least 1; and see `UpdateRule`.
    """

    def is_accepted(self, worker: Any, pulled_version: Any) -> Any:
        """See `Accumulating`."""
        del worker
        return decisions.is_accepted(self.version.read_value(), pulled_version, self.waiting(), self._grads_to_wait)


class BoundedDelay(Accumulating):
    """Lets a worker begin a step only if no gradient can then become more than `max_delay` updates old.

    All steps in flight may overtake a worker that begins a step, and the worker may overtake them. So the worker waits
    until neither its own gradient nor a gradient in flight can come too late. No work is discarded. Other workers wait
    for a slow or dead worker only until the client knows that this worker has no step in flight. (ps-lite's tau: Li et
    al., OSDI'14, "bounded delay".)

    `max_delay=0` is bulk synchronous without rejections. If `grads_to_wait` is the number of workers, all workers
    compute concurrently; if it is 1, they compute one after another. `float("inf")` is asynchronous: no worker waits.

    Args:
      optimizer, variables, embeddings, learning_rate, once, require_finite, transfer_dtype, error_feedback: see
        `UpdateRule`.
      max_delay: the largest number of updates between a gradient's pull and its own update; None sets no limit, which
        is n-softsync (arXiv 1511.05950) with n = workers / grads_to_wait.
      grads_to_wait: the number of gradients in an update, at least 1.

    Raises:
      ValueError: `max_delay` is not an integer of at least 0, `inf` or None; `grads_to_wait` is not an integer of at
        least 1; and see `UpdateRule`.
    """

    @takes_settings
    def __init__(
        self,
        optimizer: Any,
        variables: Sequence[Any],
        *,
        max_delay: float | None,
        grads_to_wait: int = 1,
        **settings: Unpack[CommittedSettings],
    ) -> None:
        self._max_delay = BoundedDelaySettings(max_delay, grads_to_wait).largest_delay
        super().__init__(optimizer, variables, grads_to_wait=grads_to_wait, **settings)

    def may_begin(self, worker: Any, clock: Any) -> Any:
        """See `Accumulating`."""
        del clock
        state = self.state
        version, in_flight = state.version.read_value(), state.workers.pulled_version.read_value()
        is_other = (in_flight != NO_STEP) & (tf.range(MAX_WORKERS, dtype=tf.int64) != worker)
        pushed = version * self._grads_to_wait + self.waiting()
        oldest = tf.reduce_min(tf.where(is_other, tf.minimum(in_flight, version), version))
        before = pushed + tf.math.count_nonzero(is_other)
        return decisions.may_start(before, oldest, self._grads_to_wait, self._max_delay)


class Delayed(Accumulating):
    """Queues gradients on the parameter servers, to study the effect of any staleness.

    A pull first applies all gradients whose delay is over, in the order of their pushes, one update each. Then it pulls
    the model. A gradient that is due later does not block the gradients behind it. A delay of 0 gives the asynchronous
    rule, except for the time between a push and the next pull.

    No queued gradient is lost. The queue is on the servers, so that the worker of a gradient may die. A checkpoint
    contains the queue; delays count from the time of the push. `flush` applies the gradients that are left at the end.

    The staleness of a gradient is counted when the gradient is applied: the version at that time minus the version at
    its pull. All times are read from the home server's clock.

    Args:
      optimizer, variables, embeddings, learning_rate, require_finite, transfer_dtype, error_feedback: see
        `UpdateRule`. A gradient is applied with the learning rate and the count of updates that its step has pulled.
      delay: seconds, or `math.inf` until `flush`; or a function that takes a worker's index, an int64 scalar, and the
        time of the push in seconds since 1970, a float64 scalar, and returns seconds, a scalar. The function is called
        for each push, in a graph: AutoGraph converts its conditions, and random numbers come from `tf.random`. Results
        below 0 count as 0.

    Raises:
      TypeError: `delay` is neither a number nor a function; and see `UpdateRule`.
      ValueError: `delay` is below 0 or not a number; and see `UpdateRule`.
    """

    _has_kinds = True
    _log: DelayedPushes

    @takes_settings
    def __init__(
        self,
        optimizer: Any,
        variables: Sequence[Any],
        *,
        delay: float | Callable[[Any, Any], Any],
        **settings: Unpack[RoundedSettings],
    ) -> None:
        DelayedSettings(delay)
        function = tf.function(delay) if callable(delay) else lambda *_: tf.constant(float(delay), tf.float64)
        self._delay = lambda worker, time: tf.ensure_shape(tf.cast(function(worker, time), tf.float64), [])
        super().__init__(optimizer, variables, grads_to_wait=1, **settings)

    @property
    def may_wait(self) -> bool:
        """True, because a pull applies all gradients that are due, which may be many."""
        return True

    def settle(self) -> None:
        """Does nothing, because queued gradients should stay queued at the end of an epoch."""

    def _begin_step(self) -> Any:
        with tf.control_dependencies(self._build_updates(self._log.release(False))):
            return super()._begin_step()

    def _apply_rows(self, store: GradientStore, rows: ChosenRows) -> None:
        *scalars, rate = store.scalars(rows)
        store.apply_first(rows, lambda n, gradient: self._apply(store.device, {n: gradient}, scalars, rate))

    def _new_log(self) -> DelayedPushes:
        return DelayedPushes(self.state, self._delay)

    def _make_last_updates(self) -> int:
        queued = len(self._log.release(True))
        # The pushes are counted first, because another thread may be finishing some updates of a dead worker.
        super()._make_last_updates()
        return queued

    def _finish(self) -> None:
        super()._finish()
        # Checkpoints of the next rule have no queue.
        del self.state.queued

    def _use_state(self) -> None:
        super()._use_state()
        self.state.queued = QueuedGradients(self._log, self._stores)
