"""Sidecar evaluation: an evaluation loop in a separate process, next to training.

    client ----checkpoints, marker---> checkpoint directory ---newest checkpoint---> SidecarEvaluator
                                       evaluations.jsonl <--one line per evaluation--/

    best_dir/best-3.index, best-3.data-*   (or best-3.weights.h5)   a copy of the best checkpoint
    best_dir/best.json                                              its result, for `best_result`
    best_dir/checkpoint                                             its name, for tf.train.latest_checkpoint

The design follows the section on evaluation in the TensorFlow RFC "Single-client Parameter Server Training" (2020):
evaluation does not delay training, and always takes the newest checkpoint.

Promises:
  * No checkpoint is evaluated twice, not even by a restarted evaluator, because `evaluations.jsonl` lists the evaluated
    checkpoints. A line is written after its evaluation. If the evaluator is killed before it has written the line, the
    checkpoint is evaluated again. Checkpoints may be skipped.
  * Every evaluated variable was loaded from the checkpoint. A variable that does not fit raises an error, and is never
    evaluated with its random initial value.
  * The evaluator ends by itself: when training has finished (`mark_training_finished`) and the last checkpoint is
    evaluated, at `max_evaluations`, when `stop` is set, or with an error. `status_files` describes the effect of a
    marker that an earlier training left.
  * The evaluator prints nothing; the log `coordinator` says what the evaluator waits for.
  * A model that was created in the scope of a `ParameterServerStrategy` is evaluated on the strategy's workers. Each
    example counts once, even if workers die. A lost parameter server that returns gets the same checkpoint's values.
  * The copy that `best.json` names always exists and is complete. A new copy gets a new name, then `best.json` is
    replaced in one step, and only then the old copy is deleted. A restarted evaluator continues from `best.json`.
  * With `best_dir`, the checkpoint is copied before its evaluation, so training may delete it during the evaluation.
"""

import contextlib
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from coordinator.addresses import checkpoint_path, is_url, path_text
from coordinator.clock import SYSTEM_CLOCK
from coordinator.data.source import without_autotuning
from coordinator.errors import EvaluationError
from coordinator.evaluation.checkpoint_loader import CheckpointLoader
from coordinator.evaluation.checkpoint_watch import (
    SETTLING_TIME,
    WEIGHTS_SUFFIX,
    CheckpointFile,
    CheckpointWatch,
    Move,
    awaited,
    next_move,
    remove,
)
from coordinator.evaluation.status_files import BEST_FILE, EvaluationResult, append_result, best_result, replace_text
from coordinator.options import check_number
from coordinator.ps_strategy.parameter_server_strategy import ParameterServerStrategy

_logger = logging.getLogger("coordinator")

# Errors when an incomplete or deleted checkpoint is read. TensorFlow may raise IndexError, and h5py KeyError.
_UNREADABLE = (tf.errors.OpError, OSError, IndexError, KeyError)


class BestCheckpoint:
    """The best checkpoint by one metric. Only one evaluator at a time may use its directory.

    Raises ValueError if the mode is not "min" or "max", or if TensorFlow does not find checkpoints in such a directory.
    Raises EvaluationError if `best.json` in the directory is not an evaluation result.
    """

    def __init__(self, directory: str | os.PathLike[str], metric: str, mode: str):
        if mode not in ("min", "max"):
            raise ValueError(f"best_mode must be 'min' or 'max', got {mode!r}.")
        path = checkpoint_path(directory)
        self._directory = path if is_url(path) else os.path.abspath(path)
        self._metric = metric
        self._mode = mode
        self._best = best_result(self._directory)

    @contextlib.contextmanager
    def copied(self, checkpoint: CheckpointFile) -> Iterator[str]:
        """Yields the path of a copy of the checkpoint; deletes the copy at the end unless `offer` has accepted it.

        Raises `OSError` or `tf.errors.OpError` if the checkpoint cannot be copied, or was replaced during the copy.
        """
        tf.io.gfile.makedirs(self._directory)
        try:
            yield checkpoint.copy_to(os.path.join(self._directory, f"best-{self._next_number()}"))
        finally:
            best = os.path.basename(self._best.checkpoint).removesuffix(WEIGHTS_SUFFIX) if self._best else None
            for name in tf.io.gfile.listdir(self._directory):
                found = re.match(r"best-\d+(?=\.(index|data-|weights\.h5$))", name)
                if found and found.group() != best:
                    remove(os.path.join(self._directory, name))

    def offer(self, copy: str, result: EvaluationResult) -> bool:
        """Makes a copy the best if its result is better than the best so far; returns whether the result is better.

        Raises EvaluationError if the result lacks the metric.
        """
        if self._metric not in result.metrics:
            raise EvaluationError(
                f"best_metric {self._metric!r} is none of the metrics of {result.checkpoint!r}: "
                f"{sorted(result.metrics)}. Choose one of these."
            )
        value = result.metrics[self._metric]
        former = self._best.metrics.get(self._metric, math.nan) if self._best else math.nan
        is_better = math.isnan(former) or (value < former if self._mode == "min" else value > former)
        if math.isnan(value) or not is_better:
            return False
        best = EvaluationResult(copy, self._next_number(), result.step, result.metrics, result.time, result.written_ns)
        replace_text(os.path.join(self._directory, BEST_FILE), best.to_json() + "\n")
        self._best = best
        state = os.path.join(self._directory, "checkpoint")
        if copy.endswith(WEIGHTS_SUFFIX):
            remove(state)
        else:
            name = os.path.basename(copy)
            replace_text(state, f'model_checkpoint_path: "{name}"\nall_model_checkpoint_paths: "{name}"\n')
        return True

    def _next_number(self) -> int:
        return self._best.number + 1 if self._best else 1


