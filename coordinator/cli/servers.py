"""`coordinator serve` and `coordinator slurm`: one server of a cluster, and one task of a Slurm step."""

import argparse
import math
import os
import sys
from typing import Any

from coordinator.cli.arguments import without_token
from coordinator.cli.run import add_program, with_token
from coordinator.errors import ClusterSpecError, LaunchError, SettingError
from coordinator.launch.program_process import Console
from coordinator.launch.run_request import RunRequest
from coordinator.launch.serve import serve as serve_task
from coordinator.launch.slurm import SlurmStep, SlurmTask


def add_serve(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "run one server of a cluster, given by TF_CONFIG or by --job, --index and --address"
    serving = commands.add_parser("serve", help=text, description=text, allow_abbrev=False)
    serving.add_argument("--job", metavar="JOB", help="worker or ps (default: TF_CONFIG's task type)")
    serving.add_argument("--index", type=int, metavar="N", help="its index (default: TF_CONFIG's task index)")
    text = "where its client reaches it (default: its entry in TF_CONFIG's cluster)"
    serving.add_argument("--address", metavar="HOST:PORT", help=text)
    text = "divide its CPU into N logical devices; a worker with several devices is as many replicas (default 1)"
    serving.add_argument("--devices", type=int, metavar="N", help=text)
    text = "the IP address of this machine at which it can be reached (default: all; loopback if its host is localhost)"
    serving.add_argument("--interface", metavar="ADDRESS", help=text)
    text = "answer /healthz and /metrics over HTTP on this port; 0 takes a free one"
    serving.add_argument("--health-port", type=int, metavar="PORT", help=text)
    text = "end, with code 0, when the program that uses it has ended without an error"
    serving.add_argument("--until-client-ends", action="store_true", help=text)
    text = "end when standard input is closed, and when nothing has come there for SECONDS (default: no limit)"
    serving.add_argument("--exit-with-parent", type=float, nargs="?", const=math.inf, metavar="SECONDS", help=text)


def serve(options: argparse.Namespace) -> int:
    """Runs the server until a signal ends it, or its client or parent has ended."""
    return serve_task(os.environ, **vars(options))


_FAILED, _UNUSABLE = 1, 2


def add_slurm(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "run a program on a cluster of the tasks of a Slurm step: one is the program's, the others are servers"
    usage = "srun --ntasks N coordinator slurm [options] PROGRAM [ARGUMENT ...]"
    # `RunRequest` has the defaults.
    parser = commands.add_parser(
        "slurm", help=text, description=text, usage=usage, allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    parser.add_argument("--ps", type=int, metavar="N", help="parameter servers (default 1); other tasks are workers")
    add_program(parser)


def slurm(options: argparse.Namespace) -> int:
    """Runs one task; returns its exit code.

    The program's task returns the program's code, 128 + n if signal n ended it, or 1 if a server did not start.
    """
    # Tasks on other nodes need not have the program's files.
    settings: dict[str, Any] = {**vars(options), "arguments": tuple(options.arguments), "looks_for_files": False}
    step = SlurmStep.from_environment(os.environ)
    try:
        path = settings.pop("token_file", None)
        if step.rank == 0:
            # Other nodes need not have the file of the token.
            settings["dashboard"] = with_token(settings.get("dashboard"), path, os.environ)
        request = RunRequest(**settings)
        workers = step.workers(request.ps, evaluator=request.evaluator)
    except (ClusterSpecError, LaunchError, SettingError):
        # All tasks find the same error, but only the first task reports it.
        if step.rank == 0:
            raise
        return _UNUSABLE
    console = Console(sys.stdout, sys.stderr)
    try:
        request = RunRequest(**settings, workers=workers)
        return SlurmTask(step, request, without_token(os.environ), console).run()
    except LaunchError as error:
        console.say(str(error))
        return _FAILED
