"""The `save` of a checkpoint manager, made safe against parameter servers that are lost.

Promises: nothing is saved while variables are being recovered; a save that fails because a parameter server was lost is
made again when it is back, so that its caller does not notice. A save that fails leaves the latest checkpoint as it
was: TensorFlow makes a checkpoint the latest one only when all of it is written. An asynchronous save, whose failure
its caller would not see, is refused.
"""

import logging
from collections.abc import Callable
from typing import Any, Protocol

import tensorflow as tf

from coordinator.ps_strategy import tensorflow_internals
from coordinator.ps_strategy.saved_progress import SavedProgress

_logger = logging.getLogger("coordinator")


class Recovery(Protocol):
    """What a save asks of the recovery."""

    def hold_off(self) -> Any:
        """A scope in which no recovery begins; entering it waits for the end of an attempt that is under way."""

    def missing(self) -> BaseException | None:
        """The error that says which variables are gone or half restored, if any are."""

    def wait_recovered(self, timeout: float | None) -> bool:
        """Waits until none are; False if that is not to be expected any more."""


class GuardedSave:
    """Takes the place of `manager.save`, on one `tf.train.CheckpointManager`; called like it.

    Args:
      manager: whose `save` it is. It keeps `GuardedSave` until `release`; as long, its checkpoint is not saved or
        restored asynchronously.
      progress: told what each checkpoint holds.
      recovery: of the parameter servers.
    """

    def __init__(self, manager: tf.train.CheckpointManager, progress: SavedProgress, recovery: Recovery) -> None:
        self._manager = manager
        self._save: Callable[..., str | None] = manager.save
        self._progress = progress
        self._recovery = recovery
        manager.save = self
        tensorflow_internals.refuse_asynchronous(manager.checkpoint, asynchronous_refused)

    def release(self) -> None:
        """Gives the manager its own `save` back, unless somebody replaced it again; its checkpoint is as before."""
        tensorflow_internals.accept_asynchronous(self._manager.checkpoint)
        if self._manager.save is self:
            self._manager.save = self._save

    def __call__(self, *args: Any, **kwargs: Any) -> str | None:
        """Saves as `tf.train.CheckpointManager.save` does.

        Raises:
          ParameterServerLost: one is lost and does not come back.
          ValueError: it is to be saved asynchronously.
          tf.errors.OpError: anything else that went wrong.
        """
        if any(
            isinstance(each, tf.train.CheckpointOptions) and each.enable_async for each in (*args, *kwargs.values())
        ):
            # Before the checkpoint's number is counted up.
            raise asynchronous_refused()
        while True:
            with self._recovery.hold_off():
                missing = self._recovery.missing()
                if missing is None:
                    count = self._progress.count()
                    try:
                        path = self._save(*args, **kwargs)
                    except tf.errors.OpError as error:
                        missing = self._recovery.missing()
                        if missing is None:
                            raise
                        missing.__cause__ = error
                    else:
                        if path is not None:
                            self._progress.record(path, count)
                        return path
            _logger.warning("A checkpoint is saved as soon as this is over: %s", missing)
            if not self._recovery.wait_recovered(None):
                raise missing


def asynchronous_refused() -> ValueError:
    """What is raised when the checkpoint is to be saved or restored asynchronously."""
    return ValueError(
        "The checkpoint that restore_from restores cannot be saved or restored with "
        "tf.train.CheckpointOptions(enable_async=True): TensorFlow's asynchronous checkpoint goes on using the "
        "variables of a parameter server that was lost, so that no later save would succeed. Leave enable_async out; "
        "workers go on with what is scheduled while manager.save() writes a checkpoint."
    )
