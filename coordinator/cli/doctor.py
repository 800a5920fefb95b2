"""`coordinator doctor`: examines this installation, this machine, and the cluster of `TF_CONFIG`."""

import argparse
import os

from coordinator.launch.doctor import Finding, examine
from coordinator.launch.task_config import TaskConfig
from coordinator.setting_checks import check_number
from coordinator.version import __version__


def add_doctor(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to a parser's commands."""
    text = "examine this installation, this machine, and whether each task of TF_CONFIG's cluster answers"
    examining = commands.add_parser("doctor", help=text, description=text, allow_abbrev=False)
    text = "how long a task may take to answer (default 5)"
    examining.add_argument("--timeout", type=float, default=5.0, metavar="SECONDS", help=text)


def doctor(given: argparse.Namespace) -> int:
    """Runs the command.

    Returns:
      The exit code: 1 if there is a problem.

    Raises:
      ClusterSpecError: `TF_CONFIG` is wrong.
      SettingError: the timeout is not above 0.
    """
    check_number("timeout", given.timeout, above=0, unit="seconds")
    text = os.environ.get("TF_CONFIG", "")
    config = TaskConfig.of_client(text) if text.strip() else None
    _print(Finding("coordinator", __version__))
    problems = 0
    for finding in examine(os.environ, config, given.timeout):
        problems += finding.is_problem
        _print(finding)
    print(f"{problems} problem{'' if problems == 1 else 's'} found." if problems else "No problem found.")
    return 1 if problems else 0


def _print(finding: Finding) -> None:
    print(f"{'!!' if finding.is_problem else '  '} {finding.subject:<11}  {finding.text}", flush=True)
