"""Where lost variables come back from: the checkpoints of a manager, or a function of the user's own.

Promises: of a manager's checkpoints the newest that can be read is restored, as the directory lists them now; one that
is damaged is passed over, with a warning, and nothing of it stays in the variables.
"""

import logging
import os
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from coordinator.ps_strategy import tensorflow_internals
from coordinator.ps_strategy.failure_table import UNREACHED

_logger = logging.getLogger("coordinator")

# Raised when a server went away, which says nothing about the checkpoint.
_NOT_OF_THE_CHECKPOINT = (*UNREACHED, tf.errors.CancelledError)


class RestoreSource:
    """Restores variables from a checkpoint.

    Args:
      source: a `tf.train.CheckpointManager`, or a function without arguments that restores a checkpoint and returns its
        path, or None if it has none.

    Raises:
      TypeError: it is neither.
      ValueError: the manager's checkpoint was saved or restored asynchronously before.
    """

    def __init__(self, source: Any) -> None:
        self.manager = source if isinstance(source, tf.train.CheckpointManager) else None
        if self.manager is None and (isinstance(source, type) or not callable(source)):
            advice = (
                " Make a manager of it: tf.train.CheckpointManager(checkpoint, directory, max_to_keep=3)."
                if isinstance(source, tf.train.Checkpoint)
                else ""
            )
            raise TypeError(
                "restore_from takes a tf.train.CheckpointManager, or a function without arguments that restores a "
                f"checkpoint and returns its path; got {source!r}.{advice}"
            )
        if self.manager is not None and tensorflow_internals.saves_asynchronously(self.manager.checkpoint):
            raise ValueError(
                "restore_from was given a manager whose checkpoint was saved or restored with "
                "tf.train.CheckpointOptions(enable_async=True) before, which does not survive the loss of a parameter "
                "server. Give it a manager of a new tf.train.Checkpoint of the same objects, and leave enable_async "
                "out."
            )
        self._source = source

    @property
    def may_read_variables(self) -> bool:
        """Whether it may look at variables before it restores them, so that they must have values by then."""
        return self.manager is None

    def checkpoints(self) -> list[str]:
        """The paths of the manager's checkpoints, newest first, as its directory lists them now."""
        assert self.manager is not None
        state = tf.train.get_checkpoint_state(self.manager.directory)
        paths = [] if state is None else [*state.all_model_checkpoint_paths, state.model_checkpoint_path]
        # Without repetitions, each where it comes last.
        return list(dict.fromkeys(path for path in reversed([*self.manager.checkpoints, *paths]) if path))

    def restore(self, prepare: Callable[[], None]) -> str | None:
        """Restores the latest checkpoint.

        Args:
          prepare: called before each attempt; makes all variables new.

        Returns:
          The path of what was restored, or None if there was none. Of a function, what it returned, if that is a path.

        Raises:
          tf.errors.OpError: a server went away.
          Exception: no checkpoint can be read, and this is what the newest raised; or what the user's function raised.
        """
        if self.manager is None:
            prepare()
            path = self._source()
            return os.fspath(path) if isinstance(path, str | os.PathLike) else None
        damage: Exception | None = None
        for path in self.checkpoints():
            prepare()
            try:
                # Variables that are made later, such as an optimizer's, get their values when they are made.
                self.manager.checkpoint.restore(path).expect_partial()
            except _NOT_OF_THE_CHECKPOINT:
                raise
            except Exception as error:  # noqa: BLE001 - a damaged file makes TensorFlow raise anything, IndexError too
                _logger.warning("The checkpoint %s cannot be restored; the one before it is tried: %s", path, error)
                error.add_note(f"Raised while the checkpoint {path} was restored.")
                damage = damage or error
            else:
                tensorflow_internals.forget_last_saved_step(self.manager)
                return path
        if damage is not None:
            raise damage
        prepare()
        return None

    def __repr__(self) -> str:
        where = repr(self._source) if self.manager is None else self.manager.directory
        return f"<RestoreSource: {where}>"
