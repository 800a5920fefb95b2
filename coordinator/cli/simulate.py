"""`coordinator simulate`: simulates clusters, and prints and draws the results."""

import argparse
import contextlib
import json
import pathlib
import re
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from coordinator.cli.arguments import local_file
from coordinator.errors import SettingError

if TYPE_CHECKING:
    from coordinator.simulation.request import Request
    from coordinator.simulation.result import Result

_RULES = "asynchronous, synchronous, stale_synchronous, bounded_delay, model_average, delayed"
_TIME = "a distribution, such as 50ms or lognormal(50ms,0.4)"
_NEGATIVE = re.compile(r"-\.?\d")


def add_simulate(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    text = "simulate a cluster in virtual time: how fast, how stale, how idle; no servers, no TensorFlow"
    parser = commands.add_parser("simulate", help=text, description=text, allow_abbrev=False)
    _add_cluster(parser.add_argument_group("the cluster"))
    _add_rules(parser.add_argument_group("the update rule"))
    _add_faults(parser.add_argument_group("faults"))
    _add_run(parser.add_argument_group("the run and its output"))


def with_negative_values(arguments: Sequence[str]) -> list[str]:
    """Joins a negative value with the option before it, because argparse would take `-5ms` for an option."""
    joined: list[str] = []
    for argument in arguments:
        if _NEGATIVE.match(argument) and joined and joined[-1].startswith("--") and "=" not in joined[-1]:
            joined[-1] = f"{joined[-1]}={argument}"
        else:
            joined.append(argument)
    return joined


def _add_cluster(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--from-trace", type=local_file, metavar="FILE", help="times and sizes of a traced training")
    group.add_argument("--workers", type=int, metavar="N", help="workers (default 4)")
    group.add_argument("--ps", type=int, metavar="N", help="parameter servers (default 1)")
    group.add_argument("--compute", metavar="TIMES", help=f"computation of a step: {_TIME} (default 50ms)")
    text = "time between two steps of a worker: a distribution (default 0)"
    group.add_argument("--dispatch", metavar="TIMES", help=text)
    group.add_argument("--latency", metavar="TIMES", help="of a message, one way: a distribution (default 0)")
    group.add_argument("--bandwidth", metavar="RATE", help="of every link, such as 10Gbit (default inf)")
    group.add_argument("--model-bytes", metavar="SIZE", help="size of a pull, such as 100MB (default 0)")
    group.add_argument("--gradient-bytes", metavar="SIZE", help="size of a push (default as --model-bytes)")
    group.add_argument("--service", metavar="TIMES", help="time of a server for a message (default 0)")
    group.add_argument("--update", metavar="TIME", help="time of a server for an update (default 0)")


def _add_rules(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--rule", metavar="RULE", help=f"one of {_RULES} (default asynchronous)")
    group.add_argument("--lr-staleness-modulation", action="store_true", default=None, help="rate / staleness")
    text = "gradients per update, or the word workers (synchronous: all; else 1)"
    group.add_argument("--grads-to-wait", metavar="N", help=text)
    group.add_argument("--get-model-frequency", type=int, metavar="N", help="steps per pull (default 1)")
    group.add_argument("--max-lead", type=int, metavar="N", help="steps before the slowest, 1 or more (default any)")
    group.add_argument("--max-delay", metavar="N", help="the largest staleness of bounded_delay, or inf")
    text = "before a delayed gradient is applied: 0.5s, inf, a distribution, or one for each worker: 0s/0.5s"
    group.add_argument("--delay", metavar="TIME", help=text)
    group.add_argument("--period", metavar="TIME", help="between two averagings of a worker (default 0)")
    group.add_argument("--warmup-steps", type=int, metavar="N", help="before averaging begins (default 0)")


def _add_faults(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--slow-down", metavar="W:F,...", help="worker W takes F times as long, such as 0:4,3:2")
    group.add_argument("--stragglers", metavar="SHARE", help="share of workers that are slow, such as 5%%")
    group.add_argument("--straggler-factor", type=float, metavar="F", help="by how much (default 4)")
    group.add_argument("--slow-steps", metavar="SHARE", help="share of steps, at random, that are slow")
    group.add_argument("--slow-step-factor", type=float, metavar="F", help="by how much (default 10)")
    group.add_argument("--pauses", metavar="W@T+T,...", help="worker W stands still, such as 3@10s+2s")
    group.add_argument("--deaths", metavar="W@T+T,...", help="worker W dies, and returns if +T is given")
    group.add_argument("--detection", metavar="TIME", help="time until a death is detected (default 1s)")


def _add_run(group: "argparse._ArgumentGroup") -> None:
    group.add_argument("--pushes", type=int, metavar="N", help="gradients of all workers (default 20000 or more)")
    group.add_argument("--seconds", metavar="TIME", help="of virtual time, such as 60s")
    group.add_argument("--seed", type=int, metavar="N", help="of random numbers (default 0)")
    group.add_argument("--learning-rate", type=float, metavar="R", help="also train a model, at this rate")
    group.add_argument("--problem", metavar="NAME", help="small_network (default) or logistic_regression")
    group.add_argument("--compare", metavar="RULE,...", help="simulate these rules, side by side")
    group.add_argument("--sweep", metavar="NAME=A..B", help="one setting, doubled from A to B, or NAME=A,B,C")
    group.add_argument("--plot", type=local_file, metavar="FILE", help="draw a picture, such as out.png")
    group.add_argument("--trace", type=local_file, metavar="FILE", help="write a trace for the Perfetto UI")
    group.add_argument("--json", type=local_file, metavar="FILE", help="write the figures as JSON")


# The name of each rule, with a result for each value of the sweep.
Series = list[tuple[str, list["Result"]]]


def simulate(options: argparse.Namespace) -> int:
    """Runs the command; returns its exit code."""
    from coordinator.simulation.request import Request

    request = Request.of(vars(options))
    if options.trace is not None and (request.sweep or len(request.rules) > 1):
        raise SettingError("trace", "is of one simulation: leave out --sweep and --compare.")
    series = _series(request)
    print(_text(request, series))
    if request.calibration is not None:
        from coordinator.dashboard.scale_advice import scale_advice

        print(f"advice: {scale_advice(request.calibration.load).text}")
    if options.json is not None:
        _write_json(options, request, series)
    if options.plot is not None:
        _draw(options, request, series)
    if options.trace is not None:
        from coordinator.simulation.result import write_trace

        with _refused("trace", options.trace):
            write_trace(series[0][1][0], options.trace)
    return 0


def _series(request: "Request") -> Series:
    from coordinator.simulation.simulated_cluster import simulate as run

    values = request.sweep.values if request.sweep else (None,)
    # All settings are checked before the first simulation runs.
    settings = [(rule, [request.setting(rule, value) for value in values]) for rule in request.rules]
    return [(rule, [run(setting) for setting in of_rule]) for rule, of_rule in settings]


def _text(request: "Request", series: Series) -> str:
    from coordinator.simulation.result import advice, summary, table

    if request.sweep:
        rows = [
            (f"{rule} {value}", result)
            for rule, results in series
            for value, result in zip(request.sweep.values, results, strict=True)
        ]
        return table(f"rule, {request.sweep.name}", rows)
    if len(series) > 1:
        return table("rule", [(str(result.setting.rule), result) for _, (result,) in series])
    ((_, (result,)),) = series
    return "\n".join([summary(result), *(f"note: {sentence}" for sentence in advice(result))])


def _draw(options: argparse.Namespace, request: "Request", series: Series) -> None:
    from coordinator.simulation import picture

    if request.sweep:
        figure = picture.scaling(request.sweep.name, request.sweep.values, series)
    elif len(series) > 1:
        figure = picture.comparison([(str(result.setting.rule), result) for _, (result,) in series])
    else:
        figure = picture.picture(series[0][1][0])
    picture.save(figure, options.plot)


def _write_json(options: argparse.Namespace, request: "Request", series: Series) -> None:
    records = [
        {"rule": str(result.setting.rule), "workers": result.setting.workers, "ps": result.setting.ps}
        | ({request.sweep.name: value} if request.sweep else {})
        | result.summary()
        for _, results in series
        for value, result in zip(request.sweep.values if request.sweep else (None,), results, strict=True)
    ]
    with _refused("json", options.json):
        options.json.write_text(json.dumps(records, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _refused(option: str, path: pathlib.Path) -> Iterator[None]:
    """Raises SettingError if the file of an option cannot be written within the scope."""
    try:
        yield
    except OSError as error:
        raise SettingError(option, f"cannot be written to {path}: {error}") from error
