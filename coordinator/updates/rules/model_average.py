r"""Model averaging: every worker trains its own model, which takes part in the mean of all models meanwhile (Bagua).

worker   x0 ---- gradients of x0 ------------------------.  x = mean + (x - x0), then the worker's own optimizer
            \                                           /
servers      '-> x0 - base: stored, counted; the mean --'   mean += (x0 - base) / workers; base = mean
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf

from coordinator.ps_strategy.tensorflow_internals.server_mutex import operations_added
from coordinator.updates import decisions
from coordinator.updates.rules.asynchronous import Asynchronous
from coordinator.updates.settings import ModelAverageSettings
from coordinator.updates.state.averaging_control import AveragingControl
from coordinator.updates.state.local_model import AveragedModel
from coordinator.updates.state.model_mean import ModelMean
from coordinator.updates.transport.model import bytes_of, pull, transfer
from coordinator.updates.transport.pulled_variables import PulledModel
from coordinator.workers.worker import WorkerState

# How often a worker that joins asks for a mean that is of one moment on all servers.
_MOST_REQUESTS = 100


class _Answer(NamedTuple):
    """What the servers answer to a worker, all on the worker.

    Attributes:
      mean: in the order of the worker's variables.
      is_of_moment: whether it has the same changes on all servers, a bool scalar.
      is_counted: whether the worker's change is counted, a bool scalar.
      version: of the shared model, an int64 scalar; None if no update was counted.
    """

    mean: Sequence[Any]
    is_of_moment: Any
    is_counted: Any
    version: Any


class ModelAverage(Asynchronous):
    """Every worker trains its own model; while a gradient is computed, the model is averaged with all others.

    A step reads the worker's own dense variables, x0. While its gradients are computed, what the worker has changed
    since its last averaging is added to the mean of all models, divided by the number of workers, and the mean is
    returned. The worker's model becomes mean + (model - x0), and its own optimizer applies the gradients to it. No
    worker ever waits for another. (Bagua, Gan et al. 2021, "Asynchronous Model Average".)

    Nothing that a worker has learned is averaged away. On all servers, whatever workers do at the same time:

        mean after - mean before = sum of all changes that workers have made to their models / number of workers

    Each change is divided by the number of workers that train when it is counted. It is counted once, also if a call is
    cut off and repeated. `abort` adds the latest changes of all workers. A worker that dies loses what it has changed
    since its last averaging.

    A step reads a model of one moment: the means that it was moved to have the same changes on all servers.

    The mean is also assigned to the shared variables, so that every reader, evaluation or checkpoint gets a recent
    mean, on two servers perhaps of two moments; after `abort`, the exact one. An averaging is one update of the model's
    version, and its staleness the number of updates since the worker's previous averaging. The optimizer's `iterations`
    counts every gradient, as with the other rules, and a schedule follows it; slots and bias corrections are the
    worker's.

    A worker that joins, or was restarted, begins with the mean, which does not change by that. From then on it is one
    of the workers by whose number changes are divided, until it is lost, or is idle while the others average about 10
    times each. After a parameter server was lost, all workers begin with the restored values. To return to a checkpoint
    during training, restore it between `abort` and `resume`.

    Embeddings have no local copies: their gradients are pushed as with `Asynchronous`, each as a separate update.

    Nothing is rounded, whatever `Options.transfer_dtype` is: a model, unlike a gradient, would lose with each averaging
    all changes that are smaller than its rounding.

    Args:
      optimizer, variables, embeddings, learning_rate, require_finite: see `UpdateRule`.
      use_locking: see `Asynchronous`; for the gradients of embeddings.
      period: the least time between two averagings of one worker, in seconds; 0 averages with every step.
      warmup_steps: until a worker has finished this number of steps, including those with an earlier rule or before a
        restart, all workers train the shared model as with `Asynchronous` (where Bagua's workers reduce their gradients
        synchronously).

    Raises:
      ValueError: `period` or `warmup_steps` is negative, or all variables are embeddings.
      TypeError: they are not numbers; and see `UpdateRule`.
    """

    def __init__(
        self,
        optimizer: Any,
        variables: Sequence[Any],
        *,
        period: float = 0.0,
        warmup_steps: int = 0,
        embeddings: Sequence[Any] | None = None,
        learning_rate: Any = None,
        use_locking: bool = True,
        require_finite: bool = False,
    ) -> None:
        ModelAverageSettings(period, warmup_steps)
        super().__init__(
            optimizer,
            variables,
            use_locking=use_locking,
            embeddings=embeddings,
            learning_rate=learning_rate,
            require_finite=require_finite,
            transfer_dtype=tf.float32,
        )
        self._period = float(period)
        self._warmup_steps = warmup_steps
        if not self._model.dense:
            raise ValueError(
                "ModelAverage has nothing to average: all of its variables are embeddings. With embeddings=() "
                "it averages them as a whole."
            )
        self._own = AveragedModel(self._model, self._optimizer, f"{self._key}/own_model")
        # On each parameter server that has a part of the shared model.
        self._means = tuple(self._new_means())
        self._control = AveragingControl(self.state.version, f"{self._key}/averaging")
        self._bring = tf.function(self._build_bringing, autograph=False)
        self._strategy.extended.services.add_idle_callback(self._leave_out)

    def abort(self, timeout: float | None = None) -> None:
        """Stops averaging, and makes all models the mean, with all that workers have changed.

        Waits until all scheduled functions have finished; nothing may be scheduled meanwhile. Workers take the mean
        with their next step. Until `resume`, further training stays local; another `abort` averages it.

        Args:
          timeout: in seconds, as in `strategy.join`.

        Raises:
          TimeoutError: the scheduled functions have not finished in time.
          StrategyClosedError: the strategy is closed.
          Exception: what `strategy.join` raises.
        """
        self._refuse_closed("abort")
        self._strategy.join(timeout)
        current = self.current
        if current is self:
            self._finish()
        elif isinstance(current, ModelAverage):
            current.abort()

    def resume(self) -> None:
        """Resumes averaging after `abort`.

        Raises:
          StrategyClosedError: the strategy is closed.
        """
        self._refuse_closed("resume")
        current = self.current
        if current is self:
            self._control.switch(is_on=True)
        elif isinstance(current, ModelAverage):
            current.resume()

    def settle(self) -> None:
        """See `UpdateRule`: makes all models the exact mean."""
        self.abort()
        self.resume()

    def _begin_step(self) -> Any:
        # One message, if both are on one server as usual.
        return tf.unstack(self._control.read([self.state.version]))

    def _pull_model(self, begun: Any) -> PulledModel:
        own = self._own
        generation, is_on, version = begun
        is_on = is_on > 0
        is_warming_up, clock = self._warm_up()
        is_current, averaged_at = own.is_of(generation), own.averaged_at.read_value()
        with tf.control_dependencies([averaged_at]):
            now = tf.timestamp()
        *values, size, pulls = tf.cond(
            is_current,
            lambda: [*own.read(), *[tf.constant(0, tf.int64)] * 2],
            lambda: self._take_model(is_warming_up, generation, version, now),
        )
        # The absolute value: a worker whose clock is set back must not wait until it shows that time again.
        since = tf.where(is_current, tf.abs(now - averaged_at), tf.zeros_like(now))
        is_due = tf.function(decisions.is_average_due)(since, self._period, clock, self._warmup_steps)
        is_due = tf.logical_and(is_on, is_due)
        received = tf.cond(is_due, lambda: self._average(values, generation, now), lambda: tf.constant(0, tf.int64))
        scalars, size_of_scalars = pull(self._optimizer.scalars, [])
        return PulledModel(
            tf.identity(version),
            scalars,
            dict(zip(own.numbers, values, strict=True)),
            size + received + size_of_scalars,
            pulls + tf.cast(is_due, tf.int64),
            rule_data=(is_warming_up, received),
        )

    def _push(self, gradients: dict[int, Any], pulled: PulledModel) -> Any:
        if pulled.rule_data is None:
            raise ValueError(
                "The model was pulled in another function. With ModelAverage, rule.pull() and rule.push() are used in "
                "one function, or push in a function inside of it."
            )
        is_warming_up, _ = pulled.rule_data
        if not self._warmup_steps:
            return self._push_own(gradients, pulled)
        return tf.cond(
            is_warming_up,
            lambda: self._push_shared(gradients, pulled),
            lambda: self._push_own(gradients, pulled),
        )

    def _finish(self) -> None:
        self._control.switch(is_on=False)
        if self._control.gather(self._strategy, self._bring):
            self.state.version.assign_add(1, read_value=False)
            self.state.count(updates=1)

    def _apply(self, device: str, gradients: dict[int, Any], scalars: Sequence[Any], rate: Any) -> None:
        mean = next((each for each in self._means if each.device == device), None)
        if mean is None or gradients.keys().isdisjoint(mean.numbers):
            super()._apply(device, gradients, scalars, rate)
            return
        # A push of the warm-up. Some workers may have models of their own already, so it is always locked.
        with contextlib.nullcontext() if self._use_locking else self._lock(device).hold(), mean.following():
            super()._apply(device, gradients, scalars, rate)

    def _new_means(self) -> Iterator[ModelMean]:
        model = self._model
        for device, all_numbers in model.by_device.items():
            numbers = [number for number in all_numbers if number not in model.embeddings]
            if numbers:
                yield ModelMean(numbers, [model.variables[number] for number in numbers], self._lock(device))

    def _warm_up(self) -> tuple[Any, Any]:
        """Returns whether the shared model is trained, and the steps that the fastest worker has finished."""
        if not self._warmup_steps:
            return tf.constant(False), tf.constant(0, tf.int64)
        with tf.device(self.state.home):
            clock = tf.reduce_max(self.state.clocks.read_value())
        clock = tf.identity(clock)
        return clock < self._warmup_steps, clock

    def _take_model(self, is_warming_up: Any, generation: Any, version: Any, now: Any) -> list[Any]:
        """Gives the worker a model; returns its values, their size in bytes, and 1 pull."""
        own = self._own

        def take_shared() -> list[Any]:
            values, size = pull([self._model.variables[number] for number in own.numbers], [version])
            own.replace(values, tf.zeros_like(generation))
            return [*values, size]

        # Not inlined, since only a worker's first step needs it: others would send messages without content for it.
        join = tf.function(self._join, autograph=False, experimental_attributes={"_noinline": True})
        found = (
            tf.cond(is_warming_up, take_shared, lambda: join(generation)) if self._warmup_steps else join(generation)
        )
        own.record_averaged(version, now)
        return [*found, tf.constant(1, tf.int64)]

    def _join(self, generation: Any) -> list[Any]:
        """Makes the worker's model the mean; returns its values, and their size in bytes."""
        own = self._own
        ids = self._ids(generation)

        def ask(times: Any, *_: Any) -> list[Any]:
            answer = self._ask(ids)
            return [times + 1, answer.is_of_moment, *answer.mean]

        def is_needed(times: Any, is_of_moment: Any, *_: Any) -> Any:
            # Again, if others have averaged twice while a message was under way.
            return ~is_of_moment & (times < _MOST_REQUESTS)

        nothing = [tf.zeros(variable.shape, variable.dtype) for variable in own.variables]
        _, _, *mean = tf.while_loop(is_needed, ask, [tf.constant(0), tf.constant(False), *nothing])
        own.replace(mean, generation)
        return [*mean, bytes_of(mean, None)]

    def _average(self, values: Sequence[Any], generation: Any, now: Any) -> Any:
        """Averages the worker's model with all others; returns the size of the mean in bytes."""
        answer = self._exchange(values, generation, is_update=True)
        self._own.record_averaged(answer.version, now)
        return bytes_of(answer.mean, None)

    def _exchange(self, values: Sequence[Any], generation: Any, *, is_update: bool) -> _Answer:
        """Adds what has led to the values of the worker's model to the mean, and moves the model there; see `_ask`."""
        own, connection = self._own, self._strategy.extended.services.connection_number()
        # Unless an earlier call was cut off, whose change is counted first.
        is_handed_over = _only_if(own.is_counted(), lambda: own.hand_over(values, connection))
        with tf.control_dependencies([is_handed_over]):
            change = dict(zip(own.numbers, own.change(), strict=True))
            ids = self._ids(generation)
        answer = self._ask(ids, change, is_update=is_update)
        # Only now all servers have added the change, so that the next but one may take its place there.
        with tf.control_dependencies([answer.is_of_moment]):
            is_recorded = _only_if(answer.is_counted, own.record_counted)
        with tf.control_dependencies([is_recorded]):
            _only_if(answer.is_of_moment, lambda: own.move(answer.mean))
        return answer

    def _ids(self, generation: Any) -> Any:
        """Returns the numbers of the worker, its connection, its model, its last change, and that model's version."""
        services, own = self._strategy.extended.services, self._own
        numbers = [services.worker_index(), services.connection_number(), generation]
        return tf.stack([*numbers, own.number.read_value(), own.version.read_value()])

    def _ask(self, ids: Any, change: Mapping[int, Any] | None = None, is_update: bool = False) -> _Answer:
        """Has a change of the worker's model counted, and asks all servers for the mean of that moment.

        Args:
          ids: see `_ids`.
          change: by position; None for none.
          is_update: whether the version grows if the change is counted by this call.
        """
        control, home = self._control, self.state.home
        ids_at: dict[str, Any] = {}
        are_stored, size = [], 0
        for mean in self._means:
            if change is None:
                continue
            parts = [change[number] for number in mean.numbers]
            size += sum(part.shape.num_elements() * part.dtype.size for part in parts)
            *parts, ids_at[mean.device] = transfer([*parts, ids], None, mean.device, is_mixed=True)[0]
            is_stored = _at_once(mean.device, mean.store, parts, ids_at[mean.device])
            are_stored += transfer([is_stored], mean.device, control.device)[0]
        for device in {control.device, home} - ids_at.keys():
            [ids_at[device]] = transfer([ids], None, device)[0]
        counted, is_new, is_counted = _at_once(control.device, control.count, ids_at[control.device], are_stored)
        # By device, and what it is; one message from each.
        answers: dict[str, dict[Any, Any]] = {control.device: {"is_counted": is_counted}}
        if is_update:
            [is_new_there], _ = transfer([is_new], control.device, home)
            version = _at_once(home, self._count_update, is_new_there, ids_at[home], size)
            answers.setdefault(home, {})["version"] = version
        for mean in self._means:
            with tf.device(mean.device):
                counted_there = tf.identity(counted)
            parts, is_of_moment = _at_once(mean.device, mean.advance, counted_there)
            answered = answers.setdefault(mean.device, {})
            answered.update(zip(mean.numbers, parts, strict=True))
            answered[mean] = is_of_moment
        found: dict[Any, Any] = {}
        for device, named in answers.items():
            arrived, _ = transfer([*named.values()], device, None, is_mixed=True)
            found.update(zip(named, arrived, strict=True))
        are_of_moment = [found[mean] > 0 for mean in self._means]
        return _Answer(
            [found[number] for number in self._own.numbers],
            tf.reduce_all(are_of_moment),
            found["is_counted"] > 0,
            found.get("version"),
        )

    def _count_update(self, updates: Any, ids: Any, size: int) -> Any:
        """Counts an averaging on the home server, where the arguments are; returns the version.

        Args:
          updates: 1, or 0 if it was counted before; an int64 scalar.
          ids: see `_ids`.
          size: of the change in bytes.
        """
        state = self.state
        with state.lock.hold([updates, ids]):
            version = state.version.read_value()
            state.version.assign_add(updates, read_value=False)
            staleness = decisions.staleness(version, ids[-1])
            counted = {"updates": updates, "pushes": updates, "bytes_pushed": size * updates}
            state.count(staleness=staleness, gradients=updates, **counted)
            return version + updates

    def _push_shared(self, gradients: dict[int, Any], pulled: PulledModel) -> Any:
        return super()._push(gradients, pulled)

    def _push_own(self, gradients: dict[int, Any], pulled: PulledModel) -> Any:
        """Applies the gradients of a step to the worker's model, and pushes those of embeddings."""
        embeddings = self._model.embeddings
        dense = {number: gradient for number, gradient in gradients.items() if number not in embeddings}
        rest = {number: gradient for number, gradient in gradients.items() if number in embeddings}
        rate = self._optimizer.learning_rate(pulled.scalars, pulled.version)
        with operations_added() as trained:
            # The averaging needs the same mutex.
            self._own.train(dense, rate, after=pulled.rule_data[1])
        if rest:
            counted = self._push_shared(rest, pulled)
        else:
            with tf.control_dependencies(list(pulled.checks)):
                self._optimizer.count()
            [of_push], _ = transfer([tf.stack([pulled.worker, pulled.not_finite])], None, self.state.home)
            counted = _at_once(self.state.home, self._count_step, of_push)
        with tf.control_dependencies([*trained, counted]):
            return tf.constant(True)

    def _count_step(self, of_push: Any) -> Any:
        """Counts a step on the home server, where its worker and whether it is not finite are, int64 [2]."""
        worker, not_finite = tf.unstack(of_push)
        with self.state.lock.hold([of_push]):
            self.state.advance_clock(worker)
            self.state.count(worker=worker, not_finite=not_finite)
            return tf.identity(worker)

    def _leave_out(self, index: int) -> None:
        """Records that a worker is idle or lost."""
        workers = self._strategy.cluster.workers
        is_live = any(worker.index == index and worker.state is WorkerState.LIVE for worker in workers)
        self._control.remove(index, is_lost=not is_live)

    def _build_bringing(self) -> Any:
        """Adds what the worker has changed to the mean, if it has a model; returns whether it has.

        After a call that was cut off, this is what that call had handed over, and only the next time the rest.
        """
        generation = self._control.read()[0]
        own = self._own
        return tf.cond(
            own.is_of(generation),
            lambda: self._exchange(own.read(), generation, is_update=False).is_counted | True,
            lambda: tf.constant(False),
        )


def _only_if(condition: Any, action: Callable[[], object]) -> Any:
    """Does something if a condition holds; returns a tensor that is available afterwards."""

    def act() -> Any:
        action()
        return condition

    return tf.cond(condition, act, lambda: condition)


def _at_once(device: str, section: Callable[..., Any], *arguments: Any) -> Any:
    """Adds what runs under a lock of a server, where the arguments are.

    TensorFlow would have locks in one function wait for each other, on whatever servers they are.
    """
    with tf.device(device):
        return tf.function(lambda: section(*arguments), autograph=False)()
