"""The command `coordinator`: reads the arguments, calls one command, and gives the exit code.

Exit code 2 means that what was asked for cannot work: nothing was started then, and one line says why.
"""

import argparse
import os
import pathlib
import sys
from collections.abc import Sequence

from coordinator.cli.run import run
from coordinator.cli.simulate import add_simulate, with_negative_values
from coordinator.errors import ClusterSpecError, LaunchError
from coordinator.launch.further_command import FurtherCommand
from coordinator.launch.run_request import RunRequest
from coordinator.launch.serve import serve
from coordinator.launch.simulate_command import simulate

_UNUSABLE = 2


def main(arguments: Sequence[str] | None = None, *, further: Sequence[FurtherCommand] = ()) -> int:
    """Runs the command.

    Args:
      arguments: what follows the command's name; None takes this process's own.
      further: commands of higher layers.

    Returns:
      The exit code.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = _parser(further)
    whole = {"simulate": simulate, **{command.name: command.run for command in further}}
    if (name := next(iter(arguments), None)) in whole:
        return whole[name](parser.parse_args(with_negative_values(arguments)))
    given = parser.parse_args(arguments)
    try:
        if given.command == "run":
            return run(_request(given), os.environ)
        return serve(os.environ, job=given.job, index=given.index, exit_with_parent=given.exit_with_parent)
    except (ClusterSpecError, LaunchError) as error:
        print(f"coordinator {given.command}: {error}", file=sys.stderr)
        return _UNUSABLE


def _request(given: argparse.Namespace) -> RunRequest:
    return RunRequest(
        program=given.program,
        arguments=tuple(given.arguments),
        workers=given.workers,
        ps=given.ps,
        restarts=given.restarts,
        evaluator=given.evaluator,
        evaluator_timeout=given.evaluator_timeout,
        start_timeout=given.start_timeout,
        log_dir=given.log_dir,
    )


def _parser(further: Sequence[FurtherCommand]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="coordinator",
        description="Parameter-server training: a cluster on this machine, one server of any, or one in virtual time.",
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_run(commands)
    _add_serve(commands)
    add_simulate(commands)
    for command in further:
        command.add(commands)
    return parser


def _add_run(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "run a program on a cluster on this machine"
    usage = "coordinator run [options] PROGRAM [ARGUMENT ...]"
    running = commands.add_parser("run", help=text, description=text, usage=usage, allow_abbrev=False)
    running.add_argument("--workers", type=int, default=1, metavar="N", help="worker servers (default 1)")
    running.add_argument("--ps", type=int, default=1, metavar="N", help="parameter servers (default 1)")
    running.add_argument(
        "--restarts",
        type=int,
        default=0,
        metavar="N",
        help="start the program again, up to N times, when it is killed or fails; the servers go on (default 0)",
    )
    running.add_argument("--evaluator", action="store_true", help="run the program once more, as evaluator")
    running.add_argument(
        "--evaluator-timeout",
        type=float,
        default=300.0,
        metavar="SECONDS",
        help="how long the evaluator may go on after the chief has ended (default 300)",
    )
    running.add_argument(
        "--start-timeout",
        type=float,
        default=120.0,
        metavar="SECONDS",
        help="how long the servers may take until they answer (default 120)",
    )
    running.add_argument("--log-dir", type=pathlib.Path, metavar="FOLDER", help="keep the servers' logs there")
    running.add_argument("program", type=pathlib.Path, metavar="PROGRAM", help="a Python program")
    running.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="passed to the program")


def _add_serve(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "run one server of the cluster that TF_CONFIG describes"
    serving = commands.add_parser("serve", help=text, description=text, allow_abbrev=False)
    serving.add_argument("--job", metavar="JOB", help="worker or ps, in place of TF_CONFIG's task type")
    serving.add_argument("--index", type=int, metavar="N", help="its index, in place of TF_CONFIG's task index")
    serving.add_argument("--exit-with-parent", action="store_true", help="end when standard input is closed")