class SidecarEvaluator:
    """Evaluates the checkpoints in a directory as training writes them.

    An evaluator evaluates either a compiled Keras model with its data:

        SidecarEvaluator(model, data=dataset, checkpoint_dir=directory).start()

    or any `tf.Module`, or a `tf.train.Checkpoint` with the names that training uses, with a function that evaluates it:

        SidecarEvaluator(module, None, directory, evaluate=lambda step: {"loss": ...}).start()

    If the evaluator has a separate cluster (`coordinator run --evaluator-workers`), create the model in the scope of a
    strategy of this cluster, whose workers then evaluate the model:

        with coordinator.ParameterServerStrategy(resolver) as strategy:
            with strategy.scope():
                model = build_model()
            SidecarEvaluator(model, data=source, checkpoint_dir=directory).start()

    Args:
      model: the object into which checkpoints are loaded. Training saves it as `tf.train.Checkpoint(model=model,
        optimizer=optimizer)`, with a `CheckpointManager` or with `save`; a Keras model also with
        `keras.callbacks.ModelCheckpoint(save_weights_only=True)`.
      data: the evaluation data of a Keras model: a `tf.data.Dataset`, or anything that `keras.Model.evaluate` takes.
        For a model of a strategy also a source of `coordinator.data` or a dataset function, which the workers read.
      checkpoint_dir: the checkpoint directory, on a file system that both processes share; all directories may be URLs
        that TensorFlow reads, such as `gs://bucket/run`. The checkpoint directory need not exist yet.
      batch_size: the batch size for arrays and sources; None for 32.
      steps: number of batches in one evaluation; None for a full pass over `data`.
      max_evaluations: end after a checkpoint with this number or a higher one (`ckpt-12` has number 12; checkpoints
        whose names end in no number are counted); None for no limit.
      callbacks: Keras callbacks for `model.evaluate`. They find the training step in `model.optimizer.iterations`.
      evaluate: called with the training step instead of `model.evaluate`; returns metric names and numbers.
      on_evaluation: called with each `EvaluationResult` after it is in the results file.
      log_dir: directory for TensorBoard summaries of the metrics; None for no summaries. If the directory is next to
        the summaries of training, TensorBoard draws both in one chart.
      best_dir: directory for a copy of the best checkpoint; None for no copy.
      best_metric: name of the metric that decides which checkpoint is best.
      best_mode: "min" if a lower value is better, "max" if a higher one is.
      poll_interval: seconds between two checks of the directory.
      advice_after: seconds without a new checkpoint until advice is logged. If the last checkpoint of a finished
        training is unreadable for longer, an error is raised.
      new_training_grace: seconds after the start during which the evaluator does not end because of a marker or
        checkpoints that it found at the start: a new training may be about to replace them.
      stop: an event that ends the evaluator after the current evaluation; any thread may set it. See also `stop()`.

    Raises:
      ValueError: an argument is out of range, or cannot be combined with another.
    """

    _clock = SYSTEM_CLOCK

    def __init__(  # noqa: PLR0913 - one keyword argument per setting
        self,
        model: Any,
        data: Any,
        checkpoint_dir: str | os.PathLike[str],
        *,
        batch_size: int | None = None,
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
        for name, count in (("batch_size", batch_size), ("steps", steps), ("max_evaluations", max_evaluations)):
            if count is not None:
                check_number(name, count, above=0)
        check_number("poll_interval", poll_interval, above=0, maximum=math.inf, unit="seconds")
        check_number("advice_after", advice_after, above=0, maximum=math.inf, unit="seconds")
        check_number("new_training_grace", new_training_grace, minimum=0, maximum=math.inf, unit="seconds")
        self._directory = checkpoint_path(checkpoint_dir)
        self._log_dir = None if log_dir is None else path_text(log_dir)
        if best_dir is not None and os.path.realpath(best_dir) == os.path.realpath(checkpoint_dir):
            raise ValueError(f"best_dir must be another directory than checkpoint_dir, got {os.fspath(best_dir)!r}.")
        if evaluate is not None and (batch_size is not None or steps is not None or callbacks):
            raise ValueError(
                "batch_size, steps and callbacks are for model.evaluate; leave them out if evaluate= is given."
            )
        if evaluate is None and not isinstance(model, keras.Model):
            raise ValueError(f"A {type(model).__name__} has no `evaluate`: pass a function as evaluate=.")
        self._data = data = _checked(data, steps) if isinstance(data, tf.data.Dataset) else data
        self._model, self._steps, self._callbacks = model, steps, list(callbacks or ())
        self._batch_size, self._evaluate = batch_size, evaluate
        strategy = getattr(model, "distribute_strategy", None)
        self._strategy = strategy if isinstance(strategy, ParameterServerStrategy) else None
        # The checkpoint that is being evaluated, and the path where it is read.
        self._current: tuple[CheckpointFile, str] | None = None
        # Whether a parameter server has lost the values of this checkpoint, and they cannot be loaded again.
        self._are_values_lost = False
        self._loader = CheckpointLoader(model, data)
        self._best = None if best_dir is None else BestCheckpoint(best_dir, best_metric, best_mode)
        self._summaries: tf.summary.SummaryWriter | None = None
        self._on_evaluation = on_evaluation
        self._max_evaluations = max_evaluations
        self._poll_interval = poll_interval
        self._advice_after = advice_after
        self._grace = new_training_grace
        self._stop = stop or threading.Event()

    def start(self, timeout: float | None = None) -> list[EvaluationResult]:
        """Runs the evaluation loop in the calling thread until it ends.

        Args:
          timeout: seconds after which to raise `TimeoutError`; a running evaluation is finished first. None for no
            limit.

        Returns:
          The results of this call, oldest first. `coordinator.evaluation.results` returns all results in the directory.

        Raises:
          EvaluationError: the model has no variables to load, or is not compiled; a checkpoint does not fit it, or
            holds no counter of training steps; the last checkpoint stays unreadable.
          TimeoutError: the timeout has passed; the message says what was awaited.
          ParameterServerLost: a parameter server of the model's strategy was lost, and did not return in time.
          tf.errors.UnavailableError: a server with the variables of an object that is no Keras model is unreachable.
          Exception: any exception of `evaluate`, a callback or `on_evaluation`, unchanged.
        """
        deadline = math.inf if timeout is None else self._clock.now() + timeout
        self._loader.require_variables()
        if self._evaluate is None and not self._model.compiled:
            raise EvaluationError(
                f"The model {self._model.name!r} is not compiled, so it has no loss and metrics to evaluate. Compile "
                "it, or pass evaluate=."
            )
        if self._strategy is not None:
            self._strategy.restore_from(self._load_again)
        watch = CheckpointWatch(
            self._directory,
            max_evaluations=self._max_evaluations,
            new_training_grace=self._grace,
            advice_after=self._advice_after,
            clock=self._clock,
        )
        try:
            return self._evaluate_until_end(watch, deadline)
        finally:
            if self._summaries is not None:
                self._summaries.close()
                self._summaries = None

    def stop(self) -> None:
        """Ends the evaluator after the current evaluation. May be called from any thread."""
        self._stop.set()

    def _evaluate_until_end(self, watch: CheckpointWatch, deadline: float) -> list[EvaluationResult]:
        added: list[EvaluationResult] = []
        while (move := next_move(situation := watch.look(self._stop.is_set()))) is not Move.END:
            newest = situation.newest
            if move is Move.FAIL and newest is not None:
                raise EvaluationError(
                    f"Training has finished, and its last checkpoint {newest.path!r} could not be read for "
                    f"{self._advice_after:g} s. It is damaged, or partly deleted."
                )
            if self._clock.now() >= deadline:
                raise TimeoutError(f"The evaluator timed out while waiting {awaited(situation, self._directory)}.")
            if move is Move.EVALUATE and newest is not None and (result := self._evaluate_checkpoint(newest, watch)):
                added.append(result)
                continue
            watch.report_wait(situation)
            pause = min(self._poll_interval, SETTLING_TIME) if situation.is_settling else self._poll_interval
            self._clock.wait(self._stop, min(pause, max(0.0, deadline - self._clock.now())))
        if situation.newest is None and not situation.is_stopped:
            _logger.warning("Training finished without a checkpoint in %r: nothing to evaluate.", self._directory)
        return added

    def _evaluate_checkpoint(self, checkpoint: CheckpointFile, watch: CheckpointWatch) -> EvaluationResult | None:
        """Evaluates a checkpoint; returns None if it is unreadable."""
        with contextlib.ExitStack() as stack:
            try:
                # Reads a copy if the checkpoint may become the best.
                path = checkpoint.path if self._best is None else stack.enter_context(self._best.copied(checkpoint))
                self._current, self._are_values_lost = (checkpoint, path), False
                step = self._loader.load(checkpoint, path)
                if path == checkpoint.path and not checkpoint.is_keras_weights:
                    checkpoint.require_unchanged()  # If it was replaced, the loaded values may be newer.
            except tf.errors.UnavailableError:
                if self._strategy is None:
                    raise
                # Waits for the parameter server; `join` raises an error if the server does not return.
                self._strategy.join()
                return None
            except _UNREADABLE as error:
                self._current = None
                if watch.add_unreadable(checkpoint):
                    _logger.warning("Evaluator cannot read %r and will try again: %s", checkpoint.path, error)
                return None
            _logger.info("Start of evaluation of %r at step %d.", checkpoint.path, step)
            metrics = flat_metrics(self._evaluate_model() if self._evaluate is None else self._evaluate(step))
            self._current = None
            if self._are_values_lost:
                text = "The result of %r is not used: its values were lost with a parameter server, and it is gone."
                _logger.warning(text, checkpoint.path)
                return None
            number = watch.evaluations + 1 if checkpoint.number is None else checkpoint.number
            result = EvaluationResult(checkpoint.path, number, step, metrics, time.time(), checkpoint.written_ns)
            self._write(result, path)
        watch.add_result(checkpoint, result)
        return result

    def _load_again(self) -> str | None:
        """Loads the checkpoint that is being evaluated into variables that were lost; returns its path."""
        if self._current is None:
            return None
        checkpoint, path = self._current
        try:
            self._loader.load(checkpoint, path)
            if path == checkpoint.path:
                checkpoint.require_unchanged()
        except tf.errors.UnavailableError:
            raise
        except _UNREADABLE:
            self._are_values_lost = True
        return checkpoint.path

    def _evaluate_model(self) -> Mapping[str, Any]:
        settings = {"batch_size": self._batch_size, "steps": self._steps, "callbacks": self._callbacks}
        return self._model.evaluate(self._data, **settings, verbose=0, return_dict=True)

    def _write(self, result: EvaluationResult, path: str) -> None:
        """Writes a result; its checkpoint was read at `path`."""
        if self._log_dir is not None:
            # Created with the first result, so that an evaluator without results leaves no file.
            self._summaries = self._summaries or tf.summary.create_file_writer(self._log_dir)
            with self._summaries.as_default(step=result.step):
                for name, value in result.metrics.items():
                    tf.summary.scalar(name, value)
            self._summaries.flush()
        if self._best is not None and self._best.offer(path, result):
            _logger.info("Evaluator: %r is the best checkpoint so far.", result.checkpoint)
        append_result(self._directory, result)
        metrics = ", ".join(f"{name}: {value:g}" for name, value in result.metrics.items())
        _logger.info("End of evaluation of %r at step %d. Metrics: %s", result.checkpoint, result.step, metrics)
        if self._on_evaluation is not None:
            self._on_evaluation(result)


def _checked(dataset: tf.data.Dataset, steps: int | None) -> tf.data.Dataset:
    """Returns a dataset to evaluate with; raises ValueError if `steps` must count its batches."""
    if steps is None and dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ValueError("The dataset is endless, so its evaluation would never end. Give steps=.")
    return without_autotuning(dataset)


def flat_metrics(metrics: Any) -> dict[str, float]:
    """Flattens metrics to names and numbers.

    `metrics` maps names to numbers, to scalar tensors or arrays, or to mappings of such metrics, which are then named
    `outer/inner`. Raises EvaluationError for anything else.
    """
    if not isinstance(metrics, Mapping):
        raise EvaluationError(f"`evaluate` must return a dict of metric names to numbers, got {metrics!r}.")
    flat: dict[str, float] = {}
    for name, value in metrics.items():
        if isinstance(value, Mapping):
            flat.update({f"{name}/{inner}": number for inner, number in flat_metrics(value).items()})
            continue
        try:
            flat[str(name)] = float(value)
        except (TypeError, ValueError) as error:
            raise EvaluationError(f"The metric {name!r} is not one number: {value!r}.") from error
    return flat
