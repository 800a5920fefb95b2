"""The paths that users give: of the local file system, or URLs such as `gs://bucket/run`, which TensorFlow reads.

Code that loads no TensorFlow, and files that are changed in place, know only local paths, and refuse a URL in words.
Otherwise a URL would be a folder named `gs:` in the working directory.
"""

import os
import re

_URL = re.compile(r"[a-zA-Z][\w+.-]+://")
# What `pathlib` makes of a URL.
_BROKEN_URL = re.compile(r"([a-zA-Z][\w+.-]+):/(?!/)")


def is_url(path: str) -> bool:
    """Returns whether a path, as `path_text` returns it, is a URL."""
    return _URL.match(path) is not None


def path_text(path: str | os.PathLike[str]) -> str:
    """Returns a path as a str; for a URL such as `file:///there` the local path.

    Raises:
      ValueError: it is what `pathlib` makes of a URL.
    """
    text = os.fspath(path)
    if text.startswith("file:///"):
        return text.removeprefix("file://")
    if broken := _BROKEN_URL.match(text):
        url = f"{broken[1]}://{text[broken.end() :]}"
        raise ValueError(f"{text!r} looks like the URL {url!r} after pathlib has changed it. Give a URL as a str.")
    return text


def local_path(path: str | os.PathLike[str], purpose: str) -> str:
    """Returns a user's path of the local file system as a str; `purpose` says in the error what is there.

    Raises:
      ValueError: it is a URL, or what `pathlib` makes of one.
    """
    text = path_text(path)
    if is_url(text):
        raise ValueError(f"{purpose} must be on a local file system, got {text!r}. Copy it from or to there.")
    return text


def checkpoint_path(path: str | os.PathLike[str]) -> str:
    """Returns a path to which TensorFlow writes values, or a directory of such, as a str.

    Raises:
      ValueError: TensorFlow would not find the files again, or it is what `pathlib` makes of a URL.
    """
    text = path_text(path)
    if set(text) & set("*?[\\"):
        raise ValueError(
            f"TensorFlow does not find the files of a checkpoint in {text!r}: it takes a path with *, ?, [ or \\ for a "
            "pattern. Give another path."
        )
    return text
