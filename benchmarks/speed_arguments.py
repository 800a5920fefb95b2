"""The command line of the benchmarks, and the machine and versions that their figures are for."""

import argparse
import importlib.metadata
import json
import os
import pathlib
import platform
from collections.abc import Sequence
from typing import Any

import coordinator


def positive_integer(text: str) -> int:
    """Parses an integer of at least 1, for `type=` of `argparse`.

    Raises:
      ValueError: `text` is no integer.
      argparse.ArgumentTypeError: it is less than 1.
    """
    count = int(text)
    if count < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {count}")
    return count


def measured_on() -> dict[str, Any]:
    """Returns the machine, its present load, and the versions, in JSON types."""
    return {
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "machine": platform.platform(),
        "python": platform.python_version(),
        "versions": {
            "coordinator": coordinator.__version__,
            **{name: importlib.metadata.version(name) for name in ("tensorflow", "keras", "grpcio")},
        },
    }


def machine_line() -> str:
    """Returns the machine and its load in one line."""
    return f"{os.cpu_count()} cpus, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}"


class SpeedArguments:
    """The command line of a benchmark of speed: `repeats`, `is_quick`, `parts`, and the file for the figures.

    Args:
      name: the benchmark's module.
      about: what it measures, in a line.
      arguments: the command line; None for this program's.
      parts: of the benchmark, of which `--only` chooses one.
      default_repeats: without `--repeats`.
    """

    def __init__(
        self,
        name: str,
        about: str,
        arguments: Sequence[str] | None,
        parts: Sequence[str] = (),
        default_repeats: int = 5,
    ) -> None:
        parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=about)
        help_of_repeats = f"of each round that is counted (default: {default_repeats})"
        parser.add_argument("--repeats", type=positive_integer, default=default_repeats, help=help_of_repeats)
        parser.add_argument("--quick", action="store_true", help="one repeat, shorter rounds and fewer cases")
        parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write all figures to this file")
        if parts:
            parser.add_argument("--only", choices=parts, help="measure this part alone")
        chosen = parser.parse_args(arguments)
        self.parts: Sequence[str] = (chosen.only,) if parts and chosen.only else parts
        self._name = name
        self._json: pathlib.Path | None = chosen.json
        self._measured_on = measured_on()
        self.is_quick: bool = chosen.quick
        self.repeats: int = 1 if chosen.quick else chosen.repeats

    def write(self, found: Any) -> None:
        """Writes the figures, in JSON types, to the file of `--json`, if it was given."""
        if self._json is not None:
            figures = {"benchmark": self._name, "repeats": self.repeats, **self._measured_on, "found": found}
            self._json.write_text(json.dumps(figures, indent=2), encoding="utf-8")
