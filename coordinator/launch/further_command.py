"""A command of `coordinator` that is made in a layer above this one, and handed to `command_line.main`."""

import argparse
import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True)
class FurtherCommand:
    """What the command line has to know of it.

    Attributes:
      name: as it is typed.
      add: adds it, with its options, to the commands of a parser.
      run: takes the options that were given, and returns the exit code.
    """

    name: str
    add: "Callable[[argparse._SubParsersAction[argparse.ArgumentParser]], None]"
    run: Callable[[argparse.Namespace], int]
