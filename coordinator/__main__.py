"""The command `coordinator`, which is `python -m coordinator` too."""

import sys

from coordinator.cli.command_line import main

if __name__ == "__main__":
    sys.exit(main())
