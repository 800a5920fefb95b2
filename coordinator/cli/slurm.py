"""`coordinator slurm`: one task of a Slurm step, which is a cluster."""

import argparse
import os
import sys
from typing import Any

from coordinator.cli.dashboard_token import without_token
from coordinator.cli.run import add_program, with_token
from coordinator.errors import ClusterSpecError, LaunchError, SettingError
from coordinator.launch.console import Console
from coordinator.launch.run_request import RunRequest
from coordinator.launch.slurm_step import SlurmStep
from coordinator.launch.slurm_task import SlurmTask

_FAILED, _UNUSABLE = 1, 2


def add_slurm(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    text = "run a program on a cluster of the tasks of a Slurm step: one is the program's, the others are servers"
    usage = "srun --ntasks N coordinator slurm [options] PROGRAM [ARGUMENT ...]"
    # What is not given is left to the defaults of `RunRequest`.
    parser = commands.add_parser(
        "slurm", help=text, description=text, usage=usage, allow_abbrev=False, argument_default=argparse.SUPPRESS
    )
    parser.add_argument("--ps", type=int, metavar="N", help="parameter servers (default 1); other tasks are workers")
    add_program(parser)


def slurm(given: argparse.Namespace) -> int:
    """Runs one task.

    Returns:
      The exit code. That of the task with the program is the program's, or 128 + n if signal n ended it; 1 if a server
      did not start.

    Raises:
      LaunchError: this is no task of a step.
    """
    # Tasks on other nodes than the program's need not have its files.
    options: dict[str, Any] = {**vars(given), "arguments": tuple(given.arguments), "looks_for_files": False}
    step = SlurmStep.from_environment(os.environ)
    try:
        path = options.pop("token_file", None)
        if step.rank == 0:
            # Other nodes need not have the file.
            options["dashboard"] = with_token(options.get("dashboard"), path, os.environ)
        request = RunRequest(**options)
        workers = step.workers(request.ps, evaluator=request.evaluator)
    except (ClusterSpecError, LaunchError, SettingError):
        # All tasks find the same: one says it.
        if step.rank == 0:
            raise
        return _UNUSABLE
    console = Console(sys.stdout, sys.stderr)
    try:
        request = RunRequest(**options, workers=workers)
        return SlurmTask(step, request, without_token(os.environ), console).run()
    except LaunchError as error:
        console.say(str(error))
        return _FAILED
