"""Arguments of several commands: local files, and the token of the dashboard.

The token comes from a file or from the environment, because other users of the machine can read command lines.
"""

import argparse
import os
import pathlib
import re
import stat
from collections.abc import Mapping

from coordinator.addresses import local_path
from coordinator.errors import LaunchError

VARIABLE = "COORDINATOR_DASHBOARD_TOKEN"
_TOKEN = re.compile(r"[\w.~-]+", re.ASCII)
_LONGEST = 4096


def local_file(text: str) -> pathlib.Path:
    """Returns an argument as a path; refuses a URL such as `gs://bucket/logs`, which `pathlib` accepts."""
    try:
        return pathlib.Path(local_path(text, "it"))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def add_token_file(parser: argparse.ArgumentParser) -> None:
    """Adds the option that names a file with the token."""
    parser.add_argument(
        "--token-file",
        type=pathlib.Path,
        metavar="FILE",
        help="a file with the token of the dashboard, which only you can read (default: the environment variable "
        f"{VARIABLE}, or a random token)",
    )


def chosen_token(path: pathlib.Path | None, environment: Mapping[str, str]) -> str:
    """Returns the token of `path`, or of `environment`, or "". Raises LaunchError for an unsafe file or a bad token."""
    if path is None:
        token, where = environment.get(VARIABLE, "").strip(), VARIABLE
        if not token:
            return ""
    else:
        where = str(path)
        try:
            with path.open("rb") as file:
                if stat.S_IMODE(os.fstat(file.fileno()).st_mode) & 0o077:
                    raise LaunchError(f"{path} can be read or written by others: chmod 600 {path}")
                token = file.read(_LONGEST).decode(errors="replace").strip()
        except OSError as error:
            raise LaunchError(f"--token-file {path}: {error.strerror}.") from None
    if not _TOKEN.fullmatch(token):
        raise LaunchError(f"{where} has no token: it must be letters, digits and the characters '.', '~', '_' and '-'.")
    return token


def without_token(environment: Mapping[str, str]) -> dict[str, str]:
    """Returns an environment without the token for other processes, because clients can read a server's environment."""
    return {name: value for name, value in environment.items() if name != VARIABLE}
