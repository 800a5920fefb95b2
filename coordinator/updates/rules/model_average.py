r"""Model averaging: every worker trains its own model, and the models are averaged while workers compute (Bagua).

worker   x0 ---- gradients of x0 ------------------------.  x = mean + (x - x0), then the worker's own optimizer
            \                                           /
servers      '-> x0 - base: stored, counted; the mean --'   mean += (x0 - base) / workers; base = mean

The classes, from the decision to the models:

    AveragingControl   on one parameter server: which changes of local models count, whether models are averaged now
        client --> generation, on or off --> read by each worker before each step
        worker --> number of a change that all servers have stored --> counted, with the number of workers that train
    ModelMean          on each parameter server, for the shared variables there
        store      worker's change --> | changes of worker 0 |  2 rows, by the parity of the change's number
                                       | changes of worker 1 |
        advance    changes that are counted by now --> mean --> the shared variables, the worker
    AveragedModel      on each worker: its own model, and which of its changes are in the mean

All servers store a change, then `AveragingControl` counts it, then each server adds it when any worker asks for the
mean. So a worker that dies cannot leave a change in only some means, and a change that is stored again is added once.

The servers give a worker the mean of one moment: it has the changes that were counted when the worker asked. A server
that has added later changes subtracts them from its answer.
"""

import concurrent.futures
import contextlib
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import tensorflow as tf
from typing_extensions import Unpack

from coordinator.ps_strategy.membership.cluster_definition import MAX_WORKERS
from coordinator.ps_strategy.parameter_server_strategy import ParameterServerStrategy
from coordinator.ps_strategy.tensorflow_internals.shared_variable import ServerMutex, client_may_call, operations_added
from coordinator.updates import decisions
from coordinator.updates.model import AveragedModel, PulledModel, bytes_of, transfer
from coordinator.updates.rule_state import zeros
from coordinator.updates.rules.asynchronous import Asynchronous
from coordinator.updates.settings import ModelAverageSettings
from coordinator.updates.update_rule import CommonSettings, takes_settings
from coordinator.workers.cluster import WorkerState

# Seconds between two checks whether an awaited worker was lost.
CHECK_INTERVAL = 0.1
# An idle worker no longer counts once the others have averaged this many times each, on average, since it became idle.
PATIENCE = 10

# The rows of `_workers`, with a column for each worker: its newest connection; the generation of its model, or 0; 1 +
# the number of changes counted when it became idle, or 0 if not idle; its last counted change; the divisor.
_FENCE, _MODEL, _IDLE, _NUMBER, _DIVISOR = range(5)


