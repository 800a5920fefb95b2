"""Finds the newest checkpoint of a directory.

Promises: only complete checkpoints are found. The directory's `checkpoint` state file, where there is one, says which
of the checkpoints that it lists is the latest; one that it does not list counts if it was written later. Checkpoints
in subdirectories are not looked at.
"""

import os
from collections.abc import Collection

import tensorflow as tf

from coordinator.evaluation.checkpoint_file import CheckpointFile


class CheckpointSource:
    """The checkpoints of one directory, which need not exist yet.

    Args:
      directory: on a file system that training and evaluator both see.
    """

    def __init__(self, directory: str | os.PathLike[str]):
        self.directory = os.fspath(directory)

    def newest(self) -> CheckpointFile | None:
        """The newest complete checkpoint; None if there is none."""
        try:
            with os.scandir(self.directory) as entries:
                paths = [entry.path for entry in entries]
        except FileNotFoundError:
            return None
        found = [checkpoint for path in paths if (checkpoint := CheckpointFile.of_file(path))]
        state = tf.train.get_checkpoint_state(self.directory)
        latest = os.path.basename(state.model_checkpoint_path) if state else None
        listed = [os.path.basename(path) for path in state.all_model_checkpoint_paths] if state else []
        return newest_checkpoint(found, latest, listed)

    def __repr__(self) -> str:
        return f"CheckpointSource({self.directory!r})"


def newest_checkpoint(
    found: Collection[CheckpointFile], latest: str | None, listed: Collection[str]
) -> CheckpointFile | None:
    """Which of the checkpoints found is the newest.

    The order of the state file is preferred to times of writing, which a copied directory has lost.

    Args:
      found: the checkpoints in the directory.
      latest: name of the one that the state file calls the latest, if there is such a file.
      listed: names of all that the state file lists.
    """
    superseded = set(listed) - {latest}
    candidates = [checkpoint for checkpoint in found if checkpoint.name not in superseded] or found
    return max(candidates, key=lambda checkpoint: (checkpoint.written_ns, checkpoint.number or 0), default=None)
