"""Sidecar evaluation: the evaluation loop in a process of its own, beside training.

    client ----checkpoints, marker---> checkpoint directory ---newest checkpoint---> SidecarEvaluator
                                       evaluations.jsonl <--one line per evaluation--/

After the section on evaluation of the TensorFlow RFC "Single-client Parameter Server Training" (2020): training is not
held up by evaluation, and evaluation takes each time the newest checkpoint there is.

Promises:
  * No checkpoint is evaluated twice, also not by a restarted evaluator: what `evaluations.jsonl` holds is done. (A
    kill between the evaluation and its line makes it be evaluated again.) Checkpoints may be skipped.
  * Every variable that is evaluated came from the checkpoint; one that does not fit is an error, never a random value.
  * It ends by itself: when training said that it has ended (`mark_training_finished`) and the last checkpoint is
    evaluated, at `max_evaluations`, when `stop` is set, or with an error. `training_marker` says what becomes of a
    marker that an earlier training left.
  * It prints nothing; what it waits for is in the log `coordinator`.
"""

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from coordinator.errors import EvaluationError
from coordinator.evaluation.best_checkpoint import BestCheckpoint
from coordinator.evaluation.checkpoint_loader import CheckpointLoader
from coordinator.evaluation.checkpoint_loaders import KerasModelLoader
from coordinator.evaluation.checkpoint_watch import SETTLING_TIME, CheckpointWatch
from coordinator.evaluation.evaluation_record import EvaluationRecord
from coordinator.evaluation.evaluation_result import EvaluationResult
from coordinator.evaluation.evaluation_summary import EvaluationSummary
from coordinator.evaluation.keras_evaluation import KerasEvaluation
from coordinator.evaluation.metrics import flat_metrics
from coordinator.evaluation.next_move import Move, Situation, next_move
from coordinator.evaluation.trackable_loader import TrackableLoader
from coordinator.evaluation.wait_report import WaitReport, awaited

_LOG = logging.getLogger("coordinator")

# What reading a checkpoint raises that is half written, or deleted meanwhile: the last two are those of TensorFlow's
# reader and of HDF5.
_UNREADABLE = (tf.errors.OpError, OSError, IndexError, KeyError)


