"""Where the results of one evaluator go: the best checkpoint, summaries, the results file, the user's callback.

Promise: the line in the results file comes last of what is written, since it is what makes a checkpoint done: an
evaluator that is killed before it evaluates that checkpoint again.
"""

import contextlib
import logging
import os
from collections.abc import Callable, Iterator

from coordinator.evaluation.best_checkpoint import BestCheckpoint
from coordinator.evaluation.checkpoint_file import CheckpointFile
from coordinator.evaluation.evaluation_result import EvaluationResult
from coordinator.evaluation.evaluation_summary import EvaluationSummary
from coordinator.evaluation.results_file import ResultsFile

_LOG = logging.getLogger("coordinator")


class EvaluationRecord:
    """Writes results down.

    Args:
      directory: the checkpoint directory, which has the results file.
      summary: writes TensorBoard summaries, if wanted.
      best: keeps the best checkpoint, if wanted.
      on_evaluation: called with each result once it is written down, if wanted.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        summary: EvaluationSummary | None,
        best: BestCheckpoint | None,
        on_evaluation: Callable[[EvaluationResult], object] | None,
    ):
        self._file = ResultsFile(directory)
        self._summary = summary
        self._best = best
        self._on_evaluation = on_evaluation

    def read(self) -> list[EvaluationResult]:
        """All results of the directory, earlier evaluators' included."""
        return self._file.read()

    @contextlib.contextmanager
    def held(self, checkpoint: CheckpointFile) -> Iterator[str]:
        """Where to read the checkpoint while the context lasts: a copy if it may become the best, else itself.

        Raises:
          OSError: it cannot be copied.
        """
        if self._best is None:
            yield checkpoint.path
            return
        with self._best.held(checkpoint) as copy:
            yield copy

    def add(self, result: EvaluationResult, path: str) -> None:
        """Adds a result.

        Args:
          result: the result.
          path: the checkpoint, as `held` gave it.
        """
        if self._summary is not None:
            self._summary.write(result)
        if self._best is not None and self._best.keep(path, result):
            _LOG.info("Evaluator: %r is the best so far.", result.checkpoint)
        self._file.append(result)
        metrics = ", ".join(f"{name}: {value:g}" for name, value in result.metrics.items())
        _LOG.info("End of evaluation of %r at step %d. Metrics: %s", result.checkpoint, result.step, metrics)
        if self._on_evaluation is not None:
            self._on_evaluation(result)

    def close(self) -> None:
        """Closes the file of summaries; a further result opens another."""
        if self._summary is not None:
            self._summary.close()

    def __repr__(self) -> str:
        return f"EvaluationRecord({self._file!r}, {self._summary!r}, {self._best!r})"
