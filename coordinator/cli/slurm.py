"""`coordinator slurm`: one task of a Slurm step, which is a cluster."""

import argparse
import os
import pathlib
import sys
from typing import Any

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
    text = "start a server that ends again, up to N times each (default 3)"
    parser.add_argument("--server-restarts", type=int, metavar="N", help=text)
    parser.add_argument("--evaluator", action="store_true", help="the last task runs the program as evaluator")
    text = "how long the evaluator may run after the chief has ended (default 300)"
    parser.add_argument("--evaluator-timeout", type=float, metavar="SECONDS", help=text)
    text = "how long the tasks may take until all servers answer (default 120)"
    parser.add_argument("--start-timeout", type=float, metavar="SECONDS", help=text)
    text = "show on a page, from the node of the first task, what happens; port 0 takes a free one"
    parser.add_argument("--dashboard", metavar="HOST:PORT[/TOKEN]", help=text)
    parser.add_argument("--trace", type=pathlib.Path, metavar="FILE", help="write a trace for the Perfetto UI")
    parser.add_argument("-m", "--module", action="store_true", help="the program is a module, as for `python -m`")
    parser.add_argument("program", metavar="PROGRAM", help="a Python program")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="ARGUMENT", help="passed to the program")


def slurm(given: argparse.Namespace) -> int:
    """Runs one task.

    Returns:
      The exit code. That of the task with the program is the program's, or 128 + n if signal n ended it; 1 if a server
      did not start.

    Raises:
      LaunchError: this is no task of a step.
    """
    options: dict[str, Any] = {**vars(given), "arguments": tuple(given.arguments)}
    step = SlurmStep.from_environment(os.environ)
    try:
        request = RunRequest(**options)
        workers = step.workers(request.ps, evaluator=request.evaluator)
    except (ClusterSpecError, LaunchError, SettingError):
        # All tasks find the same: one says it.
        if step.rank == 0:
            raise
        return _UNUSABLE
    console = Console(sys.stdout, sys.stderr)
    try:
        return SlurmTask(step, RunRequest(**options, workers=workers), os.environ, console).run()
    except LaunchError as error:
        console.say(str(error))
        return _FAILED
