"""The command `coordinator`: parses the arguments, runs one command, and returns its exit code.

Exit code 2 means that the arguments cannot work, so that nothing was started, and one line says why. Wrong arguments, a
closed output and a full output never lead to a traceback.
"""

import argparse
import contextlib
import errno
import io
import os
import signal
import sys
from collections.abc import Sequence

from coordinator.cli.data import add_data, data
from coordinator.cli.doctor import add_doctor, add_profile, doctor, profile
from coordinator.cli.manifest import add_manifest, manifest
from coordinator.cli.run import add_run, run, with_dashboard_address
from coordinator.cli.servers import add_serve, add_slurm, serve, slurm
from coordinator.cli.simulate import add_simulate, simulate, with_negative_values
from coordinator.cli.testbed import add_testbed, testbed
from coordinator.cli.top import add_top, top
from coordinator.errors import ClusterSpecError, LaunchError, SettingError
from coordinator.version import __version__

_FAILED, _UNUSABLE = 1, 2
# Errors of writing to a disk that is full or broken.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
# Command -> the function that adds it to the parser, and the function that runs it.
_COMMANDS = {
    "run": (add_run, run),
    "serve": (add_serve, serve),
    "slurm": (add_slurm, slurm),
    "simulate": (add_simulate, simulate),
    "testbed": (add_testbed, testbed),
    "data": (add_data, data),
    "top": (add_top, top),
    "manifest": (add_manifest, manifest),
    "doctor": (add_doctor, doctor),
    "profile": (add_profile, profile),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command of `arguments`, by default the arguments of this process; returns its exit code."""
    _open_standard_streams()
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in ("simulate", "testbed"):
        arguments = with_negative_values(arguments)
    elif arguments and arguments[0] in ("run", "slurm"):
        arguments = with_dashboard_address(arguments)
    options = _parser().parse_args(arguments)
    command = vars(options).pop("command")
    try:
        code = _COMMANDS[command][1](options)
        sys.stdout.flush()
        return code
    except SettingError as error:
        reason = f"--{error.option.replace('_', '-')} {error.reason}"
    except (ClusterSpecError, LaunchError) as error:
        reason = str(error)
    except KeyboardInterrupt:
        # The command does not handle Ctrl-C, or does not handle it yet.
        return 128 + signal.SIGINT
    except BrokenPipeError:
        # The reader of the output has ended, as in `coordinator doctor | head -1`.
        _drop_output()
        return 128 + signal.SIGPIPE
    except OSError as error:
        if error.errno not in _FULL or error.filename is not None:
            raise
        _drop_output()
        _say(f"coordinator {command}: its output cannot be written: {error.strerror}.")
        return _FAILED
    _say(f"coordinator {command}: {reason}")
    return _UNUSABLE


def _drop_output() -> None:
    """Drops text that was printed but not yet written, because Python would write that text when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(text: str) -> None:
    # Standard error may be a file on a full disk, as the output may be.
    with contextlib.suppress(OSError):
        print(text, file=sys.stderr, flush=True)


def _open_standard_streams() -> None:
    """Opens streams that were closed before this process began (`>&-`); makes all streams accept any text."""
    for descriptor, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            # Otherwise the next opened file would get this descriptor, and printed text would go to that file.
            opened = os.open(os.devnull, os.O_RDWR)
            if opened != descriptor:
                os.dup2(opened, descriptor)
                os.close(opened)
            os.set_inheritable(descriptor, True)
            setattr(sys, name, open(descriptor, "r" if name == "stdin" else "w", closefd=False))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # Names of files may contain bytes that are not text.
            stream.reconfigure(errors="backslashreplace")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="coordinator",
        description="Parameter-server training with TensorFlow: run a program on a cluster, start one server of a "
        "cluster, or simulate a cluster.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"coordinator {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for add, _ in _COMMANDS.values():
        add(commands)
    return parser
