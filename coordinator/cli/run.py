"""`coordinator run`: a local cluster, and a program in each of its roles, until the program has ended."""

import pathlib
import shutil
import sys
import tempfile
from collections.abc import Mapping

from coordinator.errors import LaunchError
from coordinator.launch.console import Console
from coordinator.launch.local_job import LocalJob
from coordinator.launch.run_request import RunRequest


def run(request: RunRequest, environment: Mapping[str, str]) -> int:
    """Runs the program on a cluster of its own.

    Args:
      request: what is to be run.
      environment: the environment that all processes inherit.

    Returns:
      The exit code: the chief's, of its last start, or the evaluator's if that is 0; 128 + n when signal n ended the
      chief or this command; 1 when a server did not come up.

    Raises:
      LaunchError: the log folder or a process could not be made.
    """
    console = Console(sys.stdout, sys.stderr)
    log_folder = _log_folder(request)
    job = LocalJob(request, log_folder, environment, console)
    console.say(f"starting {_count(request.workers, 'worker')} and {_count(request.ps, 'parameter server')}.")
    try:
        with console.restored(keyboard=0):
            return job.run()
    finally:
        if request.log_dir is None and not job.is_log_needed:
            shutil.rmtree(log_folder, ignore_errors=True)


def _log_folder(request: RunRequest) -> pathlib.Path:
    try:
        if request.log_dir is None:
            return pathlib.Path(tempfile.mkdtemp(prefix="coordinator-logs-"))
        request.log_dir.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise LaunchError(f"The folder for logs could not be made: {error}. Give another --log-dir.") from error
    return request.log_dir


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
