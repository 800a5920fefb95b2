"""The type of arguments that are paths of the local file system."""

import argparse
import pathlib

from coordinator.paths import local_path


def local_file(text: str) -> pathlib.Path:
    """Returns an argument as a path.

    Raises:
      ArgumentTypeError: it is a URL, such as `gs://bucket/logs`, of which `pathlib` would make a local folder.
    """
    try:
        return pathlib.Path(local_path(text, "it"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
