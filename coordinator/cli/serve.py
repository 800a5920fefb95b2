"""`coordinator serve`: one server of a cluster."""

import argparse
import math
import os

from coordinator.launch.serve import serve as serve_task


def add_serve(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command to a parser's commands."""
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


def serve(given: argparse.Namespace) -> int:
    """Runs the server until a signal ends it, or what it depends on has ended.

    Returns:
      The exit code: 2 if it cannot serve, after a line that says why.
    """
    return serve_task(os.environ, **vars(given))
