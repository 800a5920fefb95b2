"""Restores lost variables from the checkpoints of a manager, or by a function of the user's.

Promises: the newest readable checkpoint in the manager's directory is restored; a damaged one is skipped, with a
warning, and nothing of it stays in the variables.
"""

import logging
import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.membership.bounded_calls import UNREACHED
from coordinator.ps_strategy.tensorflow_internals.handles import forget_last_saved_step, saves_asynchronously

_logger = logging.getLogger("coordinator")

# Raised when a server is lost, which is no sign of a damaged checkpoint.
_SERVER_LOST = (*UNREACHED, tf.errors.CancelledError)


class CheckpointRestore:
    """Restores variables from a checkpoint.

    Args:
      source: a `tf.train.CheckpointManager`, or a function without arguments that restores a checkpoint and returns its
        path, or None if there is none.

    Raises:
      TypeError: it is neither.
      ValueError: the manager's checkpoint was saved or restored asynchronously before.
    """

    def __init__(self, source: Any) -> None:
        self.manager = source if isinstance(source, tf.train.CheckpointManager) else None
        if self.manager is None and (isinstance(source, type) or not callable(source)):
            advice = (
                " Pass a manager of it: tf.train.CheckpointManager(checkpoint, directory, max_to_keep=3)."
                if isinstance(source, tf.train.Checkpoint)
                else ""
            )
            raise TypeError(
                "restore_from takes a tf.train.CheckpointManager, or a function without arguments that restores a "
                f"checkpoint and returns its path; got {source!r}.{advice}"
            )
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
                forget_last_saved_step(self.manager)
                return path
        if damage is not None:
            raise damage
        prepare()
        return None
