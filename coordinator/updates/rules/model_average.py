r"""Model averaging: every worker trains its own model, and is averaged with all others meanwhile (Bagua).

worker   x0 ---- gradients of x0 ----------------------. x = mean + (x - x0), then the worker's own optimizer
            \                                         /
servers      '-> replaces its row in the sum; mean ---'  the mean of the rows is the shared model
"""

from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.tensorflow_internals.server_mutex import operations_added
from coordinator.updates import decisions
from coordinator.updates.rules.asynchronous import Asynchronous
from coordinator.updates.settings import ModelAverageSettings
from coordinator.updates.state.averaging_control import AveragingControl
from coordinator.updates.state.local_model import AveragedModel
from coordinator.updates.state.model_sum import ModelSum
from coordinator.updates.transport.model import pull, transfer
from coordinator.updates.transport.pulled_variables import PulledModel
from coordinator.workers.worker import WorkerState


class ModelAverage(Asynchronous):
    """Every worker trains its own model; while a gradient is computed, the model is averaged with all others.

    A step reads the worker's own dense variables, x0. While its gradients are computed, x0 replaces the worker's
    previous model among the latest models of all workers, and their mean is returned. Then the worker's model becomes
    mean + (model - x0), and its own optimizer applies the gradients to it. No worker ever waits for another. (Bagua,
    Gan et al. 2021, "Asynchronous Model Average".)

    The mean is also assigned to the shared variables, so that every reader, evaluation or checkpoint gets a recent
    mean; after `abort`, the exact one. An averaging is one update of the model's version, and its staleness the number
    of updates since the worker's previous averaging. The optimizer's `iterations` counts every gradient, as with the
    other rules, and a schedule follows it; slots and bias corrections are per worker.

    A new or restarted worker begins with the shared model. An idle or lost worker is left out of the mean until its
    next averaging: a model that is not being trained would hold back all others. After a parameter server was lost, all
    workers begin with the restored values. To return to a checkpoint during training, restore it between `abort` and
    `resume`.

    Embeddings have no local copies: their gradients are pushed as with `Asynchronous`, each as a separate update.

    Nothing is rounded, whatever `Options.transfer_dtype` is: a model, unlike a gradient, would lose with each averaging
    all changes that are smaller than its rounding.

    Args:
      optimizer, variables, embeddings, learning_rate, require_finite: see `UpdateRule`.
      use_locking: see `Asynchronous`; for the gradients that are pushed, those for embeddings and of the warm-up.
      period: the least time between two averagings of one worker, in seconds; 0 averages with every step.
      warmup_steps: until a worker has finished this number of steps, including those with an earlier rule or before a
        restart, all workers train the shared model as with `Asynchronous` (where Bagua's workers reduce their gradients
        synchronously). A push during the change to local models may be lost.

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
        # The sum of all models, on each parameter server that has a part of the shared one.
        self._sums = tuple(self._new_sums())
        self._control = AveragingControl(self.state.version)
        self._bring = tf.function(self._build_bringing, autograph=False)
        self._strategy.extended.services.add_idle_callback(self._leave_out)

    def abort(self, timeout: float | None = None) -> None:
        """Stops averaging, and assigns the exact mean of all workers' models to the shared and the local ones.

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

    def _pull_model(self, version: Any) -> PulledModel:
        own = self._own
        generation, is_on = self._control.read()
        is_warming_up, clock = self._warm_up()
        is_current, averaged_at = own.is_of(generation), own.averaged_at.read_value()
        with tf.control_dependencies([averaged_at]):
            now = tf.timestamp()
        *values, size, pulls = tf.cond(
            is_current,
            lambda: [*own.read(), *[tf.constant(0, tf.int64)] * 2],
            lambda: self._take_shared(tf.where(is_warming_up, tf.zeros_like(generation), generation), version, now),
        )
        # The absolute value: a worker whose clock is set back must not wait until it shows that time again.
        since = tf.where(is_current, tf.abs(now - averaged_at), tf.zeros_like(now))
        is_due = tf.function(decisions.is_average_due)(since, self._period, clock, self._warmup_steps)
        is_due = tf.logical_and(is_on, is_due)
        *averages, received = tf.cond(
            is_due, lambda: self._average(values, generation, now), lambda: [*values, tf.constant(0, tf.int64)]
        )
        scalars, size_of_scalars = pull(self._optimizer.scalars, [])
        return PulledModel(
            tf.identity(version),
            scalars,
            dict(zip(own.numbers, values, strict=True)),
            size + received + size_of_scalars,
            pulls + tf.cast(is_due, tf.int64),
            rule_data=(averages, is_due, is_warming_up),
        )

    def _push(self, gradients: dict[int, Any], pulled: PulledModel) -> Any:
        if pulled.rule_data is None:
            raise ValueError(
                "The model was pulled in another function. With ModelAverage, rule.pull() and rule.push() are used in "
                "one function, or push in a function inside of it."
            )
        averages, is_averaged, is_warming_up = pulled.rule_data
        if not self._warmup_steps:
            return self._push_own(gradients, pulled, averages, is_averaged)
        return tf.cond(
            is_warming_up,
            lambda: self._push_shared(gradients, pulled),
            lambda: self._push_own(gradients, pulled, averages, is_averaged),
        )

    def _finish(self) -> None:
        self._control.switch(is_on=False)
        if self._control.gather(self._strategy, self._bring):
            self.state.version.assign_add(1, read_value=False)
            self.state.count(updates=1)

    def _new_sums(self) -> Iterator[ModelSum]:
        model = self._model
        for device, all_numbers in model.by_device.items():
            numbers = [number for number in all_numbers if number not in model.embeddings]
            if numbers:
                yield ModelSum(numbers, [model.variables[number] for number in numbers], self._lock(device))

    def _warm_up(self) -> tuple[Any, Any]:
        """Returns whether the shared model is trained, and the steps that the fastest worker has finished."""
        if not self._warmup_steps:
            return tf.constant(False), tf.constant(0, tf.int64)
        with tf.device(self.state.home):
            clock = tf.reduce_max(self.state.clocks.read_value())
        clock = tf.identity(clock)
        return clock < self._warmup_steps, clock

    def _take_shared(self, generation: Any, version: Any, now: Any) -> list[Any]:
        """Copies the shared model to the worker's; returns its values, their size in bytes, and 1 pull."""
        own = self._own
        values, size = pull([self._model.variables[number] for number in own.numbers], [version])
        own.replace(values, generation, version, now)
        return [*values, size, tf.constant(1, tf.int64)]

    def _average(self, values: Sequence[Any], generation: Any, now: Any) -> list[Any]:
        """Averages the worker's model with all others; returns the mean, and its size in bytes."""
        own, state = self._own, self.state
        averages, accepted, sent, received = self._exchange(values, generation)
        at_home, _ = transfer([own.version.read_value(), accepted], None, state.home)
        before, is_accepted = at_home
        with state.lock.hold(at_home):
            version = state.version.read_value()
            state.version.assign_add(tf.cast(is_accepted, tf.int64), read_value=False)
            staleness = decisions.staleness(version, before)
        state.count(updates=is_accepted, pushes=1, bytes_pushed=sent, staleness=staleness)
        own.record_averaged(version + 1, now)
        return [*averages, received]

    def _exchange(self, values: Sequence[Any], generation: Any) -> tuple[list[Any], Any, Any, Any]:
        """Replaces the worker's model in all sums.

        Returns:
          The means, in the order of the values; whether the model was accepted; the bytes sent, and those received.
        """
        services, numbers = self._strategy.extended.services, self._own.numbers
        worker_ids = [services.worker_index(), services.connection_number(), generation]
        mine = dict(zip(numbers, values, strict=True))
        averages: dict[int, Any] = {}
        accepted, sent, received = [], [], []
        for model_sum in self._sums:
            device = model_sum.device
            there, size_there = transfer([*(mine[number] for number in model_sum.numbers), *worker_ids], None, device)
            *values_there, worker, connection, generation_there = there
            means, is_accepted = model_sum.exchange(values_there, worker, connection, generation_there)
            back, size_back = transfer([*means, is_accepted], device, None)
            averages.update(zip(model_sum.numbers, back[:-1], strict=True))
            accepted.append(back[-1])
            sent.append(size_there)
            received.append(size_back)
        in_order = [averages[number] for number in numbers]
        return in_order, tf.reduce_all(tf.stack(accepted)), tf.add_n(sent), tf.add_n(received)

    def _push_shared(self, gradients: dict[int, Any], pulled: PulledModel) -> Any:
        return super()._push(gradients, pulled)

    def _push_own(
        self, gradients: dict[int, Any], pulled: PulledModel, averages: Sequence[Any], is_averaged: Any
    ) -> Any:
        """Applies the gradients of a step to the worker's model, and pushes those of embeddings."""
        embeddings = self._model.embeddings
        dense = {number: gradient for number, gradient in gradients.items() if number not in embeddings}
        rest = {number: gradient for number, gradient in gradients.items() if number in embeddings}
        rate = self._optimizer.learning_rate(pulled.scalars, pulled.version)
        with operations_added() as operations:
            self._own.train(dense, rate, list(pulled.values.values()), averages, is_averaged)
            if rest:
                self._push_shared(rest, pulled)
            else:
                with tf.control_dependencies(list(pulled.checks)):
                    self._optimizer.count()
                [worker, not_finite], _ = transfer([pulled.worker, pulled.not_finite], None, self.state.home)
                with self.state.lock.hold([worker]):
                    self.state.advance_clock(worker)
                self.state.count(worker=worker, not_finite=not_finite)
        with tf.control_dependencies(operations):
            return tf.constant(True)

    def _leave_out(self, index: int) -> None:
        """Removes the model of an idle or lost worker from the sums."""
        workers = self._strategy.cluster.workers
        is_live = any(worker.index == index and worker.state is WorkerState.LIVE for worker in workers)
        for model_sum in self._sums:
            model_sum.remove(index, is_lost=not is_live)

    def _build_bringing(self, generation: Any) -> Any:
        """Adds the worker's model, if it has one, as one of the given generation; returns whether it did."""
        current, _ = self._control.read()
        own = self._own
        return tf.cond(
            own.is_of(current), lambda: self._exchange(own.read(), generation)[1], lambda: tf.constant(False)
        )
