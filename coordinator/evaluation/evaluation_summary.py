"""Writes results as TensorBoard summaries: one scalar per metric, under its own name, at the trained step."""

import os

import tensorflow as tf

from coordinator.evaluation.evaluation_result import EvaluationResult


class EvaluationSummary:
    """Summaries in one directory. The file is made with the first result.

    Args:
      log_dir: the directory. Beside those of training, TensorBoard draws both in one chart.
    """

    def __init__(self, log_dir: str | os.PathLike[str]):
        self._log_dir = os.fspath(log_dir)
        self._writer: tf.summary.SummaryWriter | None = None

    def write(self, result: EvaluationResult) -> None:
        """Adds a result; it is in the file when this returns."""
        if self._writer is None:
            self._writer = tf.summary.create_file_writer(self._log_dir)
        with self._writer.as_default(step=result.step):
            for name, value in result.metrics.items():
                tf.summary.scalar(name, value)
        self._writer.flush()

    def close(self) -> None:
        """Closes the file; a later result opens a new one."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def __repr__(self) -> str:
        return f"EvaluationSummary({self._log_dir!r})"
