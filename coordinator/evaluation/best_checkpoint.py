"""Keeps a copy of the checkpoint that did best so far, in a directory of its own.

    best_dir/best-3.index, best-3.data-*   (or best-3.weights.h5)   the copy
    best_dir/best.json                                              its result; `best_result` reads it
    best_dir/checkpoint                                             its name, for tf.train.latest_checkpoint

Promises: the copy that `best.json` names is always there and whole; a new one is written beside it under another
name, `best.json` is replaced in one step, and only then the old one is deleted. A restarted evaluator goes on from
`best.json`. A copy is taken before the evaluation, so training may delete the checkpoint during it.
"""

import contextlib
import math
import os
import pathlib
import re
from collections.abc import Iterator

from coordinator.errors import EvaluationError
from coordinator.evaluation.atomic_file import replace_text
from coordinator.evaluation.checkpoint_file import WEIGHTS_SUFFIX, CheckpointFile
from coordinator.evaluation.evaluation_result import EvaluationResult

BEST_FILE = "best.json"


def best_result(directory: str | os.PathLike[str]) -> EvaluationResult | None:
    """The best result so far, its `checkpoint` being the copy in `directory`; None if there is none yet.

    Args:
      directory: the evaluator's `best_dir`.

    Raises:
      EvaluationError: `best.json` there holds something else.
    """
    path = pathlib.Path(directory) / BEST_FILE
    try:
        return EvaluationResult.from_json(path.read_bytes())
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise EvaluationError(f"{str(path)!r} is not an evaluation result. Remove it.") from error


class BestCheckpoint:
    """The best checkpoint, by one metric. One evaluator at a time may write to its directory.

    Args:
      directory: where to keep it.
      metric: name of the metric that decides.
      mode: "min" if less is better, "max" if more is.
    """

    def __init__(self, directory: str | os.PathLike[str], metric: str, mode: str):
        if mode not in ("min", "max"):
            raise ValueError(f"best_mode must be 'min' or 'max', got {mode!r}.")
        self._directory = pathlib.Path(directory).absolute()
        self._metric = metric
        self._mode = mode
        self._best = best_result(self._directory)

    @contextlib.contextmanager
    def held(self, checkpoint: CheckpointFile) -> Iterator[str]:
        """A copy of the checkpoint for as long as the context lasts; its path. `keep` makes it stay.

        Raises:
          OSError: the checkpoint cannot be copied, or was replaced meanwhile.
        """
        self._directory.mkdir(parents=True, exist_ok=True)
        ordinal = self._best.number + 1 if self._best else 1
        try:
            yield checkpoint.copy_to(str(self._directory / f"best-{ordinal}"))
        finally:
            self._remove_others()

    def keep(self, copy: str, result: EvaluationResult) -> bool:
        """Makes a held copy the best if its result is better than the best so far; returns whether it is.

        Raises:
          EvaluationError: the result lacks the metric that decides.
        """
        if self._metric not in result.metrics:
            raise EvaluationError(
                f"best_metric {self._metric!r} is none of the metrics of {result.checkpoint!r}: "
                f"{sorted(result.metrics)}. Choose one of these."
            )
        if not self._is_better(result.metrics[self._metric]):
            return False
        number = self._best.number + 1 if self._best else 1
        best = EvaluationResult(copy, number, result.step, result.metrics, result.time, result.written_ns)
        replace_text(self._directory / BEST_FILE, best.to_json() + "\n")
        self._best = best
        state = self._directory / "checkpoint"
        if copy.endswith(WEIGHTS_SUFFIX):
            state.unlink(missing_ok=True)
        else:
            name = os.path.basename(copy)
            replace_text(state, f'model_checkpoint_path: "{name}"\nall_model_checkpoint_paths: "{name}"\n')
        return True

    def _is_better(self, value: float) -> bool:
        if math.isnan(value):
            return False
        best = self._best.metrics.get(self._metric, math.nan) if self._best else math.nan
        return math.isnan(best) or (value < best if self._mode == "min" else value > best)

    def _remove_others(self) -> None:
        kept = os.path.basename(self._best.checkpoint).removesuffix(WEIGHTS_SUFFIX) if self._best else None
        for path in self._directory.glob("best-*"):
            found = re.match(r"best-\d+(?=\.(index|data-|weights\.h5$))", path.name)
            if found and found.group() != kept:
                path.unlink(missing_ok=True)

    def __repr__(self) -> str:
        return f"BestCheckpoint({str(self._directory)!r}, {self._mode} {self._metric}, best={self._best})"
