"""`coordinator testbed`: runs the trials of an experiment, and reports the results."""

import argparse
import pathlib
import sys
from typing import TYPE_CHECKING

from coordinator.cli.arguments import local_file

if TYPE_CHECKING:
    from coordinator.testbed.results import LossCurve


def add_testbed(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "the effect of stale gradients: sequential, synchronous and asynchronous, with delays, on real servers"
    parser = commands.add_parser("testbed", help=text, description=text, allow_abbrev=False)
    _add_experiment(parser.add_argument_group("the experiment"))
    _add_confirmation(parser.add_argument_group("the simulator beside real servers"))


def _add_experiment(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--quick", action="store_true", help="a part of the grid, with fewer minibatches: one minute")
    text = "in virtual time, without servers: the same network, data, grid and report in seconds"
    group.add_argument("--simulated", action="store_true", default=None, help=text)
    text = "of sequential, synchronous, asynchronous (default all three)"
    group.add_argument("--modes", metavar="MODE,...", help=text)
    group.add_argument("--workers", metavar="N,...", help="numbers of workers, 1 to 16 (default 1,2,3)")
    text = "of gradients, if asynchronous (default 0,0.5,1,1.5,2): numbers, distributions such as lognormal(0.1,1), or "
    text += "one for each worker: 0/0.5"
    group.add_argument("--delays", metavar="SECONDS,...", help=text)
    group.add_argument("--optimizer", metavar="NAME,...", help="of sgd, momentum, adam (default sgd)")
    group.add_argument("--learning-rate", metavar="R,...", help="one or several (default 0.01)")
    group.add_argument("--weight-decay", metavar="D,...", help="one or several (default 0)")
    group.add_argument("--batch-size", metavar="N,...", help="images of a minibatch, one or several (default 100)")
    group.add_argument("--batches", metavar="N", help="minibatches in each training (default 180)")
    text = "shortest time of a worker's step; it pauses for the rest (default 0.2)"
    group.add_argument("--step-time", metavar="SECONDS", help=text)
    group.add_argument("--target-loss", metavar="LOSS", help="the loss that counts as learned (default 1)")
    group.add_argument("--seed", metavar="N", help="of initial weights and of the order of images (default 0)")
    text = "runs of each training, each with the next seed; figures are their means (default 1)"
    group.add_argument("--repeats", metavar="N", help=text)
    group.add_argument("--data", metavar="NAME", help="digits (default) or cifar10")
    text = "where CIFAR-10 is, in its published binary or python format"
    group.add_argument("--folder", type=local_file, metavar="FOLDER", help=text)
    text, results = (
        "folder for pictures, tables and the summary (default testbed-results)",
        pathlib.Path("testbed-results"),
    )
    group.add_argument("--output", type=local_file, default=results, metavar="FOLDER", help=text)


def _add_confirmation(group: "argparse._ArgumentGroup") -> None:
    text = (
        "instead of an experiment, compare real servers with the simulator, given the same times: staleness and speed "
    )
    text += "under several rules, with --workers (default 2,3,4); or, with --simulated, the loss curves of the grid"
    group.add_argument("--confirm", action="store_true", help=text)
    group.add_argument("--confirm-seconds", type=float, metavar="S", help="duration of a real run (default 10)")
    group.add_argument("--confirm-repeats", type=int, metavar="N", help="real runs of each setting (default 3)")


_INTERRUPTED = 130


def testbed(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code, 130 after Ctrl-C."""
    if not options.confirm:
        return _experiment(options)
    if options.simulated:
        _confirm_losses(options)
    else:
        from coordinator.testbed.confirmation import confirm

        confirm(vars(options))
    return 0


def _confirm_losses(options: argparse.Namespace) -> None:
    from coordinator.errors import SettingError
    from coordinator.testbed.confirmation import compare, draw, text
    from coordinator.testbed.experiment import Experiment
    from coordinator.testbed.image_data import load
    from coordinator.testbed.report import Report

    for name in ("confirm_seconds", "confirm_repeats"):
        if getattr(options, name) is not None:
            raise SettingError(name, "is not for --simulated --confirm, which takes --batches and --repeats.")
    experiment = Experiment.of(vars(options))
    data = load(experiment)
    # The constructor checks the folder, and that pictures can be drawn.
    Report(experiment, options.output)
    comparisons = compare(experiment, data)
    names = draw(comparisons, options.output)
    print(f"\n{text(experiment, comparisons)}\n\nWritten to {options.output}: {', '.join(names)}")


def _experiment(options: argparse.Namespace) -> int:
    from coordinator.testbed.experiment import Experiment
    from coordinator.testbed.image_data import load
    from coordinator.testbed.measurement import measure
    from coordinator.testbed.report import Report

    experiment = Experiment.of(vars(options))
    data = load(experiment)
    report = Report(experiment, options.output)
    seconds = "" if experiment.simulated else f", at least {experiment.seconds:.0f} s"
    print(f"{experiment}\n{len(experiment.trials())} trainings{seconds}", flush=True)
    curves: list[LossCurve] = []
    code = 0
    try:
        measure(experiment, data, curves.append)
    except KeyboardInterrupt:
        code = _INTERRUPTED
    finally:
        if curves:
            names = report.write(curves)
            print(f"\n{report.text(curves)}\n\nWritten to {options.output}: {', '.join(names)}")
    if not curves:
        print("Stopped before the first training was over: nothing is written.", file=sys.stderr)
    return code