class SidecarEvaluator:
    """Evaluates the checkpoints of a directory as training writes them.

    Either a compiled Keras model with its data:

        SidecarEvaluator(model, data=dataset, checkpoint_dir=directory).start()

    or any `tf.Module`, or a `tf.train.Checkpoint` with training's names, with a function that evaluates it:

        SidecarEvaluator(module, None, directory, evaluate=lambda step: {"loss": ...}).start()

    Args:
      model: what checkpoints are loaded into. Training saves it as `tf.train.Checkpoint(model=model,
        optimizer=optimizer)`, by a `CheckpointManager` or by `save`; a Keras model also by
        `keras.callbacks.ModelCheckpoint(save_weights_only=True)`.
      data: what a Keras model is evaluated on: a `tf.data.Dataset`, or whatever `keras.Model.evaluate` takes.
      checkpoint_dir: the directory; it need not exist yet, and is on a file system that both processes see.
      steps: how many batches make one evaluation; None for a full pass over `data`.
      max_evaluations: end after a checkpoint whose number is this or more (`ckpt-12` has number 12; checkpoints
        whose names end in no number are counted); None for no such limit.
      callbacks: Keras callbacks for `model.evaluate`; `model.optimizer.iterations` is the trained step for them.
      evaluate: called with the trained step instead of `model.evaluate`; returns metric names and numbers.
      on_evaluation: called with each `EvaluationResult`, after it is in the results file.
      log_dir: where to write TensorBoard summaries of the metrics, if anywhere.
      best_dir: where to keep a copy of the best checkpoint, if anywhere (`best_checkpoint`).
      best_metric: the metric that decides which is best.
      best_mode: "min" if less of it is better, "max" if more is.
      poll_interval: seconds between two looks at the directory.
      advice_after: seconds without a new checkpoint after which the log gives advice; also how long the last
        checkpoint of a finished training may stay unreadable before that is an error.
      new_training_grace: seconds after the start for which an end that was found at the start is doubted: the marker
        or the checkpoints of an earlier training, which a new one may be about to replace.
      stop: set it, from any thread, to end the evaluator after the evaluation that runs; see also `stop()`.

    Raises:
      ValueError: an argument is out of range, or does not go with another.
    """

    def __init__(  # noqa: PLR0913 - one argument for each thing that a user may choose, by name
        self,
        model: Any,
        data: Any,
        checkpoint_dir: str | os.PathLike[str],
        *,
        steps: int | None = None,
        max_evaluations: int | None = None,
        callbacks: Sequence[keras.callbacks.Callback] | None = None,
        evaluate: Callable[[int], Mapping[str, Any]] | None = None,
        on_evaluation: Callable[[EvaluationResult], object] | None = None,
        log_dir: str | os.PathLike[str] | None = None,
        best_dir: str | os.PathLike[str] | None = None,
        best_metric: str = "loss",
        best_mode: str = "min",
        poll_interval: float = 1.0,
        advice_after: float = 30.0,
        new_training_grace: float = 10.0,
        stop: threading.Event | None = None,
    ):
        _check_positive(
            steps=steps, max_evaluations=max_evaluations, poll_interval=poll_interval, advice_after=advice_after
        )
        if new_training_grace < 0:
            raise ValueError(f"new_training_grace must be a number of seconds of at least 0, got {new_training_grace}.")
        if best_dir is not None and os.path.realpath(best_dir) == os.path.realpath(checkpoint_dir):
            raise ValueError(f"best_dir must be another directory than checkpoint_dir, got {os.fspath(best_dir)!r}.")
        self._loader: CheckpointLoader = (
            KerasModelLoader(model, data) if isinstance(model, keras.Model) else TrackableLoader(model)
        )
        self._evaluate = _evaluation(model, data, evaluate, steps, callbacks or ())
        summary = None if log_dir is None else EvaluationSummary(log_dir)
        best = None if best_dir is None else BestCheckpoint(best_dir, best_metric, best_mode)
        self._record = EvaluationRecord(checkpoint_dir, summary, best, on_evaluation)
        self._directory = os.fspath(checkpoint_dir)
        self._max_evaluations = max_evaluations
        self._poll_interval = poll_interval
        self._advice_after = advice_after
        self._grace = new_training_grace
        self._stop = stop or threading.Event()

    def start(self, timeout: float | None = None) -> list[EvaluationResult]:
        """Evaluates, in the calling thread, until there is nothing more to come.

        Args:
          timeout: seconds after which to give up; an evaluation that runs by then is finished first. None for none.

        Returns:
          The results made by this call, oldest first; `coordinator.evaluation.results` gives all of the directory.

        Raises:
          EvaluationError: the model has nothing to load into, or is not compiled; a checkpoint does not fit it, or
            holds no counter of training steps; the last checkpoint stays unreadable.
          TimeoutError: the timeout has passed; the message says what was awaited.
          tf.errors.UnavailableError: a server that the model's variables are on went away.
          Exception: whatever `evaluate`, a callback or `on_evaluation` raises, as it is.
        """
        deadline = math.inf if timeout is None else time.monotonic() + timeout
        self._loader.require_variables()
        if isinstance(self._evaluate, KerasEvaluation):
            self._evaluate.require_compiled()
        watch = CheckpointWatch(
            self._directory,
            self._record.read(),
            max_evaluations=self._max_evaluations,
            new_training_grace=self._grace,
            patience=self._advice_after,
        )
        try:
            return self._evaluate_until_end(watch, deadline)
        finally:
            self._record.close()

    def stop(self) -> None:
        """Ends the evaluator, from any thread, after the evaluation that runs."""
        self._stop.set()

    def _evaluate_until_end(self, watch: CheckpointWatch, deadline: float) -> list[EvaluationResult]:
        report = WaitReport(self._directory, self._advice_after)
        made: list[EvaluationResult] = []
        while (situation := self._look(watch)) is not None:
            if time.monotonic() >= deadline:
                raise TimeoutError(f"The evaluator {awaited(situation, self._directory)}, and its time is over.")
            result = self._evaluate_newest(situation, watch)
            if result is not None:
                made.append(result)
                report.note_progress()
                continue
            report.note_wait(situation)
            pause = min(self._poll_interval, SETTLING_TIME) if situation.is_settling else self._poll_interval
            self._stop.wait(min(pause, max(0.0, deadline - time.monotonic())))
        return made

    def _look(self, watch: CheckpointWatch) -> Situation | None:
        """The situation; None if the evaluator ends in it."""
        situation = watch.look(self._stop.is_set())
        move = next_move(situation)
        if move is Move.GIVE_UP and situation.newest is not None:
            raise EvaluationError(
                f"Training has finished, and its last checkpoint {situation.newest.path!r} could not be read for "
                f"{self._advice_after:g} s. It is damaged, or was deleted in part."
            )
        if move is not Move.END:
            return situation
        if situation.newest is None and not situation.is_stopped:
            _LOG.warning("Evaluator: training finished without any checkpoint in %r.", self._directory)
        return None

    def _evaluate_newest(self, situation: Situation, watch: CheckpointWatch) -> EvaluationResult | None:
        """Evaluates the newest checkpoint; None if that is not the next move, or it cannot be read now."""
        checkpoint = situation.newest
        if checkpoint is None or next_move(situation) is not Move.EVALUATE:
            return None
        with contextlib.ExitStack() as stack:
            try:
                path = stack.enter_context(self._record.held(checkpoint))
                step = self._loader.load(checkpoint, path)
                if path == checkpoint.path and not checkpoint.is_keras_weights:
                    checkpoint.require_unchanged()  # else what was loaded is newer than what it would be called
            except tf.errors.UnavailableError:
                raise
            except _UNREADABLE as error:
                if watch.note_unreadable(checkpoint):
                    _LOG.warning("Evaluator: %r cannot be read now, and is tried again: %s", checkpoint.path, error)
                return None
            _LOG.info("Evaluation of %r begins, at step %d.", checkpoint.path, step)
            metrics = flat_metrics(self._evaluate(step))
            number = watch.evaluations + 1 if checkpoint.number is None else checkpoint.number
            result = EvaluationResult(checkpoint.path, number, step, metrics, time.time(), checkpoint.written_ns)
            self._record.add(result, path)
        watch.note_result(checkpoint, result)
        return result

    def __repr__(self) -> str:
        return f"SidecarEvaluator({self._loader!r}, {self._directory!r})"


def _check_positive(**values: float | None) -> None:
    for name, value in values.items():
        if value is not None and value <= 0:
            raise ValueError(f"{name} must be above 0, got {value!r}.")


def _evaluation(
    model: Any,
    data: Any,
    evaluate: Callable[[int], Mapping[str, Any]] | None,
    steps: int | None,
    callbacks: Sequence[keras.callbacks.Callback],
) -> Callable[[int], Mapping[str, Any]]:
    """What evaluates: the user's function if there is one, else the Keras model itself."""
    if evaluate is not None:
        if steps is not None or callbacks:
            raise ValueError("steps and callbacks are for model.evaluate; leave them out where evaluate= is given.")
        return evaluate
    if not isinstance(model, keras.Model):
        raise ValueError(f"A {type(model).__name__} is evaluated by a function of yours: pass evaluate=.")
    return KerasEvaluation(model, data, steps, callbacks)
