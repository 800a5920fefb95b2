"""`python -m coordinator.testbed` is the command `coordinator testbed`."""

import argparse
import sys

from coordinator.cli.simulate import with_negative_values
from coordinator.cli.testbed import TEXT, add_options
from coordinator.testbed.testbed_command import TESTBED


def main() -> int:
    """Runs the command with this process's arguments, and returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m coordinator.testbed", description=TEXT, allow_abbrev=False)
    add_options(parser)
    return TESTBED.run(parser.parse_args(with_negative_values(sys.argv[1:])))


if __name__ == "__main__":
    sys.exit(main())
