"""What every benchmark of speed takes on the command line."""

import argparse
import json
import pathlib
from collections.abc import Sequence
from typing import Any

from benchmarks.measured_on import measured_on
from benchmarks.positive_count import positive_count


class SpeedArguments:
    """The parsed command line: `repeats`, `is_quick`, and where the figures go.

    Args:
      name: of the benchmark's module.
      about: what it is, in a line.
      arguments: the command line; None for this program's.
    """

    def __init__(self, name: str, about: str, arguments: Sequence[str] | None) -> None:
        parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=about)
        parser.add_argument("--repeats", type=positive_count, default=5, help="of each round that is counted")
        parser.add_argument("--quick", action="store_true", help="each once, and less of all")
        parser.add_argument("--json", type=pathlib.Path, metavar="FILE", help="takes all figures")
        chosen = parser.parse_args(arguments)
        self._name = name
        self._json: pathlib.Path | None = chosen.json
        self._begun_on = measured_on()
        self.is_quick: bool = chosen.quick
        self.repeats: int = 1 if chosen.quick else chosen.repeats

    def write(self, found: Any) -> None:
        """Writes what was found, in the types of JSON, to the file that was named, if one was."""
        if self._json is not None:
            figures = {"benchmark": self._name, "repeats": self.repeats, **self._begun_on, "found": found}
            self._json.write_text(json.dumps(figures, indent=2), encoding="utf-8")
