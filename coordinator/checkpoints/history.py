"""What is known of the checkpoints of a directory, and of the one that is being saved.

Promises: a checkpoint is in the history when all of it is written. No lock is held while files are written or a policy
is asked. Files are changed on one thread, the one that calls `complete` and `store`.
"""

import dataclasses
import logging
import threading
import time
from collections.abc import Mapping, Sequence

import tensorflow as tf

from coordinator.checkpoints import checkpoint_files as files
from coordinator.checkpoints.policies import Best, KeepPolicy, Moment, SavedCheckpoint
from coordinator.errors import EvaluationError

_logger = logging.getLogger("coordinator")


class History:
    """The checkpoints of a directory. All methods may be called from any thread, unless they say otherwise.

    Args:
      directory: where they are.
      keep: which are kept, beside the newest; None to keep all.
    """

    def __init__(self, directory: str, keep: Sequence[KeepPolicy] | None) -> None:
        self._directory = directory
        self._keep = None if keep is None else tuple(keep)
        self._lock = threading.Lock()
        self._complete = files.load(directory)
        self._saving: SavedCheckpoint | None = None
        self._is_undone = False

    def complete_ones(self) -> list[SavedCheckpoint]:
        """Returns the complete checkpoints, oldest first."""
        with self._lock:
            return list(self._complete)

    def measured(self) -> list[SavedCheckpoint]:
        """Returns them with the metrics that evaluators have found. Raises `EvaluationError` if these are damaged."""
        return files.with_results(self._directory, self.complete_ones())

    def best(self) -> str | None:
        """Returns the path of the best by the first `Best`, or None. Raises as `measured`."""
        policy = next((each for each in self._keep or () if isinstance(each, Best)), None)
        found = policy.kept(self.measured(), Moment(0, 0.0)) if policy is not None else ()
        return found[0].path if found else None

    def begin(self, saving: SavedCheckpoint) -> None:
        """Records that a checkpoint is being saved."""
        with self._lock:
            self._saving, self._is_undone = saving, False

    def complete(self) -> None:
        """Records that what is being saved is written, lists it, and deletes what is not kept.

        Raises:
          RuntimeError: a recovery has undone it.
          tf.errors.OpError: the lists cannot be written. It is not complete then.
        """
        with self._lock:
            path = "" if self._saving is None else self._saving.path
        written_ns = files.written_ns(path)
        with self._lock:
            if self._is_undone or self._saving is None:
                raise RuntimeError("A recovery has undone the step of which it is a snapshot.")
            self._complete.append(dataclasses.replace(self._saving, written_ns=written_ns))
            self._saving = None
        try:
            kept = self._kept()
            files.store(self._directory, kept)
        except BaseException:
            with self._lock:
                self._complete = [each for each in self._complete if each.path != path]
            raise
        paths = {each.path for each in kept}
        with self._lock:
            dropped = [each for each in self._complete if each.path not in paths]
            self._complete = [each for each in self._complete if each.path in paths]
        for each in dropped:
            try:
                files.delete(each.path)
            except tf.errors.OpError as error:
                _logger.warning("The checkpoint %s, which is not kept, cannot be deleted: %s", each.path, error)

    def give_up(self) -> None:
        """Records that nothing is being saved any more."""
        with self._lock:
            self._saving = None

    def store(self) -> None:
        """Writes the lists."""
        try:
            files.store(self._directory, self.complete_ones())
        except tf.errors.OpError as error:
            _logger.warning("The list of the checkpoints in %s cannot be written: %s", self._directory, error)

    def to_restore(self) -> list[str]:
        """Returns the paths of the complete ones, newest first; what is being saved will not be one."""
        with self._lock:
            self._is_undone = True
            return [each.path for each in reversed(self._complete)]

    def restored(self, path: str | None) -> SavedCheckpoint | None:
        """Forgets the checkpoints after the one that was restored, and returns that."""
        with self._lock:
            found = next((each for each in self._complete if each.path == path), None)
            self._complete = self._complete[: self._complete.index(found) + 1] if found is not None else []
            return found

    def report(self, checkpoint: str | int, metrics: Mapping[str, float]) -> bool:
        """Adds metrics to a checkpoint with this path or step; returns whether there is one."""
        found = False

        def measured(each: SavedCheckpoint) -> SavedCheckpoint:
            nonlocal found
            if checkpoint not in (each.path, each.step):
                return each
            found = True
            return dataclasses.replace(each, metrics={**each.metrics, **metrics})

        with self._lock:
            self._complete = [measured(each) for each in self._complete]
            self._saving = None if self._saving is None else measured(self._saving)
        return found

    def _kept(self) -> list[SavedCheckpoint]:
        """Returns those that are kept, of those that are still there."""
        complete = [each for each in self.complete_ones() if files.files(each.path)]
        if self._keep is None:
            return complete
        try:
            complete = files.with_results(self._directory, complete)
        except EvaluationError as error:
            _logger.warning(
                "All checkpoints in %s are kept, as it is not known which are best: %s", self._directory, error
            )
            return complete
        now = Moment(complete[-1].step, time.time())
        kept = {complete[-1].path}.union(*({each.path for each in policy.kept(complete, now)} for policy in self._keep))
        return [each for each in complete if each.path in kept]