class AveragingControl:
    """The variables on a parameter server that control the averaging. No checkpoint contains them.

    Local models have a *generation*. A worker whose model is of an older generation first takes the shared model. So
    all workers restart from the shared model when the client begins a generation, and after a server was restored.

    A change counts once, even if its worker dies: one write records the change's number and divisor, the number of
    workers that train then. A worker counts as training after it has taken a model, until it is lost, or is idle while
    the others average `PATIENCE` times as often as there are models.

    Created in the strategy's scope, on the server of the variable `near`. A mutex named `lock_name` protects the
    variables. `count` is `_count` as a `tf.function`, for the same reasons as in `ModelMean`.
    """

    def __init__(self, near: tf.Variable, lock_name: str) -> None:
        # A worker without a model has generation 0.
        self._generations = itertools.count(1)
        self._is_on = True
        self._generation = 0
        self.device: str = near.device
        self._lock = ServerMutex(lock_name, self.device)
        self.count = tf.function(self._count, autograph=False)
        with tf.distribute.get_strategy().extended.colocate_vars_with(near):
            self._variable = tf.Variable(self._initial_value, trainable=False, name="averaging")
            self._workers = zeros([5, MAX_WORKERS], tf.int64, "averaging_workers")
            self._counted = zeros([], tf.int64, "counted_changes")

    def read(self, others: Sequence[tf.Variable] = ()) -> Any:
        """Returns an int64 [2 + n] on the worker, read in one message: generation, 1 if models are averaged, others."""
        with tf.device(self.device):
            read = tf.concat([self._variable.read_value(), *(other.read_value()[tf.newaxis] for other in others)], 0)
        return tf.identity(read)

    def switch(self, *, is_on: bool) -> None:
        self._is_on = is_on
        self._variable.assign(self._value(), read_value=False)

    def gather(self, strategy: ParameterServerStrategy, add_change: Any) -> bool:
        """Makes every live worker add the last change of its model. Then all workers restart from the shared model.

        Called while no scheduled function runs, also in a quiet period. `add_change`, a `tf.function`, adds the change
        of the worker's model, and returns False if the worker has none. Returns False if no worker has a model.
        """
        # Each worker is called twice: its first call may only finish an earlier call that was cut off.
        workers = 2 * [worker for worker in strategy.cluster.workers if worker.state is WorkerState.LIVE]
        schedule = strategy.extended.services.scheduler.schedule_internal
        call = strategy.extended.services.tracer.call_of(add_change, (), {}, strategy.extended.scheduled_tracing)
        futures = {schedule(worker.index, call, "add the last change of a model"): worker for worker in workers}
        while concurrent.futures.wait(futures, timeout=CHECK_INTERVAL).not_done:
            for future, worker in futures.items():
                if worker.state is not WorkerState.LIVE:
                    # The worker's model is lost, even if the worker returns.
                    future.cancel()
        had_model = [future.result() for future in futures if not future.cancelled()]
        self._variable.assign(self._initial_value(), read_value=False)
        return any(had_model)

    def _count(self, ids: Any, are_stored: Sequence[Any]) -> tuple[Any, Any, Any]:
        """Counts a worker as training, and counts its last change if all servers have stored it.

        A call of an older connection or generation counts nothing. All tensors are on this server. `ids`, int64 [4] or
        more, are the worker's index, its connection, the generation of its model, and the change's number. `are_stored`
        has a bool scalar from each server, or is empty without a change.

        Returns three tensors. The first is int64 [2, 1 + MAX_WORKERS]. Its first row has the generation, then the
        number of each worker's last counted change; its second row has 0, then the divisors of these changes. The
        others are int64 scalars: 1 if this call counted the change, and 1 if the change is counted now, otherwise 0.
        """
        with tf.device(self.device):
            worker, connection, generation, number = tf.unstack(ids[:4])
            is_stored = tf.reduce_all(are_stored) if are_stored else tf.constant(False)
        with self._lock.hold([ids, is_stored]):
            fences, models, idle, numbers, divisors = tf.unstack(self._workers.read_value())
            before = self._counted.read_value()
            is_it = tf.equal(tf.range(MAX_WORKERS, dtype=tf.int64), worker)
            is_own = is_it & (connection >= fences) & tf.equal(generation, self._variable.read_value()[0])
            is_new = is_own & is_stored & (number > numbers)
            models, idle = tf.where(is_own, generation, models), tf.where(is_own, tf.zeros_like(idle), idle)
            has_model = tf.equal(models, generation)
            most = PATIENCE * tf.math.count_nonzero(has_model)
            training = tf.math.count_nonzero(has_model & (tf.equal(idle, 0) | (before - idle < most)))
            numbers, divisors = tf.where(is_new, number, numbers), tf.where(is_new, training, divisors)
            rows = [tf.where(is_own, connection, fences), models, idle, numbers, divisors]
            self._workers.assign(tf.stack(rows), read_value=False)
            news = tf.math.count_nonzero(is_new)
            self._counted.assign_add(news, read_value=False)
            first = tf.stack([generation, tf.zeros_like(generation)])[:, tf.newaxis]
            counted = tf.concat([first, tf.stack([numbers, divisors])], 1)
            return counted, news, tf.math.count_nonzero(is_own & tf.equal(numbers, number))

    @client_may_call(tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.bool))
    def remove(self, worker: Any, is_lost: Any) -> None:
        """Records, on the client, that a worker does not train now. Later calls of a lost worker count nothing."""
        with self._lock.hold([worker, is_lost]):
            # The worker's next connection has a greater number.
            lost = tf.cast(is_lost, tf.int64)
            fence, model, *_ = tf.unstack(tf.gather(self._workers.read_value(), worker, axis=1))
            row = [fence + lost, model * (1 - lost), self._counted.read_value() + 1]
            self._workers.scatter_nd_update([[_FENCE, worker], [_MODEL, worker], [_IDLE, worker]], row)

    def _initial_value(self) -> Any:
        """Returns the value with a new generation. A new or restored server's variable also begins with this value."""
        self._generation = next(self._generations)
        return self._value()

    def _value(self) -> Any:
        return tf.constant([self._generation, int(self._is_on)], tf.int64)


