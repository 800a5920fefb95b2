"""The options of `coordinator testbed`; what reads them is loaded when it runs.

An option that was not given is None: its default is `Experiment`'s, or that of `--quick`.
"""

import argparse
import pathlib

TEXT = "what stale gradients do to training: sequential, synchronous and asynchronous, with delays, on real servers"


def add_testbed(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    add_options(commands.add_parser("testbed", help=TEXT, description=TEXT, allow_abbrev=False))


def add_options(parser: argparse.ArgumentParser) -> None:
    """Adds its options: a group for each thing that the command does."""
    _add_experiment(parser.add_argument_group("the experiment"))
    _add_confirmation(parser.add_argument_group("the simulator beside real servers"))


def _add_experiment(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--quick", action="store_true", help="a part of the grid, with fewer minibatches: a minute")
    group.add_argument(
        "--modes", metavar="MODE,...", help="of sequential, synchronous, asynchronous (default all three)"
    )
    group.add_argument("--workers", metavar="N,...", help="how many workers, 1 to 16 (default 1,2,3)")
    group.add_argument("--delays", metavar="SECONDS,...", help="of gradients, if asynchronous (default 0,0.5,1,1.5,2)")
    group.add_argument("--batch-size", metavar="N", help="images of a minibatch (default 100)")
    group.add_argument("--batches", metavar="N", help="that are processed in each training (default 180)")
    group.add_argument(
        "--step-time",
        metavar="SECONDS",
        help="what a worker's step takes at least; it pauses for what is left (default 0.2)",
    )
    group.add_argument("--learning-rate", metavar="R", help="of plain SGD (default 0.01)")
    group.add_argument("--target-loss", metavar="LOSS", help="that counts as learned (default 1)")
    group.add_argument("--seed", metavar="N", help="of first weights and of the order of images (default 0)")
    group.add_argument("--data", metavar="NAME", help="digits (default) or cifar10")
    group.add_argument("--folder", metavar="FOLDER", help="where CIFAR-10 is, in its published python format")
    group.add_argument(
        "--output",
        type=pathlib.Path,
        default=pathlib.Path("testbed-results"),
        metavar="FOLDER",
        help="takes pictures, tables and the summary (default testbed-results)",
    )


def _add_confirmation(group: "argparse._ArgumentGroup") -> None:
    group.add_argument(
        "--confirm",
        action="store_true",
        help="instead of an experiment, run real servers and the simulator with the same times, and compare; "
        "takes --workers (default 2,3,4)",
    )
    group.add_argument("--confirm-seconds", type=float, metavar="S", help="how long a real run is (default 10)")
    group.add_argument("--confirm-repeats", type=int, metavar="N", help="real runs of each setting (default 3)")
