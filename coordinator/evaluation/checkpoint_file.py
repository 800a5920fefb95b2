"""One checkpoint on disk: where it is, when it was written, which files it is made of."""

import contextlib
import dataclasses
import glob
import os
import re
import shutil

INDEX_SUFFIX = ".index"
WEIGHTS_SUFFIX = ".weights.h5"

# `ckpt-12`, `epoch_3` and `weights.03` end in a number; the digits of `loss-0.25` are part of one.
_NUMBER = re.compile(r"(?:^|[-_]|[^\d.]\.)(\d+)$")


@dataclasses.dataclass(frozen=True)
class CheckpointFile:
    """A checkpoint that was found.

    Attributes:
      path: of a TensorFlow checkpoint the path without `.index`; of a Keras weights file the path of the file.
      written_ns: when its index or weights file was last written, in unix nanoseconds of its file system.
    """

    path: str
    written_ns: int

    @classmethod
    def of_file(cls, path: str) -> "CheckpointFile | None":
        """The checkpoint that the file at `path` completes; None if it is no such file, or gone.

        TensorFlow writes the index last. A look may fall within that writing, or within that of a weights file;
        loading it then fails, and so does `require_unchanged`.
        """
        if not path.endswith((INDEX_SUFFIX, WEIGHTS_SUFFIX)):
            return None
        try:
            return cls(path.removesuffix(INDEX_SUFFIX), os.stat(path).st_mtime_ns)
        except FileNotFoundError:
            return None

    @property
    def name(self) -> str:
        """The last part of the path."""
        return os.path.basename(self.path)

    @property
    def is_keras_weights(self) -> bool:
        """Whether it is a Keras `.weights.h5` file, and not a TensorFlow checkpoint."""
        return self.path.endswith(WEIGHTS_SUFFIX)

    @property
    def number(self) -> int | None:
        """The number that the name ends in, as a `CheckpointManager` counts; None if it ends in none."""
        found = _NUMBER.search(self.name.removesuffix(WEIGHTS_SUFFIX))
        return int(found.group(1)) if found else None

    @property
    def identity(self) -> tuple[str, int]:
        """Tells it from every other checkpoint of its directory, an earlier one of the same name included."""
        return self.name, self.written_ns

    def files(self) -> list[str]:
        """Paths of its files."""
        if self.is_keras_weights:
            return [self.path]
        return [self.path + INDEX_SUFFIX, *glob.glob(glob.escape(self.path) + ".data-*")]

    def require_unchanged(self) -> None:
        """Raises `OSError` if the file that completes the checkpoint was written since it was found."""
        found = CheckpointFile.of_file(self.files()[0])
        if found is not None and found != self:
            raise OSError(f"{self.path!r} was written meanwhile")

    def copy_to(self, prefix: str) -> str:
        """Copies it; returns the path of the copy.

        The files of a TensorFlow checkpoint are never written again once they are complete, so they are linked where
        the file system can; a weights file may be written again in its place, so it is copied.

        Args:
          prefix: path of the copy, without `.weights.h5`. What is there already is replaced.

        Raises:
          OSError: it cannot be read or the copy not written; or it was written since it was found.
        """
        stem = self.path.removesuffix(WEIGHTS_SUFFIX)
        for file in self.files():
            target = prefix + file.removeprefix(stem)
            with contextlib.suppress(FileNotFoundError):
                os.unlink(target)
            if self.is_keras_weights:
                shutil.copyfile(file, target)
            else:
                _link_or_copy(file, target)
        self.require_unchanged()
        return prefix + self.path.removeprefix(stem)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:  # another file system, or one without links; what is really wrong the copy tells
        shutil.copyfile(source, target)
