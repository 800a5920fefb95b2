"""Runs the command `coordinator` for `python -m coordinator`."""

import sys

from coordinator.cli.command_line import main

if __name__ == "__main__":
    sys.exit(main())
