"""Restores lost variables from the checkpoints of a manager, or by a function of the user's.

Promises: the newest readable checkpoint in the manager's directory is restored; a damaged one is skipped, with a
warning, and so is what another client has written; nothing of it stays in the variables.
"""

import abc
import logging
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import tensorflow as tf

from coordinator.events.event_stream import EventStream
from coordinator.paths import checkpoint_path
from coordinator.ps_strategy.membership.bounded_calls import UNREACHED
from coordinator.ps_strategy.recovery.checkpoint_owner import CheckpointOwner
from coordinator.ps_strategy.tensorflow_internals.handles import forget_last_saved_step, saves_asynchronously

_logger = logging.getLogger("coordinator")

# Raised when a server is lost, which is no sign of a damaged checkpoint.
_SERVER_LOST = (*UNREACHED, tf.errors.CancelledError)


class SaveServices(NamedTuple):
    """What a strategy does for what saves its checkpoints.

    Attributes:
      save: calls a function that saves and returns the path, in `quiet()`; again after a recovery if a parameter server
        was lost meanwhile. It takes the function and the directory, and returns the path.
      steps: returns the number of the training step, or None while a server does not answer.
      begins_at_zero: whether `steps` counts from the beginning of this program.
      memory: `Options.checkpoint_memory`.
      events: where it records what it has saved.
      owner: whether the directory still belongs to this client.
    """

    save: Callable[[Callable[[], str], str], str]
    steps: Callable[[], int | None]
    begins_at_zero: bool
    memory: int
    events: EventStream
    owner: CheckpointOwner = CheckpointOwner()


class CheckpointSource(abc.ABC):
    """Saves checkpoints and knows them, as a `tf.train.CheckpointManager` does; called by the strategy.

    Attributes:
      checkpoint: a `tf.train.Checkpoint`.
      directory: where the checkpoints are.
    """

    checkpoint: tf.train.Checkpoint
    directory: str

    @abc.abstractmethod
    def begin(self, services: SaveServices) -> None:
        """Allows saving; the strategy restores from this object from now on."""

    @abc.abstractmethod
    def end(self) -> None:
        """Ends what is in progress, in bounded time; nothing is saved afterwards."""

    @abc.abstractmethod
    def to_restore(self) -> list[str]:
        """Returns the paths of the checkpoints, newest first. What is being saved now is not to be one any more."""

    @abc.abstractmethod
    def restored(self, path: str | None) -> None:
        """Records that this checkpoint was restored, and that newer ones could not be; None for the initial values."""


class CheckpointRestore:
    """Restores variables from a checkpoint.

    Args:
      source: a `tf.train.CheckpointManager`, a `CheckpointSource`, or a function without arguments that restores a
        checkpoint and returns its path, or None if there is none.
      owner: which checkpoints may be restored.

    Raises:
      TypeError: it is neither.
      ValueError: the manager's checkpoint was saved or restored asynchronously before, or TensorFlow does not find
        checkpoints in its directory.
    """

    def __init__(self, source: Any, owner: CheckpointOwner | None = None) -> None:
        self._owner = owner or CheckpointOwner()
        self.manager = source if isinstance(source, tf.train.CheckpointManager | CheckpointSource) else None
        if self.manager is None and (isinstance(source, type) or not callable(source)):
            advice = (
                " Pass a manager of it: coordinator.Checkpoints(checkpoint, directory)."
                if isinstance(source, tf.train.Checkpoint)
                else ""
            )
            raise TypeError(
                "restore_from takes coordinator.Checkpoints, a tf.train.CheckpointManager, or a function without "
                f"arguments that restores a checkpoint and returns its path; got {source!r}.{advice}"
            )
        if self.manager is not None:
            checkpoint_path(self.manager.directory)
        if self.manager is not None and saves_asynchronously(self.manager.checkpoint):
            raise ValueError(
                "restore_from was given a manager whose checkpoint was saved or restored with "
                "tf.train.CheckpointOptions(enable_async=True) before, which does not survive the loss of a parameter "
                "server. Give it a manager of a new tf.train.Checkpoint of the same objects, and leave enable_async "
                "out."
            )
        self._source = source

    def checkpoints(self) -> list[str]:
        """Returns the paths of the checkpoints in the manager's directory, newest first."""
        assert self.manager is not None
        if isinstance(self.manager, CheckpointSource):
            return self.manager.to_restore()
        state = tf.train.get_checkpoint_state(self.manager.directory)
        paths = [] if state is None else [*state.all_model_checkpoint_paths, state.model_checkpoint_path]
        # Without repetitions, each where it comes last.
        return list(dict.fromkeys(path for path in reversed([*self.manager.checkpoints, *paths]) if path))

    def restore(self, prepare: Callable[[], None]) -> str | None:
        """Restores the latest checkpoint.

        Args:
          prepare: called before each attempt; gives all variables new resources.

        Returns:
          The path of the restored checkpoint, or None if there was none. For a function, its result, if that is a path.

        Raises:
          tf.errors.OpError: a server was lost.
          Exception: the error of the newest checkpoint, if none can be read; or what the user's function raised.
        """
        if self.manager is None:
            prepare()
            path = self._source()
            return os.fspath(path) if isinstance(path, str | os.PathLike) else None
        damage: Exception | None = None
        for path in self.checkpoints():
            if not self._owner.has(path):
                _logger.warning("The checkpoint %s is not restored: another client has written it.", path)
                continue
            prepare()
            try:
                # Variables that are created later, such as an optimizer's, are restored when they are created.
                self.manager.checkpoint.restore(path).expect_partial()
            except _SERVER_LOST:
                raise
            except Exception as error:  # noqa: BLE001 - a damaged file makes TensorFlow raise anything, IndexError too
                _logger.warning("The checkpoint %s cannot be restored; the previous one is tried: %s", path, error)
                error.add_note(f"Raised while restoring the checkpoint {path}.")
                damage = damage or error
            else:
                self._note_restored(path)
                return path
        if damage is not None:
            raise damage
        prepare()
        self._note_restored(None)
        return None

    def _note_restored(self, path: str | None) -> None:
        if isinstance(self.manager, CheckpointSource):
            self.manager.restored(path)
        else:
            forget_last_saved_step(self.manager)
