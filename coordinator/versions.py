"""The versions of TensorFlow and Keras that the tests have passed with, and what is off with some of them.

The table of all tested combinations is in docs/versions.md.
"""

import re
from collections.abc import Mapping

# The newest minor versions with which the tests have passed.
NEWEST = {"tensorflow": (2, 23), "keras": (3, 16)}
# What is off before a minor version.
_OFF_BEFORE = (
    (
        "tensorflow",
        (2, 21),
        "cannot be silenced while it runs, so its C++ code logs the loss of a server too; TF_CPP_MIN_LOG_LEVEL=3 in "
        "the program's environment silences it",
    ),
)


def unknown(versions: Mapping[str, str]) -> list[str]:
    """Returns a text for each version of "tensorflow" or "keras" that is a newer minor version than the tests know."""
    return [
        f"{package} {version} is newer than {'.'.join(map(str, NEWEST[package]))}, the newest that was tested"
        for package, version in versions.items()
        if _minor(version) > NEWEST[package]
    ]


def off(versions: Mapping[str, str]) -> list[str]:
    """Returns a text for each feature that is off with these versions."""
    return [
        f"{package} {versions[package]} {text}"
        for package, since, text in _OFF_BEFORE
        if package in versions and _minor(versions[package]) < since
    ]


def _minor(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