# The rows of `_known`, with a column for each worker: the numbers of its stored changes, even and odd; the numbers of
# its latest change in the mean and of the change before; the divisor of the latest change.
_EVEN, _ODD, _ADDED, _BEFORE, _MEAN_DIVISOR = range(5)


class ModelMean:
    """The mean of the workers' models on one parameter server, and the latest changes of each worker.

    No checkpoint contains them. The first request of a newer generation replaces the mean by the shared variables. When
    the mean moves, it is assigned to the shared variables. `numbers` are the positions of these variables in the model.
    The mean is float64, so that it does not drift. A change is a float32 row, or float64 if a variable is float64.

    The server's lock protects the mean and the changes. Operations under the lock need no other machine, and finish
    once begun. `store` and `advance` are `tf.function`s, so that the locks of several servers in one step do not wait
    for each other, and all calls share one trace.
    """

    def __init__(self, numbers: Sequence[int], variables: Sequence[Any], lock: ServerMutex) -> None:
        self.numbers = tuple(numbers)
        self.device = lock.device
        self._variables = list(variables)
        self.lock = lock
        self._sizes = [_size(variable) for variable in variables]
        self.store = tf.function(self._store, autograph=False)
        self.advance = tf.function(self._advance, autograph=False)
        self._dtype = tf.float64 if any(variable.dtype == tf.float64 for variable in variables) else tf.float32
        with tf.distribute.get_strategy().extended.colocate_vars_with(self._variables[0]):
            # The rows are a TensorList: a variable with an unknown number of rows would crash the server.
            self._rows = tf.Variable(self._no_rows, dtype=tf.variant, shape=[], trainable=False, name="changes")
            self._mean = zeros([sum(self._sizes)], tf.float64, "mean_of_models")
            self._known = zeros([5, MAX_WORKERS], tf.int64, "known_changes")
            self._generation = zeros([], tf.int64, "generation")

    def _store(self, change: Sequence[Any], ids: Any) -> Any:
        """Stores a change; returns False if the change is older than a stored change, or of an older generation.

        `ids` are as in `AveragingControl._count`. All tensors are on this server.
        """
        with tf.device(self.device):
            row = tf.concat([tf.reshape(tf.cast(part, self._dtype), [-1]) for part in change], 0)
            worker, _, generation, number = tf.unstack(ids[:4])
        with self.lock.hold([row, worker, number, generation]):
            is_current = self._begin(generation)
            stored = tf.gather(self._known.read_value(), worker, axis=1)[: _ODD + 1]
            is_stored = is_current & tf.reduce_all(number >= stored)
            tf.cond(is_stored, lambda: self._put(row, worker, number), tf.no_op)
            return tf.identity(is_stored)

    def _advance(self, counted: Any) -> tuple[list[Any], Any]:
        """Adds all counted changes to the mean; `counted` is the result of `AveragingControl.count`, on this server.

        Returns the mean in the form of the variables, and an int64 scalar: 1 if the mean has the changes of `counted`,
        or 0 if two later changes of a worker were added, or if the server knows a newer generation.
        """
        with self.lock.hold([counted]):
            (generation, numbers), (_, divisors) = (tf.split(row, [1, MAX_WORKERS]) for row in tf.unstack(counted))
            is_current = self._begin(generation[0])
            known = tf.unstack(self._known.read_value())
            is_new = is_current & (_in_row(known, numbers) == numbers) & (numbers > known[_ADDED])
            mean = tf.cond(
                tf.reduce_any(is_new),
                lambda: self._add(is_new, numbers, divisors, known),
                lambda: tf.cast(self._mean.read_value(), self._dtype),
            )
            is_later = known[_ADDED] > numbers
            mean, is_of_moment = tf.cond(
                tf.reduce_any(is_later), lambda: self._without(is_later, numbers, known), lambda: (mean, is_current)
            )
            return self._unpacked(mean), tf.cast(is_current & is_of_moment, tf.int64)

    @contextlib.contextmanager
    def following(self) -> Iterator[None]:
        """Opens a scope in which the mean changes as much as the shared variables do. The caller holds the lock."""
        before = self._shared()
        with operations_added() as changes:
            yield
        with tf.control_dependencies(changes):
            self._mean.assign_add(self._shared() - before, read_value=False)

    def _begin(self, generation: Any) -> Any:
        """Begins `generation` if it is newer than the current one; returns a bool scalar, False if it is older."""
        current = self._generation.read_value()

        def begin() -> Any:
            with operations_added() as operations:
                self._mean.assign(self._shared(), read_value=False)
                self._known.assign(tf.zeros([5, MAX_WORKERS], tf.int64), read_value=False)
                self._rows.assign(self._no_rows(), read_value=False)
            with tf.control_dependencies(operations):
                self._generation.assign(generation, read_value=False)
            return tf.no_op()

        with tf.control_dependencies([tf.cond(generation > current, begin, tf.no_op)]):
            return generation >= current

    def _put(self, row: Any, worker: Any, number: Any) -> Any:
        rows, index = self._rows.read_value(), _place(worker, number)
        length = tf.maximum(tf.raw_ops.TensorListLength(input_handle=rows), index + 1)
        rows = tf.raw_ops.TensorListResize(input_handle=rows, size=length)
        rows = tf.raw_ops.TensorListSetItem(input_handle=rows, index=index, item=row)
        with tf.control_dependencies([self._rows.assign(rows, read_value=False)]):
            self._known.scatter_nd_update([[number % 2, worker]], [number])
        return tf.no_op()

    def _add(self, is_new: Any, numbers: Any, divisors: Any, known: Sequence[Any]) -> Any:
        even, odd, added, before, divisor = known
        moved = self._moved(is_new, numbers, divisors)
        with tf.control_dependencies([self._mean.assign(moved, read_value=False)]):
            changed = (numbers, added), (added, before), (divisors, divisor)
            rows = [tf.where(is_new, new, old) for new, old in changed]
            self._known.assign(tf.stack([even, odd, *rows]), read_value=False)
        mean = tf.cast(moved, self._dtype)
        for variable, value in zip(self._variables, self._unpacked(mean), strict=True):
            variable.assign(value, read_value=False)
        return mean

    def _without(self, is_later: Any, numbers: Any, known: Sequence[Any]) -> tuple[Any, Any]:
        """Returns the mean without the last changes of some workers, and whether their former changes are `numbers`."""
        _, _, added, before, divisor = known
        are_kept = (_in_row(known, added) == added) & (before == numbers)
        return tf.cast(self._moved(is_later, added, -divisor), self._dtype), tf.reduce_all(are_kept | ~is_later)

    def _moved(self, are_chosen: Any, numbers: Any, divisors: Any) -> Any:
        """Returns the mean plus one change of each chosen worker, divided by its divisor; float64."""
        rows, workers = self._rows.read_value(), tf.where(are_chosen)[:, 0]

        def add(count: Any, mean: Any) -> tuple[Any, Any]:
            worker = workers[count]
            row = tf.raw_ops.TensorListGetItem(
                input_handle=rows,
                index=_place(worker, numbers[worker]),
                element_shape=[sum(self._sizes)],
                element_dtype=self._dtype,
            )
            return count + 1, mean + tf.cast(row, tf.float64) / tf.cast(divisors[worker], tf.float64)

        # Changes are added one by one. Usually there is one, and summing rows in one operation takes much longer.
        state = tf.constant(0), self._mean.read_value()
        return tf.while_loop(lambda count, _: count < tf.size(workers), add, state, parallel_iterations=1)[1]

    def _shared(self) -> Any:
        values = [tf.cast(variable.read_value(), tf.float64) for variable in self._variables]
        return tf.concat([tf.reshape(value, [-1]) for value in values], 0)

    def _no_rows(self) -> Any:
        return tf.raw_ops.EmptyTensorList(
            element_shape=[sum(self._sizes)], max_num_elements=-1, element_dtype=self._dtype
        )

    def _unpacked(self, row: Any) -> list[Any]:
        return [
            tf.cast(tf.reshape(part, variable.shape), variable.dtype)
            for part, variable in zip(tf.split(row, self._sizes), self._variables, strict=True)
        ]


