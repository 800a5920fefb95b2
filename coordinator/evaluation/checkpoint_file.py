"""Checkpoints as files: finding the newest one in a directory, and copying one while training may replace it.

Paths may be URLs that `tf.io.gfile` takes, such as `gs://bucket/run`.
"""

import contextlib
import dataclasses
import os
import re
from collections.abc import Collection

import tensorflow as tf

from coordinator.data.files import written_ns

INDEX_SUFFIX = ".index"
WEIGHTS_SUFFIX = ".weights.h5"

# `ckpt-12`, `epoch_3` and `weights.03` end in a number; the digits of `loss-0.25` belong to a decimal.
_NUMBER = re.compile(r"(?:^|[-_]|[^\d.]\.)(\d+)$")


@dataclasses.dataclass(frozen=True)
class CheckpointFile:
    """A checkpoint found on disk.

    Attributes:
      path: for a TensorFlow checkpoint, the path without `.index`; for a Keras weights file, the file's path.
      written_ns: when its index or weights file was last written, in Unix nanoseconds of its file system.
    """

    path: str
    written_ns: int

    @classmethod
    def of_file(cls, path: str) -> "CheckpointFile | None":
        """Returns the checkpoint whose index or weights file is at `path`; None if it is another file, or missing.

        TensorFlow writes the index last. If the index or the weights file is still being written, loading it fails, or
        `require_unchanged` does afterwards.
        """
        if not path.endswith((INDEX_SUFFIX, WEIGHTS_SUFFIX)):
            return None
        try:
            return cls(path.removesuffix(INDEX_SUFFIX), written_ns(path))
        except (FileNotFoundError, tf.errors.NotFoundError):
            return None

    @property
    def name(self) -> str:
        """The last part of the path."""
        return os.path.basename(self.path)

    @property
    def is_keras_weights(self) -> bool:
        """True for a Keras `.weights.h5` file, False for a TensorFlow checkpoint."""
        return self.path.endswith(WEIGHTS_SUFFIX)

    @property
    def number(self) -> int | None:
        """The number at the end of the name, as written by a `CheckpointManager`; None if there is none."""
        found = _NUMBER.search(self.name.removesuffix(WEIGHTS_SUFFIX))
        return int(found.group(1)) if found else None

    @property
    def identity(self) -> tuple[str, int]:
        """A key that is unique in its directory, also if a checkpoint replaces one of the same name."""
        return self.name, self.written_ns

    def files(self) -> list[str]:
        """Returns the paths of its files; the index or weights file comes first."""
        if self.is_keras_weights:
            return [self.path]
        directory, name = os.path.split(self.path)
        data = [each for each in _names_in(directory) if each.startswith(f"{name}.data-")]
        return [self.path + INDEX_SUFFIX, *(os.path.join(directory, each) for each in data)]

    def require_unchanged(self) -> None:
        """Raises `OSError` if the index or weights file was written again since the checkpoint was found."""
        found = CheckpointFile.of_file(self.files()[0])
        if found is not None and found != self:
            raise OSError(f"{self.path!r} was replaced while it was being read")

    def copy_to(self, prefix: str) -> str:
        """Copies the checkpoint.

        TensorFlow never rewrites the files of a complete checkpoint, so these are hard-linked where the file system
        allows it. A weights file may be rewritten in place, so its content is copied.

        Args:
          prefix: path of the copy, without `.weights.h5`. Existing files are replaced.

        Returns:
          The path of the copy.

        Raises:
          OSError, tf.errors.OpError: a file cannot be read or written.
          OSError: the checkpoint was replaced since it was found.
        """
        stem = self.path.removesuffix(WEIGHTS_SUFFIX)
        for file in self.files():
            target = prefix + file.removeprefix(stem)
            remove(target)
            if self.is_keras_weights or not _link(file, target):
                tf.io.gfile.copy(file, target)
        self.require_unchanged()
        return prefix + self.path.removeprefix(stem)


def _link(source: str, target: str) -> bool:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links; copying raises if something else is wrong
        return False
    return True


def remove(path: str) -> None:
    """Deletes a file, if it is there."""
    with contextlib.suppress(tf.errors.NotFoundError):
        tf.io.gfile.remove(path)


def _names_in(directory: str) -> list[str]:
    """Returns the names of what is in a directory; none if there is no such directory."""
    try:
        return [str(name) for name in tf.io.gfile.listdir(directory)]
    except tf.errors.NotFoundError:
        return []


def find_newest(directory: str) -> CheckpointFile | None:
    """Returns the newest complete checkpoint in a directory; None if there is none, or no such directory."""
    paths = [os.path.join(directory, name) for name in _names_in(directory)]
    if not paths:
        return None
    found = [checkpoint for path in paths if (checkpoint := CheckpointFile.of_file(path))]
    state = tf.train.get_checkpoint_state(directory)
    latest = os.path.basename(state.model_checkpoint_path) if state else None
    listed = [os.path.basename(path) for path in state.all_model_checkpoint_paths] if state else []
    return newest_checkpoint(found, latest, listed)


def newest_checkpoint(
    found: Collection[CheckpointFile], latest: str | None, listed: Collection[str]
) -> CheckpointFile | None:
    """Chooses the newest of the checkpoints found.

    The order in TensorFlow's state file takes precedence over file times, because copying a directory changes those.

    Args:
      found: the checkpoints in the directory.
      latest: name of the checkpoint that the state file calls the latest; None without a state file.
      listed: names of all checkpoints in the state file.
    """
    superseded = set(listed) - {latest}
    candidates = [checkpoint for checkpoint in found if checkpoint.name not in superseded] or found
    return max(candidates, key=lambda checkpoint: (checkpoint.written_ns, checkpoint.number or 0), default=None)
