"""`coordinator testbed`: trains all cells of a grid, and says what came of it."""

import argparse
import sys
from typing import TYPE_CHECKING

from coordinator.cli.testbed import add_testbed
from coordinator.errors import LaunchError, SettingError
from coordinator.launch.further_command import FurtherCommand

if TYPE_CHECKING:
    from coordinator.testbed.loss_curve import Curve

_UNUSABLE, _INTERRUPTED = 2, 130


def testbed(given: argparse.Namespace) -> int:
    """Runs the command. What it is asked to do beside the experiment, by options of its own, begins here.

    Args:
      given: its options.

    Returns:
      The exit code: 2 if what was asked for cannot be, 130 after Ctrl-C.
    """
    try:
        return _confirmation(given) if given.confirm else _experiment(given)
    except SettingError as error:
        print(f"coordinator testbed: --{error.option.replace('_', '-')} {error.complaint}", file=sys.stderr)
        return _UNUSABLE
    except LaunchError as error:
        print(f"coordinator testbed: {error}", file=sys.stderr)
        return _UNUSABLE


def _confirmation(given: argparse.Namespace) -> int:
    from coordinator.testbed.confirmation.confirm_command import confirm

    try:
        confirm(vars(given))
    except KeyboardInterrupt:
        return _INTERRUPTED
    return 0


def _experiment(given: argparse.Namespace) -> int:
    from coordinator.testbed.experiment import Experiment
    from coordinator.testbed.image_data import load
    from coordinator.testbed.measurement import measure
    from coordinator.testbed.report import Report

    experiment = Experiment.of(vars(given))
    data = load(experiment)
    report = Report(experiment, given.output)
    print(f"{experiment}\n{len(experiment.cells())} trainings, at least {experiment.seconds:.0f} s", flush=True)
    curves: list[Curve] = []
    code = 0
    try:
        measure(experiment, data, curves.append)
    except KeyboardInterrupt:
        code = _INTERRUPTED
    finally:
        if curves:
            names = report.write(curves)
            print(f"\n{report.text(curves)}\n\nWritten to {given.output}: {', '.join(names)}")
    if not curves:
        print("Stopped before the first training was over: nothing is written.", file=sys.stderr)
    return code


TESTBED = FurtherCommand("testbed", add_testbed, testbed)