def _in_row(known: Sequence[Any], numbers: Any) -> Any:
    """Returns, for each worker, the number of the stored change with the same parity as the worker's `numbers`."""
    return tf.where(numbers % 2 == 0, known[_EVEN], known[_ODD])


def _place(worker: Any, number: Any) -> Any:
    """Returns the row of the worker's change of this number."""
    return tf.cast(2 * worker + number % 2, tf.int32)


def _size(variable: Any) -> int:
    size = variable.shape.num_elements()
    if size is None:
        raise ValueError(
            f"The variable {variable.name!r} has the shape {variable.shape}, and only variables of a known shape can "
            "be averaged. Create it with one, or pass it as one of the embeddings."
        )
    return int(size)


# The most requests of a joining worker for a mean of one moment on all servers.
_MOST_REQUESTS = 100


class _Answer(NamedTuple):
    """The answer of all servers, on the worker. The mean is in the order of the worker's variables.

    `is_of_moment` tells whether the mean has the same changes on all servers; `is_counted` tells whether the worker's
    change is counted. Both are bool scalars. `version` is an int64 scalar; None if no update was counted.
    """

    mean: Sequence[Any]
    is_of_moment: Any
    is_counted: Any
    version: Any


class ModelAverage(Asynchronous):
    """Every worker trains its own model; while a gradient is computed, the model is averaged with all others.

    A step reads the worker's own dense variables, x0. While the step computes gradients, the servers add the worker's
    changes since its last averaging, divided by the number of workers, to the mean of all models, and return the mean.
    The worker's model becomes mean + (model - x0), and its own optimizer applies the gradients to the model. No worker
    waits for another. (Bagua, Gan et al. 2021, "Asynchronous Model Average".)

    Nothing that a worker has learned is averaged away. On all servers, with any number of concurrent workers:

        mean after - mean before = sum of all changes that workers have made to their models / number of workers

    Each change is divided by the number of workers that train when the change is counted. A change is counted once,
    even if a call is cut off and repeated. `abort` adds the latest changes of all workers. A worker that dies loses its
    changes since its last averaging. A step reads a model with the same changes on all servers.

    The mean is also assigned to the shared variables. Every reader, evaluation or checkpoint gets a recent mean. The
    means on two servers may have different changes; after `abort`, the mean is exact. An averaging is one update of the
    model's version; its staleness is the number of updates since the worker's previous averaging. As with other rules,
    the optimizer's `iterations` counts every gradient, and schedules use `iterations`. Slots and bias corrections are
    the worker's own.

    A new or restarted worker begins with the mean, and does not change it. The divisor then counts the worker until it
    is lost, or is idle while the others average about 10 times each. After the loss of a parameter server, all workers
    begin with the restored values. To return to a checkpoint in training, restore it between `abort` and `resume`.

    Workers have no copies of embeddings. Gradients of embeddings are pushed as with `Asynchronous`, each as a separate
    update. `Options.transfer_dtype` does not apply, because each averaging of a rounded model would lose all changes
    that are smaller than the rounding error.

    Args:
      optimizer, variables, embeddings, learning_rate, require_finite: see `UpdateRule`.
      use_locking: see `Asynchronous`; it concerns only the gradients of embeddings.
      period: the least time between two averagings of one worker, in seconds; 0 averages with every step.
      warmup_steps: all workers train the shared model as with `Asynchronous` until one worker has finished this number
        of steps, including steps with an earlier rule or before a restart. (During the warm-up, Bagua's workers reduce
        their gradients synchronously.)

    Raises:
      ValueError: `period` or `warmup_steps` is negative, or all variables are embeddings.
      TypeError: `period` or `warmup_steps` is not a number; and see `UpdateRule`.
    """

    @takes_settings
    def __init__(
        self,
        optimizer: Any,
        variables: Sequence[Any],
        *,
        period: float = 0.0,
        warmup_steps: int = 0,
        use_locking: bool = True,
        **settings: Unpack[CommonSettings],
    ) -> None:
        ModelAverageSettings(period, warmup_steps)
        super().__init__(optimizer, variables, use_locking=use_locking, transfer_dtype=tf.float32, **settings)
        self._period = float(period)
        self._warmup_steps = warmup_steps
        if not self._model.dense:
            raise ValueError(
                "ModelAverage has nothing to average: all of its variables are embeddings. With embeddings=() "
                "it averages them as a whole."
            )
        self._own = AveragedModel(self._model, self._optimizer, f"{self._key}/own_model")
        # There is a `ModelMean` on each parameter server that has a part of the shared model.
        variables = self._model.variables
        self._means = tuple(
            ModelMean(dense, [variables[number] for number in dense], self._lock(device))
            for device, numbers in self._model.by_device.items()
            if (dense := [number for number in numbers if number not in self._model.embeddings])
        )
        self._control = AveragingControl(self.state.version, f"{self._key}/averaging")
        self._bring = tf.function(self._build_bringing, autograph=False)
        self._strategy.extended.services.add_idle_callback(self._leave_out)

    def abort(self, timeout: float | None = None) -> None:
        """Stops averaging, and replaces all models by the mean with the changes of all workers.

        Waits until all scheduled functions have finished. Schedule nothing until `abort` returns. Workers take the mean
        with their next step. Until `resume`, further training stays local; another `abort` averages the local models.

        Args:
          timeout: the longest wait in seconds, as in `strategy.join`.

        Raises:
          TimeoutError: the scheduled functions have not finished in time.
          StrategyClosedError: the strategy is closed.
          Exception: an error that `strategy.join` raises.
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
        """Replaces all models by the exact mean; see `UpdateRule`."""
        self.abort()
        self.resume()

    def _begin_step(self) -> Any:
        # This is one message if the control and the version are on one server, as usual.
        return tf.unstack(self._control.read([self.state.version]))

    def _pull_model(self, begun: Any) -> PulledModel:
        own = self._own
        generation, is_on, version = begun
        is_on = is_on > 0
        is_warming_up, clock = tf.constant(False), tf.constant(0, tf.int64)
        if self._warmup_steps:
            with tf.device(self.state.home):
                fastest = tf.reduce_max(self.state.clocks.read_value())
            clock = tf.identity(fastest)
            is_warming_up = clock < self._warmup_steps
        is_current, averaged_at = own.is_of(generation), own.averaged_at.read_value()
        with tf.control_dependencies([averaged_at]):
            now = tf.timestamp()
        *values, size, pulls = tf.cond(
            is_current,
            lambda: [*own.read(), *[tf.constant(0, tf.int64)] * 2],
            lambda: self._take_model(is_warming_up, generation, version, now),
        )
        # With the absolute value, a worker whose clock is set back does not wait until the clock has caught up.
        since = tf.where(is_current, tf.abs(now - averaged_at), tf.zeros_like(now))
        is_due = tf.function(decisions.is_average_due)(since, self._period, clock, self._warmup_steps)
        is_due = tf.logical_and(is_on, is_due)

        def average() -> Any:
            answer = self._exchange(values, generation, is_update=True)
            own.record_averaged(answer.version, now)
            return bytes_of(answer.mean, None)

        received = tf.cond(is_due, average, lambda: tf.constant(0, tf.int64))
        scalars, size_of_scalars = self._model.pull(self._optimizer.scalars)
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
        push_shared = super()._push
        return tf.cond(is_warming_up, lambda: push_shared(gradients, pulled), lambda: self._push_own(gradients, pulled))

    def _finish(self) -> None:
        self._control.switch(is_on=False)
        if self._control.gather(self._strategy, self._bring):
            self.state.version.assign_add(1, read_value=False)
            self.state.count(updates=1)

    def _apply(self, device: str, gradients: dict[int, Any], scalars: Sequence[Any], rate: Any) -> None:
        mean = next((mean for mean in self._means if mean.device == device), None)
        if mean is None or gradients.keys().isdisjoint(mean.numbers):
            super()._apply(device, gradients, scalars, rate)
            return
        # This push of the warm-up is always locked, because other workers may already have their own models.
        with contextlib.nullcontext() if self._use_locking else self._lock(device).hold(), mean.following():
            super()._apply(device, gradients, scalars, rate)

    def _take_model(self, is_warming_up: Any, generation: Any, version: Any, now: Any) -> list[Any]:
        """Gives the worker a model; returns its values, their size in bytes, and 1 pull."""
        own = self._own

        def take_shared() -> list[Any]:
            values, size = self._model.pull([self._model.variables[number] for number in own.numbers], [version])
            own.replace(values, tf.zeros_like(generation))
            return [*values, size]

        # `join` is not inlined: only a worker's first step needs it, and other steps would send empty messages for it.
        join = tf.function(self._join, autograph=False, experimental_attributes={"_noinline": True})
        taken = (
            tf.cond(is_warming_up, take_shared, lambda: join(generation)) if self._warmup_steps else join(generation)
        )
        own.record_averaged(version, now)
        return [*taken, tf.constant(1, tf.int64)]

    def _join(self, generation: Any) -> list[Any]:
        """Makes the worker's model the mean; returns its values and their size in bytes."""
        own = self._own
        ids = self._ids(generation)

        def ask(times: Any, *_: Any) -> list[Any]:
            answer = self._ask(ids)
            return [times + 1, answer.is_of_moment, *answer.mean]

        def is_needed(times: Any, is_of_moment: Any, *_: Any) -> Any:
            # The worker asks again if others have averaged twice while a message was under way.
            return ~is_of_moment & (times < _MOST_REQUESTS)

        nothing = [tf.zeros(variable.shape, variable.dtype) for variable in own.variables]
        _, _, *mean = tf.while_loop(is_needed, ask, [tf.constant(0), tf.constant(False), *nothing])
        own.replace(mean, generation)
        return [*mean, bytes_of(mean, None)]

    def _exchange(self, values: Sequence[Any], generation: Any, *, is_update: bool) -> _Answer:
        """Adds the worker's change up to these values to the mean, and moves the worker's model to the mean."""
        own, connection = self._own, self._strategy.extended.services.connection_number()
        # If an earlier call was cut off, the change of that call is counted first.
        is_handed_over = _only_if(own.is_counted(), lambda: own.hand_over(values, connection))
        with tf.control_dependencies([is_handed_over]):
            change = dict(zip(own.numbers, own.change(), strict=True))
            ids = self._ids(generation)
        answer = self._ask(ids, change, is_update=is_update)
        # All servers have added the change by now, so the change after the next may replace it on the servers.
        with tf.control_dependencies([answer.is_of_moment]):
            is_recorded = _only_if(answer.is_counted, own.record_counted)
        with tf.control_dependencies([is_recorded]):
            _only_if(answer.is_of_moment, lambda: own.move(answer.mean))
        return answer

    def _ids(self, generation: Any) -> Any:
        """Returns an int64 [5]: worker, connection, generation, number of the last change, version of its model."""
        services, own = self._strategy.extended.services, self._own
        numbers = [services.worker_index(), services.connection_number(), generation]
        return tf.stack([*numbers, own.number.read_value(), own.version.read_value()])

    def _ask(self, ids: Any, change: Mapping[int, Any] | None = None, is_update: bool = False) -> _Answer:
        """Makes the servers count a change, by position, with the result of `_ids`; asks for the mean of that moment.

        Without a change, only asks for the mean. With `is_update`, the version grows if this call counts the change.
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
            with tf.device(mean.device):
                is_stored = mean.store(parts, ids_at[mean.device])
            are_stored += transfer([is_stored], mean.device, control.device)[0]
        for device in {control.device, home} - ids_at.keys():
            [ids_at[device]] = transfer([ids], None, device)[0]
        with tf.device(control.device):
            counted, is_new, is_counted = control.count(ids_at[control.device], are_stored)
        # The answers of each device, by name or by the position of a variable. Each device sends one message.
        answers: dict[str, dict[Any, Any]] = {control.device: {"is_counted": is_counted}}
        if is_update:
            [is_new_there], _ = transfer([is_new], control.device, home)
            version = _at_once(home, self._count_update, is_new_there, ids_at[home], size)
            answers.setdefault(home, {})["version"] = version
        for mean in self._means:
            with tf.device(mean.device):
                parts, is_of_moment = mean.advance(tf.identity(counted))
            answered = answers.setdefault(mean.device, {})
            answered.update(zip((*mean.numbers, mean), (*parts, is_of_moment), strict=True))
        received: dict[Any, Any] = {}
        for device, named in answers.items():
            received.update(zip(named, transfer([*named.values()], device, None, is_mixed=True)[0], strict=True))
        are_of_moment = [received[mean] > 0 for mean in self._means]
        return _Answer(
            [received[number] for number in self._own.numbers],
            tf.reduce_all(are_of_moment),
            received["is_counted"] > 0,
            received.get("version"),
        )

    def _count_update(self, updates: Any, ids: Any, size: int) -> Any:
        """Counts `updates` averagings (0 or 1) of `size` bytes, on the home server; returns the version."""
        state = self.state
        with state.lock.hold([updates, ids]):
            version = state.version.read_value()
            state.version.assign_add(updates, read_value=False)
            staleness = decisions.staleness(version, ids[-1])
            counted = {"updates": updates, "pushes": updates, "bytes_pushed": size * updates}
            state.count(staleness=staleness, gradients=updates, **counted)
            return version + updates

    def _push_own(self, gradients: dict[int, Any], pulled: PulledModel) -> Any:
        """Applies a step's gradients to the worker's model, and pushes the gradients of embeddings."""
        embeddings = self._model.embeddings
        dense = {number: gradient for number, gradient in gradients.items() if number not in embeddings}
        sparse = {number: gradient for number, gradient in gradients.items() if number in embeddings}
        rate = self._optimizer.learning_rate(pulled.scalars, pulled.version)
        with operations_added() as trained:
            # Training waits for the averaging, which needs the same mutex.
            self._own.train(dense, rate, after=pulled.rule_data[1])
        if sparse:
            counted = super()._push(sparse, pulled)
        else:
            with tf.control_dependencies(list(pulled.checks)):
                self._optimizer.count()
            [of_push], _ = transfer([tf.stack([pulled.worker, pulled.not_finite])], None, self.state.home)
            counted = _at_once(self.state.home, self._count_step, of_push)
        with tf.control_dependencies([*trained, counted]):
            return tf.constant(True)

    def _count_step(self, of_push: Any) -> Any:
        """Counts a step, on the home server. `of_push`, int64 [2], has the worker, and 1 if the push is not finite."""
        worker, not_finite = tf.unstack(of_push)
        with self.state.lock.hold([of_push]):
            self.state.advance_clock(worker)
            self.state.count(worker=worker, not_finite=not_finite)
            return tf.identity(worker)

    def _leave_out(self, index: int) -> None:
        workers = self._strategy.cluster.workers
        is_live = any(worker.index == index and worker.state is WorkerState.LIVE for worker in workers)
        # If the server is down, its record of the worker is lost, too.
        self._control.remove(index, not is_live)

    def _build_bringing(self) -> Any:
        """Adds the worker's change to the mean; returns False if the worker has no model.

        If an earlier call was cut off, this call adds only the change of that call. The next call adds the rest.
        """
        generation = self._control.read()[0]
        own = self._own
        return tf.cond(
            own.is_of(generation),
            lambda: self._exchange(own.read(), generation, is_update=False).is_counted | True,
            lambda: tf.constant(False),
        )


def _only_if(condition: Any, action: Callable[[], object]) -> Any:
    """Runs an action if a condition holds; returns a tensor that is available afterwards."""

    def act() -> Any:
        action()
        return condition

    return tf.cond(condition, act, lambda: condition)


def _at_once(device: str, section: Callable[..., Any], *arguments: Any) -> Any:
    """Adds the function `section`, which acquires a lock on the server `device`; the arguments are on that server.

    Within one function, TensorFlow would make locks wait for each other, even locks of different servers.
    """
    with tf.device(device):
        return tf.function(lambda: section(*arguments), autograph=False)()
