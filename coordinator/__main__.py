"""`python -m coordinator` is the command `coordinator`."""

import sys

from coordinator.launch.command_line import main

if __name__ == "__main__":
    sys.exit(main())
