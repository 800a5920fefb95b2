r"""Model averaging: every worker trains a model of its own, while the models of all are averaged beside it (Bagua).

worker   x0 ---- gradients of x0 ----------------------. x = mean + (x - x0), then the worker's own optimizer
            \                                         /
servers      '-> its row, instead of its last; mean --'  the mean of the rows is the shared model
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import tensorflow as tf

from coordinator.updates import decisions
from coordinator.updates.own_model import OwnModel
from coordinator.updates.parcel import send
from coordinator.updates.pulled import ModelCopies, Pulled
from coordinator.updates.rules.asynchronous import Asynchronous
from coordinator.updates.state.averaging_control import Averaging
from coordinator.updates.state.local_model import LocalModel
from coordinator.updates.state.model_sum import AverageBoard
from coordinator.updates.state.server_mutex import built
from coordinator.updates.transport.model import pull
from coordinator.workers.worker import WorkerState


@dataclasses.dataclass(frozen=True)
class _Averaged:
    """What is averaged, where, and when. Not in checkpoints: TensorFlow does not look into an object of this kind.

    Attributes:
      own: the model of each worker.
      boards: where models meet, on each parameter server that has a part of them.
      averaging: the client's word.
    """

    own: OwnModel
    boards: tuple[AverageBoard, ...]
    averaging: Averaging


@dataclasses.dataclass(frozen=True)
class _Begun:
    """What a step's pull has begun.

    Attributes:
      values: the local model that the gradients are computed on.
      averages: the mean that came back for it, in their order; the same values where none was asked for.
      is_averaged: whether one was.
      is_warming_up: whether the gradients are for the shared model.
    """

    values: Sequence[Any]
    averages: Sequence[Any]
    is_averaged: Any
    is_warming_up: Any


class ModelAverage(Asynchronous):
    """Every worker trains a model of its own; beside the computation of a gradient, its model is averaged with all.

    A step reads the worker's own dense variables, x0. While its gradients are computed, x0 takes its place among the
    latest models of all workers, and the mean of these comes back. Then the worker's model becomes
    mean + (model - x0), and its own optimizer applies the gradients to it. Nobody ever waits for another worker.
    (Bagua, Gan et al. 2021, "Asynchronous Model Average".)

    The mean is also written to the shared variables, so that whoever reads, evaluates or saves the model has a recent
    mean; after `abort`, the exact one. An averaging is one update of the model's version, and its staleness the number
    of updates since the worker's averaging before. The optimizer's `iterations` counts every gradient, as with the
    other rules, and a schedule follows it; slots and bias corrections are each worker's own.

    A worker that is new, or was restarted, begins with the shared model. One that has no work for a moment, or was
    lost, is left out of the mean until its next averaging: a model that nobody trains would hold all others back. After
    a parameter server was lost, all workers begin with what was restored. To go back to a checkpoint in mid-training,
    restore it between `abort` and `resume`.

    Embeddings have no local copies: their gradients are pushed as those of `Asynchronous`, each an update of its own.

    Args:
      optimizer, variables, embeddings, learning_rate, use_locking: see `UpdateRule`; `use_locking` is for the gradients
        that are pushed, those for embeddings and of the warm-up.
      period: the least time between two averagings of one worker, in seconds; 0 averages with every step.
      warmup_steps: until a worker has finished so many steps, those with an earlier rule or before a restart included,
        all workers train the shared model as with `Asynchronous` (where Bagua's workers reduce their gradients in
        step). What is pushed in the moment that they part may be lost.

    Raises:
      ValueError: `period` or `warmup_steps` is negative, or all variables are embeddings.
      TypeError: they are no numbers; and see `UpdateRule`.
    """

    def __init__(
        self,
        optimizer: Any,
        variables: Sequence[Any],
        *,
        period: float = 0.0,
        warmup_steps: int = 0,
        embeddings: Sequence[Any] = (),
        learning_rate: Any = None,
        use_locking: bool = True,
    ) -> None:
        _check("period", period, (int, float), "a number of seconds")
        _check("warmup_steps", warmup_steps, int, "an integer")
        super().__init__(optimizer, variables, use_locking, embeddings=embeddings, learning_rate=learning_rate)
        self._period = float(period)
        self._warmup_steps = warmup_steps
        model, name = self._parts.model, f"coordinator/updates/{self.ledger.number}/own_model"
        if not model.dense:
            raise ValueError("ModelAverage has nothing to average: all of its variables are embeddings.")
        own = OwnModel(LocalModel(model, model.dense, optimizer, learning_rate), name)
        boards = tuple(self._new_boards())
        self._averaged = _Averaged(own, boards, Averaging(self.ledger.version))
        self._bring = tf.function(self._build_bringing, autograph=False)
        self._parts.strategy.cluster.when_worker_rests(self._leave_out)

    def abort(self, timeout: float | None = None) -> None:
        """Stops averaging and makes the exact mean of all workers' models the model: the shared one, and everybody's.

        Waits until everything that was scheduled has finished; nothing may be scheduled meanwhile. Workers take the
        mean with their next step. Until `resume`, what they train then stays with them; another `abort` averages it.

        Args:
          timeout: of the waiting, in seconds, as in `strategy.join`.

        Raises:
          TimeoutError: not in time.
          StrategyClosedError: the strategy is closed.
          Exception: what `strategy.join` raises.
        """
        self._refuse_closed("abort")
        self._parts.strategy.join(timeout)
        present = self._present()
        if present is self:
            self._end()
        elif isinstance(present, ModelAverage):
            present.abort()

    def resume(self) -> None:
        """Goes on averaging after `abort`.

        Raises:
          StrategyClosedError: the strategy is closed.
        """
        self._refuse_closed("resume")
        present = self._present()
        if present is self:
            self._averaged.averaging.go_on()
        elif isinstance(present, ModelAverage):
            present.resume()

    def _model_copies(self, version: Any) -> ModelCopies:
        own = self._averaged.own
        generation, is_on = self._averaged.averaging.read()
        is_warming_up, clock = self._warm_up()
        is_kept, averaged_at = own.is_of(generation), own.averaged_at.read_value()
        with tf.control_dependencies([averaged_at]):
            now = tf.timestamp()
        *values, size, pulls = tf.cond(
            is_kept,
            lambda: [*own.read(), *[tf.constant(0, tf.int64)] * 2],
            lambda: self._take_shared(tf.where(is_warming_up, tf.zeros_like(generation), generation), version, now),
        )
        # Should its clock be put back, a worker must not wait until it is again as late as it was.
        since = tf.where(is_kept, tf.abs(now - averaged_at), tf.zeros_like(now))
        is_due = tf.function(decisions.is_average_due)(since, self._period, clock, self._warmup_steps)
        is_due = tf.logical_and(is_on, is_due)
        *averages, brought = tf.cond(
            is_due, lambda: self._average(values, generation, now), lambda: [*values, tf.constant(0, tf.int64)]
        )
        scalars, size_of_scalars = pull(self._parts.optimizer.scalars, [])
        return ModelCopies(
            dict(zip(own.numbers, values, strict=True)),
            scalars,
            tf.identity(version),
            size + brought + size_of_scalars,
            pulls + tf.cast(is_due, tf.int64),
            _Begun(values, averages, is_due, is_warming_up),
        )

    def _push(self, gradients: dict[int, Any], pulled: Pulled) -> Any:
        if pulled.kept is None:
            raise ValueError(
                "The model was pulled in another function. With ModelAverage, rule.pull() and rule.push() are used in "
                "one function, or push in a function inside of it."
            )
        if not self._warmup_steps:
            return self._push_own(gradients, pulled)
        return tf.cond(
            pulled.kept.is_warming_up,
            lambda: self._push_shared(gradients, pulled),
            lambda: self._push_own(gradients, pulled),
        )

    def _end(self) -> None:
        averaging = self._averaged.averaging
        averaging.stop()
        if averaging.gather(self._parts.strategy, self._bring):
            self.ledger.version.assign_add(1, read_value=False)
            self.ledger.count(updates=1)

    def _new_boards(self) -> Iterator[AverageBoard]:
        model = self._parts.model
        for part in model.parts:
            numbers = [number for number in part.numbers if number not in model.embeddings]
            if numbers:
                yield AverageBoard(
                    numbers, [model.variables[number] for number in numbers], self._parts.locks[part.device]
                )

    def _warm_up(self) -> tuple[Any, Any]:
        """Whether the shared model is trained, and the steps that the fastest worker has finished."""
        if not self._warmup_steps:
            return tf.constant(False), tf.constant(0, tf.int64)
        with tf.device(self.ledger.home):
            clock = tf.reduce_max(self.ledger.clocks.read_value())
        clock = tf.identity(clock)
        return clock < self._warmup_steps, clock

    def _take_shared(self, generation: Any, version: Any, now: Any) -> list[Any]:
        """Makes the shared model the worker's; returns its values, how many bytes they have, and 1 for one pull."""
        own = self._averaged.own
        values, size = pull([self._parts.model.variables[number] for number in own.numbers], [version])
        own.replace(values, generation, version, now)
        return [*values, size, tf.constant(1, tf.int64)]

    def _average(self, values: Sequence[Any], generation: Any, now: Any) -> list[Any]:
        """Brings the worker's model to the boards; returns the mean of all models, and how many bytes it has."""
        own, ledger = self._averaged.own, self.ledger
        averages, taken, sent, brought = self._exchange(values, generation)
        home = send([own.version.read_value(), taken], None, ledger.home).tensors
        before, is_taken = home
        with ledger.lock.hold(home):
            version = ledger.version.read_value()
            ledger.version.assign_add(tf.cast(is_taken, tf.int64), read_value=False)
            staleness = decisions.staleness(version, before)
        ledger.count(updates=is_taken, pushes=1, bytes_pushed=sent, staleness=staleness)
        own.note_averaged(version + 1, now)
        return [*averages, brought]

    def _exchange(self, values: Sequence[Any], generation: Any) -> tuple[list[Any], Any, Any, Any]:
        """Brings a model to all boards.

        Returns:
          The means, in the order of the values; whether they were taken; the bytes that were sent, and those brought.
        """
        strategy = self._parts.strategy
        own_number = [strategy.worker_index(), strategy.connection_number(), generation]
        mine = dict(zip(self._averaged.own.numbers, values, strict=True))
        averages: dict[int, Any] = {}
        taken, sent, brought = [], [], []
        for board in self._averaged.boards:
            there = send([*(mine[number] for number in board.numbers), *own_number], None, board.device)
            *values_there, worker, connection, generation_there = there.tensors
            means, is_taken = board.exchange(values_there, worker, connection, generation_there)
            back = send([*means, is_taken], board.device, None)
            averages.update(zip(board.numbers, back.tensors[:-1], strict=True))
            taken.append(back.tensors[-1])
            sent.append(there.size)
            brought.append(back.size)
        in_order = [averages[number] for number in self._averaged.own.numbers]
        return in_order, tf.reduce_all(tf.stack(taken)), tf.add_n(sent), tf.add_n(brought)

    def _push_shared(self, gradients: dict[int, Any], pulled: Pulled) -> Any:
        return super()._push(gradients, pulled)

    def _push_own(self, gradients: dict[int, Any], pulled: Pulled) -> Any:
        """Applies the gradients of a step to the worker's model, and pushes those of embeddings."""
        embeddings, begun = self._parts.model.embeddings, pulled.kept
        dense = {number: gradient for number, gradient in gradients.items() if number not in embeddings}
        rest = {number: gradient for number, gradient in gradients.items() if number in embeddings}
        rate = self._parts.optimizer.learning_rate(pulled.scalars)
        with built() as operations:
            self._averaged.own.train(dense, rate, begun.values, begun.averages, begun.is_averaged)
            if rest:
                self._push_shared(rest, pulled)
            else:
                with tf.control_dependencies(list(pulled.checks)):
                    self._parts.optimizer.count()
                [worker] = send([pulled.worker], None, self.ledger.home).tensors
                with self.ledger.lock.hold([worker]):
                    self.ledger.note_step(worker)
                self.ledger.count(worker=worker)
        with tf.control_dependencies(operations):
            return tf.constant(True)

    def _leave_out(self, index: int) -> None:
        """Takes the model of a worker that rests from the boards."""
        workers = self._parts.strategy.cluster.workers
        is_live = any(worker.index == index and worker.state is WorkerState.LIVE for worker in workers)
        for board in self._averaged.boards:
            board.remove(index, is_lost=not is_live)

    def _build_bringing(self, generation: Any) -> Any:
        """Brings the worker's model, if it has one, as one of the given generation; returns whether it did."""
        present, _ = self._averaged.averaging.read()
        own = self._averaged.own
        return tf.cond(
            own.is_of(present), lambda: self._exchange(own.read(), generation)[1], lambda: tf.constant(False)
        )


def _check(name: str, value: Any, kinds: Any, expected: str) -> None:
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise TypeError(f"{name} must be {expected}, got {value!r}.")
    if not value >= 0:
        raise ValueError(f"{name} must be {expected} that is not negative, got {value!r}.")
