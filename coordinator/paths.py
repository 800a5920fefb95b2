"""Paths that users give: local paths, or URLs such as `gs://bucket/run`, which only TensorFlow reads.

Code without TensorFlow, and files that are changed in place, accept only local paths and refuse a URL with an error.
Otherwise a URL would become a folder named `gs:` in the working directory.
"""

import os
import re

_URL = re.compile(r"[a-zA-Z][\w+.-]+://")
# The form into which `pathlib` changes a URL.
_BROKEN_URL = re.compile(r"([a-zA-Z][\w+.-]+):/(?!/)")


def is_url(path: str) -> bool:
    """Returns whether a path, as `path_text` returns it, is a URL."""
    return _URL.match(path) is not None


def path_text(path: str | os.PathLike[str]) -> str:
    """Returns a path as a str, for `file:///there` the local path. Raises ValueError if `pathlib` has changed a URL."""
    text = os.fspath(path)
    if text.startswith("file:///"):
        return text.removeprefix("file://")
    if broken := _BROKEN_URL.match(text):
        url = f"{broken[1]}://{text[broken.end() :]}"
        raise ValueError(f"{text!r} looks like the URL {url!r} after pathlib has changed it. Give a URL as a str.")
    return text


def local_path(path: str | os.PathLike[str], purpose: str) -> str:
    """Returns a user's local path as a str. Raises ValueError for a URL; `purpose` names the path in the message."""
    text = path_text(path)
    if is_url(text):
        raise ValueError(f"{purpose} must be on a local file system, got {text!r}. Copy it from or to there.")
    return text


def checkpoint_path(path: str | os.PathLike[str]) -> str:
    """Returns a path for TensorFlow's checkpoint files as a str. Raises ValueError if they could not be found again."""
    text = path_text(path)
    if set(text) & set("*?[\\"):
        raise ValueError(
            f"TensorFlow does not find the files of a checkpoint in {text!r}: it takes a path with *, ?, [ or \\ for a "
            "pattern. Give another path."
        )
    return text
