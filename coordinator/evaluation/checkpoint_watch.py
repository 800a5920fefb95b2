"""Watches a checkpoint directory for one evaluator: what is there, what is done, how long nothing has changed."""

import os
import time

from coordinator.evaluation.checkpoint_file import CheckpointFile
from coordinator.evaluation.checkpoint_source import CheckpointSource
from coordinator.evaluation.evaluation_result import EvaluationResult
from coordinator.evaluation.next_move import Situation
from coordinator.evaluation.training_marker import read_marker

# A weights file is taken when it has not changed for this long, in seconds. Training's lock on it cannot be tried
# instead: trying takes the lock, and training that begins to write at that moment would fail.
SETTLING_TIME = 0.2


class CheckpointWatch:
    """Looks at a directory, from the moment when it is made.

    Args:
      directory: the checkpoint directory.
      known: results of earlier evaluations of it.
      max_evaluations: see `Situation`.
      new_training_grace: seconds for which an end found at the start is doubted.
      patience: seconds after which an unreadable checkpoint is not believed to become readable.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        known: list[EvaluationResult],
        *,
        max_evaluations: int | None,
        new_training_grace: float,
        patience: float,
    ):
        self._source = CheckpointSource(directory)
        self._results = {(os.path.basename(result.checkpoint), result.written_ns): result for result in known}
        self._max_evaluations = max_evaluations
        self._grace = new_training_grace
        self._patience = patience
        self._started = time.monotonic()
        self._marker_at_start = read_marker(directory)
        self._already_done = self._source.newest()
        if self._already_done is not None and self._already_done.identity not in self._results:
            self._already_done = None
        self._newest: CheckpointFile | None = None
        self._newest_since = 0.0
        self._unreadable: CheckpointFile | None = None
        self._unreadable_since = 0.0

    @property
    def evaluations(self) -> int:
        """How many results the directory has."""
        return len(self._results)

    def look(self, is_stopped: bool = False) -> Situation:
        """What is there now."""
        now = time.monotonic()
        marker = read_marker(self._source.directory)  # before the checkpoints: see `Situation.marker`
        newest = self._source.newest()
        if newest != self._newest:
            self._newest, self._newest_since = newest, now
        return Situation(
            newest=newest,
            result=self._results.get(newest.identity) if newest else None,
            marker=marker,
            is_stopped=is_stopped,
            max_evaluations=self._max_evaluations,
            marker_at_start=self._marker_at_start,
            newest_at_start=self._already_done,
            is_settling=newest is not None and newest.is_keras_weights and now - self._newest_since < SETTLING_TIME,
            is_start_doubted=now - self._started < self._grace,
            is_out_of_patience=newest is not None
            and newest == self._unreadable
            and now - self._unreadable_since >= self._patience,
        )

    def note_result(self, checkpoint: CheckpointFile, result: EvaluationResult) -> None:
        """The checkpoint is evaluated."""
        self._results[checkpoint.identity] = result
        self._unreadable = None

    def note_unreadable(self, checkpoint: CheckpointFile) -> bool:
        """The checkpoint could not be read; returns whether that is news."""
        is_news = checkpoint != self._unreadable
        if is_news:
            self._unreadable, self._unreadable_since = checkpoint, time.monotonic()
        return is_news

    def __repr__(self) -> str:
        return f"CheckpointWatch({self._source.directory!r}, evaluations={self.evaluations})"
