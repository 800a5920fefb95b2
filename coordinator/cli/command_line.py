"""The command `coordinator`: parses the arguments, runs one command, and returns its exit code.

Exit code 2 means that the arguments cannot work: nothing was started, and one line says why.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence

from coordinator.cli.data import add_data, data
from coordinator.cli.doctor import add_doctor, doctor
from coordinator.cli.manifest import add_manifest, manifest
from coordinator.cli.profile import add_profile, profile
from coordinator.cli.run import add_run, run, with_dashboard_address
from coordinator.cli.serve import add_serve, serve
from coordinator.cli.simulate import add_simulate, simulate, with_negative_values
from coordinator.cli.slurm import add_slurm, slurm
from coordinator.cli.testbed import add_testbed, testbed
from coordinator.cli.top import add_top, top
from coordinator.errors import ClusterSpecError, LaunchError, SettingError
from coordinator.version import __version__

_UNUSABLE = 2
_COMMANDS = {
    "data": data,
    "doctor": doctor,
    "manifest": manifest,
    "profile": profile,
    "run": run,
    "serve": serve,
    "simulate": simulate,
    "slurm": slurm,
    "testbed": testbed,
    "top": top,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a command.

    Args:
      arguments: what follows the command's name; None takes this process's own.

    Returns:
      The exit code.
    """
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in ("simulate", "testbed"):
        arguments = with_negative_values(arguments)
    elif arguments and arguments[0] in ("run", "slurm"):
        arguments = with_dashboard_address(arguments)
    given = _parser().parse_args(arguments)
    command = vars(given).pop("command")
    try:
        code = _COMMANDS[command](given)
        sys.stdout.flush()
        return code
    except SettingError as error:
        reason = f"--{error.option.replace('_', '-')} {error.reason}"
    except (ClusterSpecError, LaunchError) as error:
        reason = str(error)
    except KeyboardInterrupt:
        # In a command that does not handle Ctrl-C (yet).
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # What reads the output has ended, as in `coordinator doctor | head -1`. Python would write the rest at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    print(f"coordinator {command}: {reason}", file=sys.stderr)
    return _UNUSABLE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="coordinator",
        description="Parameter-server training with TensorFlow: run a program on a cluster, start one server of a "
        "cluster, or simulate a cluster.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"coordinator {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    add_run(commands)
    add_serve(commands)
    add_slurm(commands)
    add_simulate(commands)
    add_testbed(commands)
    add_data(commands)
    add_top(commands)
    add_manifest(commands)
    add_doctor(commands)
    add_profile(commands)
    return parser
