"""`coordinator testbed`: trains all cells of a grid, and says what came of it."""

import argparse
import sys

from coordinator.errors import SettingError
from coordinator.launch.further_command import FurtherCommand
from coordinator.testbed.experiment import Experiment
from coordinator.testbed.testbed_options import add_testbed

_UNUSABLE = 2


def testbed(given: argparse.Namespace) -> int:
    """Runs the command.

    Args:
      given: its options.

    Returns:
      The exit code; 2 if what was asked for cannot be.
    """
    try:
        print(Experiment.of(vars(given)))
    except SettingError as error:
        print(f"coordinator testbed: --{error.option.replace('_', '-')} {error.complaint}", file=sys.stderr)
        return _UNUSABLE
    return 0


TESTBED = FurtherCommand("testbed", add_testbed, testbed)
