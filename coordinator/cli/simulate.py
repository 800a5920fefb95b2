"""The options of `coordinator simulate`; `coordinator.simulation`, which reads them, is loaded when it runs."""

import argparse
import pathlib
import re
from collections.abc import Sequence

_RULES = "asynchronous, synchronous, stale_synchronous, bounded_delay, model_average, delayed"
_TIME = "a distribution, such as 50ms or lognormal(50ms,0.4)"
_NEGATIVE = re.compile(r"-\.?\d")


def add_simulate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    text = "simulate a cluster in virtual time: how fast, how stale, how idle; no servers, no TensorFlow"
    parser = commands.add_parser("simulate", help=text, description=text, allow_abbrev=False)
    _add_cluster(parser.add_argument_group("the cluster"))
    _add_rules(parser.add_argument_group("the update rule"))
    _add_faults(parser.add_argument_group("what goes wrong"))
    _add_course(parser.add_argument_group("what is done, and shown"))


def with_negative_values(arguments: Sequence[str]) -> list[str]:
    """Joins what looks like a negative value to the option before it: argparse would take `-5ms` for an option."""
    joined: list[str] = []
    for argument in arguments:
        if _NEGATIVE.match(argument) and joined and joined[-1].startswith("--") and "=" not in joined[-1]:
            joined[-1] = f"{joined[-1]}={argument}"
        else:
            joined.append(argument)
    return joined


def _add_cluster(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--workers", type=int, metavar="N", help="workers (default 4)")
    group.add_argument("--ps", type=int, metavar="N", help="parameter servers (default 1)")
    group.add_argument("--compute", metavar="TIMES", help=f"what a step computes for: {_TIME} (default 50ms)")
    group.add_argument("--dispatch", metavar="TIMES", help="between two steps of a worker: a distribution (default 0)")
    group.add_argument("--latency", metavar="TIMES", help="of a message, one way: a distribution (default 0)")
    group.add_argument("--bandwidth", metavar="RATE", help="of every link, such as 10Gbit (default inf)")
    group.add_argument("--model-bytes", metavar="SIZE", help="what is pulled, such as 100MB (default 0)")
    group.add_argument("--gradient-bytes", metavar="SIZE", help="what is pushed (default as --model-bytes)")
    group.add_argument("--service", metavar="TIMES", help="what a server takes for a message (default 0)")
    group.add_argument("--update", metavar="TIME", help="what a server takes for an update (default 0)")


def _add_rules(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--rule", metavar="RULE", help=f"one of {_RULES} (default asynchronous)")
    group.add_argument("--lr-staleness-modulation", action="store_true", default=None, help="rate / staleness")
    group.add_argument(
        "--grads-to-wait", metavar="N", help="gradients per update, or the word workers (synchronous: all; else 1)"
    )
    group.add_argument("--get-model-frequency", type=int, metavar="N", help="steps per pull (default 1)")
    group.add_argument("--max-lead", type=int, metavar="N", help="steps before the slowest, 1 or more (default any)")
    group.add_argument("--max-delay", metavar="N", help="the largest staleness of bounded_delay, or inf")
    group.add_argument("--delay", metavar="TIME", help="before a delayed gradient is applied, such as 0.5s, or inf")
    group.add_argument("--period", metavar="TIME", help="between two averagings of a worker (default 0)")
    group.add_argument("--warmup-steps", type=int, metavar="N", help="before averaging begins (default 0)")


def _add_faults(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--slow-down", metavar="W:F,...", help="worker W computes F times as long, such as 0:4,3:2")
    group.add_argument("--stragglers", metavar="SHARE", help="share of workers that are slow, such as 5%%")
    group.add_argument("--straggler-factor", type=float, metavar="F", help="by how much (default 4)")
    group.add_argument("--slow-steps", metavar="SHARE", help="share of steps, at random, that are slow")
    group.add_argument("--slow-step-factor", type=float, metavar="F", help="by how much (default 10)")
    group.add_argument("--pauses", metavar="W@T+T,...", help="worker W stands still, such as 3@10s+2s")
    group.add_argument("--deaths", metavar="W@T+T,...", help="worker W dies, and returns if +T is given")
    group.add_argument("--detection", metavar="TIME", help="until a death is known (default 1s)")


def _add_course(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--pushes", type=int, metavar="N", help="gradients of all workers (default 20000 or more)")
    group.add_argument("--seconds", metavar="TIME", help="of virtual time, such as 60s")
    group.add_argument("--seed", type=int, metavar="N", help="of random numbers (default 0)")
    group.add_argument("--learning-rate", type=float, metavar="R", help="learn something, too, at this rate")
    group.add_argument("--problem", metavar="NAME", help="small_network (default) or logistic_regression")
    group.add_argument("--compare", metavar="RULE,...", help="these rules, side by side")
    group.add_argument("--sweep", metavar="NAME=A..B", help="one setting, doubled from A to B, or NAME=A,B,C")
    group.add_argument("--plot", type=pathlib.Path, metavar="FILE", help="draw a picture, such as out.png")
    group.add_argument("--json", type=pathlib.Path, metavar="FILE", help="write the figures as JSON")
