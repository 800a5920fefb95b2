"""Replaces the `save` of a checkpoint manager by one that survives the loss of parameter servers.

Promises: nothing is saved while variables are being recovered; a save that fails because a parameter server was lost is
repeated after the recovery, and its caller does not notice. A save that fails leaves the latest checkpoint as it was:
TensorFlow declares a checkpoint the latest one only when all of it is written. An asynchronous save, whose failure its
caller would not see, is refused.
"""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.tensorflow_internals.handles import accept_asynchronous, refuse_asynchronous

_logger = logging.getLogger("coordinator")


class SavedProgress:
    """Counts the finished functions whose effect is in the variables: not those that a recovery has undone.

    Args:
      finished: returns how many functions have finished so far, undone ones included.
    """

    def __init__(self, finished: Callable[[], int]) -> None:
        self._finished = finished
        self._undone = 0
        # By the path of the checkpoint. One that is missing was written before this program began to train.
        self._saved: dict[str, int] = {}

    def count(self) -> int:
        """Returns how many functions have finished and were not undone."""
        return self._finished() - self._undone

    def record(self, checkpoint: str, count: int) -> None:
        """Records what `count` returned when the writing of a checkpoint began."""
        self._saved[checkpoint] = count

    def roll_back(self, checkpoint: str | None) -> tuple[int, int]:
        """Records that a checkpoint was restored, or the initial values. Returns `count` before and after."""
        before = self.count()
        after = 0 if checkpoint is None else min(before, self._saved.get(checkpoint, 0))
        self._undone += before - after
        return before, after


class CheckpointSave:
    """Replaces `manager.save`, and is called like it, until `release`.

    Until then the manager's checkpoint cannot be saved or restored asynchronously.

    Args:
      manager: a checkpoint manager.
      progress: records what each checkpoint holds.
      no_recovery: a scope in which no recovery begins; entering it waits for the end of an attempt in progress.
      missing: returns the error that says which variables are gone or half restored, if any are.
      wait_recovered: waits until none are, at most for some seconds; returns False if that is not to be expected.
    """

    def __init__(
        self,
        manager: tf.train.CheckpointManager,
        progress: SavedProgress,
        no_recovery: AbstractContextManager[Any],
        missing: Callable[[], BaseException | None],
        wait_recovered: Callable[[float | None], bool],
    ) -> None:
        self._manager = manager
        self._save: Callable[..., str | None] = manager.save
        self._progress = progress
        self._no_recovery = no_recovery
        self._missing = missing
        self._wait_recovered = wait_recovered
        manager.save = self
        refuse_asynchronous(manager.checkpoint, asynchronous_refused)

    def release(self) -> None:
        """Restores the manager's own `save`, unless it was replaced again meanwhile, and undoes the rest."""
        accept_asynchronous(self._manager.checkpoint)
        if self._manager.save is self:
            self._manager.save = self._save

    def __call__(self, *args: Any, **kwargs: Any) -> str | None:
        """Saves as `tf.train.CheckpointManager.save` does.

        Raises:
          ParameterServerLost: a parameter server is lost and does not return.
          ValueError: the save is asynchronous.
          tf.errors.OpError: the save failed for another reason.
        """
        if any(
            isinstance(each, tf.train.CheckpointOptions) and each.enable_async for each in (*args, *kwargs.values())
        ):
            # Before the checkpoint's number is incremented.
            raise asynchronous_refused()
        while True:
            with self._no_recovery:
                missing = self._missing()
                if missing is None:
                    count = self._progress.count()
                    try:
                        path = self._save(*args, **kwargs)
                    except tf.errors.OpError as error:
                        missing = self._missing()
                        if missing is None:
                            raise
                        missing.__cause__ = error
                    else:
                        if path is not None:
                            self._progress.record(path, count)
                        return path
            _logger.warning("A checkpoint in %s is saved after the recovery: %s", self._manager.directory, missing)
            if not self._wait_recovered(None):
                raise missing


def asynchronous_refused() -> ValueError:
    """Returns the error for a checkpoint that is to be saved or restored asynchronously."""
    return ValueError(
        "The checkpoint that restore_from restores cannot be saved or restored with "
        "tf.train.CheckpointOptions(enable_async=True): TensorFlow's asynchronous checkpoint keeps using the "
        "variables of a parameter server that was lost, so that no later save would succeed. Leave enable_async out; "
        "workers continue to run functions while manager.save() writes a checkpoint."
    )
