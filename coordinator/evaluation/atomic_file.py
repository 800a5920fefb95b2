"""A small text file that is replaced as a whole.

Promise: whoever reads it sees the old text or the new one, never a part, even if the writer is killed.
"""

import contextlib
import os
import pathlib
import tempfile


def replace_text(path: str | os.PathLike[str], text: str) -> None:
    """Replaces what the file at `path` says by `text`; makes the file and its directory if need be.

    Raises:
      OSError: the file cannot be written. The old text is then still there.
    """
    target = pathlib.Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(draft, 0o644)  # mkstemp makes it private, but other users' processes may have to read it
        os.replace(draft, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft)
        raise
