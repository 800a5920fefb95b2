"""The command `coordinator`, which is `python -m coordinator` too: the commands of all layers."""

import sys
from collections.abc import Sequence

from coordinator.launch import command_line
from coordinator.testbed.testbed_command import TESTBED


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command, as `coordinator.launch.command_line.main` does, with those of higher layers."""
    return command_line.main(arguments, further=[TESTBED])


if __name__ == "__main__":
    sys.exit(main())
