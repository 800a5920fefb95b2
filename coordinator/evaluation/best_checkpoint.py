"""The best checkpoint, copied to a separate directory.

    best_dir/best-3.index, best-3.data-*   (or best-3.weights.h5)   the copy
    best_dir/best.json                                              its result, for `best_result`
    best_dir/checkpoint                                             its name, for tf.train.latest_checkpoint

Promises:
  * The copy that `best.json` names always exists and is complete. A new copy gets a new name; then `best.json` is
    replaced in one step; only then the old copy is deleted. A restarted evaluator continues from `best.json`.
  * The checkpoint is copied before its evaluation, so training may delete it meanwhile.
"""

import contextlib
import math
import os
import re
from collections.abc import Iterator

import tensorflow as tf

from coordinator.errors import EvaluationError
from coordinator.evaluation.checkpoint_file import WEIGHTS_SUFFIX, CheckpointFile, remove
from coordinator.evaluation.status_files import BEST_FILE, EvaluationResult, best_result, replace_text
from coordinator.paths import checkpoint_path, is_url


class BestCheckpoint:
    """The best checkpoint by one metric. Only one evaluator at a time may use its directory.

    Args:
      directory: where the copy is stored.
      metric: name of the metric to compare.
      mode: "min" if lower is better, "max" if higher is.

    Raises:
      ValueError: the mode is unknown, or TensorFlow does not find checkpoints in such a directory.
      EvaluationError: `best.json` in the directory is not an evaluation result.
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
        """A context that yields the path of a copy of the checkpoint, and deletes it unless `offer` accepted it.

        Raises:
          OSError, tf.errors.OpError: the checkpoint cannot be copied, or was replaced while it was copied.
        """
        tf.io.gfile.makedirs(self._directory)
        try:
            yield checkpoint.copy_to(os.path.join(self._directory, f"best-{self._next_number()}"))
        finally:
            self._remove_others()

    def offer(self, copy: str, result: EvaluationResult) -> bool:
        """Makes a copy the best if its result is better than the best so far. Returns True if it is.

        Raises:
          EvaluationError: the result lacks the metric to compare.
        """
        if self._metric not in result.metrics:
            raise EvaluationError(
                f"best_metric {self._metric!r} is none of the metrics of {result.checkpoint!r}: "
                f"{sorted(result.metrics)}. Choose one of these."
            )
        if not self._is_better(result.metrics[self._metric]):
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

    def _is_better(self, value: float) -> bool:
        if math.isnan(value):
            return False
        best = self._best.metrics.get(self._metric, math.nan) if self._best else math.nan
        return math.isnan(best) or (value < best if self._mode == "min" else value > best)

    def _remove_others(self) -> None:
        best = os.path.basename(self._best.checkpoint).removesuffix(WEIGHTS_SUFFIX) if self._best else None
        for name in tf.io.gfile.listdir(self._directory):
            found = re.match(r"best-\d+(?=\.(index|data-|weights\.h5$))", name)
            if found and found.group() != best:
                remove(os.path.join(self._directory, name))
