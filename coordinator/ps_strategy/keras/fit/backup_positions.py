"""The position in the data in the folder of a backup of a model.

A model and its position are two files, and a program may end between them. So the file of positions has the last ones,
each with the number of updates of the model that it belongs to, and is written before the model.
"""

import json
import os

import tensorflow as tf

_FILE = "positions.json"
# One for the model that is there, one for the model before it (`double_checkpoint`), and one that is being written.
_KEPT = 3


def save_position(folder: str, updates: int, position: str) -> None:
    """Saves a position; the model is to be saved after it.

    Args:
      folder: of the backup.
      updates: how many the model has had.
      position: what `Epochs.serialize` has returned.
    """
    tf.io.gfile.makedirs(folder)
    kept = [each for each in _positions(folder) if each[0] != updates][1 - _KEPT :]
    path = os.path.join(folder, _FILE)
    with tf.io.gfile.GFile(f"{path}.new", "w") as file:
        file.write(json.dumps([*kept, [updates, position]]))
    tf.io.gfile.rename(f"{path}.new", path, overwrite=True)


def position_at(folder: str, updates: int) -> str | None:
    """Returns the position of a model that has had this number of updates; None if it is not known."""
    return dict(_positions(folder)).get(updates)


def _positions(folder: str) -> list[tuple[int, str]]:
    path = os.path.join(folder, _FILE)
    if not tf.io.gfile.exists(path):
        return []
    with tf.io.gfile.GFile(path, "r") as file:
        return [(updates, position) for updates, position in json.loads(file.read())]
