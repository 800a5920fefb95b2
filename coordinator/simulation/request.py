"""Converts options of `coordinator simulate` to settings, and calibrates settings by the trace of a real training.

Each call in a trace has the duration of its steps. The counters have the load of the hosts and processes that all
workers share. The busiest of these resources is simulated as the only parameter server. With more workers, steps wait
for this server, and its capacity limits the rate. The service times are exponential, as in the queueing network by
which `scale_advice` separates waiting from work. The rest of a step is computation of the worker.
"""

import dataclasses
import functools
import itertools
import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from coordinator.addresses import local_path
from coordinator.dashboard.scale_advice import Load, Resource, own_seconds
from coordinator.errors import SettingError
from coordinator.events.trace import BUSY
from coordinator.simulation.distribution import (
    Empirical,
    Exponential,
    RandomDelay,
    parse_bytes,
    parse_delay,
    parse_number,
    parse_rate,
    parse_seconds,
    parse_share,
)
from coordinator.simulation.learning import Learning, LogisticRegression, Problem, SmallNetwork
from coordinator.simulation.rules import RULES, Rule
from coordinator.simulation.setting import Setting
from coordinator.simulation.simulated_tasks import Death, Pause

_WORKER = re.compile(r"worker (\d+)")
# Errors that a file with other names, types or numbers than a trace may raise.
_STRANGE = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)
# The number of messages of a step: a pull and a push.
_MESSAGES = 2


@dataclasses.dataclass(frozen=True)
class Calibration:
    """The load in the trace of a training, and attributes of the `Setting` that simulates the training, by name."""

    load: Load
    settings: dict[str, Any]


def calibration(path: str | os.PathLike[str]) -> Calibration:
    """Reads the trace of a training; see `strategy.trace`.

    Failed and lost steps and the time before the first call do not count. Raises SettingError if the file cannot be
    read, is not a trace, or has no finished call.
    """
    try:
        with open(local_path(path, "It"), encoding="utf-8") as file:
            return _calibration(path, json.load(file)["traceEvents"])
    except SettingError:
        raise
    except OSError as error:
        raise SettingError("from_trace", f"cannot read the trace {path}: {error}") from error
    except _STRANGE as error:
        # The file may be the trace of another program, or a changed trace.
        text = f"cannot read the trace {path}: {type(error).__name__}: {error}. Is it the trace of a training?"
        raise SettingError("from_trace", text) from error


def _calibration(path: str | os.PathLike[str], events: Sequence[Mapping[str, Any]]) -> Calibration:
    tracks = {each["tid"]: each["args"]["name"] for each in events if each.get("name") == "thread_name"}
    calls = defaultdict(list)
    for each in events:
        track = tracks.get(each.get("tid"), "")
        if each.get("ph") == "X" and _WORKER.fullmatch(track) and each.get("args", {}).get("outcome") == "finished":
            calls[track].append(each)
    if not calls:
        raise SettingError("from_trace", f"{path} has no finished call of a worker: is it the trace of a training?")
    every = [call for of_worker in calls.values() for call in of_worker]
    steps = sum(_steps(call) for call in every)
    begin, end = min(call["ts"] for call in every), max(_end(call) for call in every)
    rate = 1e6 * steps / (end - begin)
    idle = 1.0 - sum(call["dur"] for call in every) / (len(calls) * (end - begin))
    # One time per step. The steps of a call get the mean time of these steps.
    times = np.repeat([call["dur"] / 1e6 / _steps(call) for call in every], [_steps(call) for call in every])
    gaps = [gap for of_worker in calls.values() for gap in _gaps(of_worker)]
    shares = defaultdict(list)
    for each in events:
        if each.get("ph") == "C" and each["name"] == BUSY:
            for name, share in each["args"].items():
                shares[name].append(share)
    resources = [Resource(name, float(np.mean(found))) for name, found in shares.items()]
    load = Load(len(calls), rate, resources or [Resource("the parameter server", 0.0)], idle)
    others = (sum(resource.share for resource in load.resources) - load.busiest.share) / rate
    compute = max(own_seconds(load) + others - float(np.mean(gaps)), 0.0)
    settings = {
        "workers": len(calls),
        "ps": 1,
        "compute": Empirical(tuple((times * (compute / times.mean())).tolist())),
        "dispatch": Empirical(tuple(gaps)),
        "service": Exponential(load.busiest.share / rate / _MESSAGES),
    }
    return Calibration(load, settings)


def _steps(call: Mapping[str, Any]) -> int:
    return int(call["args"]["closures"])


def _end(call: Mapping[str, Any]) -> float:
    return float(call["ts"] + call["dur"])


def _gaps(calls: Sequence[Mapping[str, Any]]) -> list[float]:
    """Returns the time in seconds before each step in which the worker ran nothing."""
    calls = sorted(calls, key=lambda call: float(call["ts"]))
    gaps = [0.0]
    for before, call in itertools.pairwise(calls):
        gap = max(0.0, call["ts"] - _end(before)) / 1e6
        gaps += [gap / _steps(call)] * _steps(call)
    return gaps


SWEPT_SETTINGS = ("workers", "ps", "grads_to_wait", "max_delay", "max_lead", "get_model_frequency")
_RANGE = re.compile(r"(\d+)\.\.(\d+)", re.ASCII)
_LIST = re.compile(r"\d+(,\d+)*", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A setting (one of `SWEPT_SETTINGS`) with several values, in increasing order."""

    name: str
    values: tuple[int, ...]


def parse_sweep(text: str) -> Sweep:
    """Parses a sweep such as "workers=1..512" or "ps=1,2,4". Raises SettingError for another form."""
    name, _, rest = text.partition("=")
    name = name.strip().replace("-", "_")
    if name not in SWEPT_SETTINGS:
        raise SettingError(
            "sweep", f"must be of one of {', '.join(SWEPT_SETTINGS)}, as in workers=1..512; got {text!r}."
        )
    if (ends := _RANGE.fullmatch(rest)) and int(ends[1]) <= int(ends[2]):
        values, last = [int(ends[1])], int(ends[2])
        while values[-1] < last:
            values.append(min(max(2 * values[-1], 1), last))
        return Sweep(name, tuple(values))
    if _LIST.fullmatch(rest):
        return Sweep(name, tuple(sorted({int(value) for value in rest.split(",")})))
    raise SettingError("sweep", f"must have values such as {name}=1..512 or {name}=1,8,32; got {text!r}.")


PROBLEMS: dict[str, type[LogisticRegression | SmallNetwork]] = {
    "logistic_regression": LogisticRegression,
    "small_network": SmallNetwork,
}
_WORKERS = "workers"
_ABSENCE = re.compile(r"(\d+)@([^+]+)(?:\+(.+))?", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Request:
    """A request to simulate one rule or several. `options` maps names with underscores to values.

    One setting may take the values of a sweep. If there is a calibration, it gives the settings that have no option.
    """

    sweep: Sweep | None
    rules: tuple[str, ...]
    options: Mapping[str, Any]
    calibration: Calibration | None = None

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "Request":
        """Parses options: texts, integers, or None if not given. Raises SettingError if an option is wrong."""
        given = {name: value for name, value in options.items() if value is not None}
        sweep = parse_sweep(given["sweep"]) if "sweep" in given else None
        if "rule" in given and "compare" in given:
            raise SettingError("compare", "names the rules; --rule cannot be given beside it.")
        names = given["compare"].split(",") if "compare" in given else [given.get("rule", "asynchronous")]
        rules = tuple(name.strip() for name in names)
        if wrong := [name for name in rules if name not in RULES]:
            option = "compare" if "compare" in given else "rule"
            raise SettingError(option, f"must be of {', '.join(RULES)}; got {wrong[0]!r}.")
        if "from_trace" not in given:
            return cls(sweep, rules, given)
        if "ps" in given or (sweep is not None and sweep.name == "ps"):
            raise SettingError("ps", "cannot be given with --from-trace: what is busiest is simulated as one server.")
        return cls(sweep, rules, given, calibration(given["from_trace"]))

    def setting(self, rule: str, value: int | None = None) -> Setting:
        """Returns the setting for a rule and a value of the sweep. Raises SettingError if an option is wrong."""
        given = dict(self.options)
        if self.sweep is not None and value is not None:
            given[self.sweep.name] = value
        # By default, an update of the synchronous rule takes a gradient of each worker.
        if given.get("grads_to_wait", _WORKERS if rule == "synchronous" else None) == _WORKERS:
            measured = Setting.workers if self.calibration is None else self.calibration.load.workers
            given["grads_to_wait"] = given.get("workers", measured)
        given |= {name: parse(name, given[name]) for name, parse in _PARSERS.items() if name in given}
        if isinstance(given.get("delay"), RandomDelay):
            given["delay"] = dataclasses.replace(given["delay"], seed=given.get("seed", 0))
        given |= {"rule": rule_of(rule, given), "learning": _learning(given)}
        if self.calibration is not None:
            given = self.calibration.settings | given
        return Setting(
            **{field.name: given[field.name] for field in dataclasses.fields(Setting) if field.name in given}
        )


def rule_of(name: str, options: Mapping[str, Any]) -> Rule:
    """Creates a rule of `RULES` from the settings of any rules. Ignores settings that the rule does not have.

    Raises SettingError if a setting that the rule needs is missing, or a setting is wrong.
    """
    fields = dataclasses.fields(RULES[name])
    for field in fields:
        if field.default is dataclasses.MISSING and field.name not in options:
            raise SettingError(field.name, f"must be given for the rule {name}.")
    return RULES[name](**{field.name: options[field.name] for field in fields if field.name in options})


def _learning(given: Mapping[str, Any]) -> Learning | None:
    if "learning_rate" not in given:
        if "problem" in given:
            raise SettingError("problem", "is learned only with --learning-rate.")
        return None
    name = given.get("problem", "small_network")
    if name not in PROBLEMS:
        raise SettingError("problem", f"must be one of {', '.join(PROBLEMS)}; got {name!r}.")
    problem: Problem = PROBLEMS[name]()
    return Learning(problem, given["learning_rate"])


def _parse_slow_down(option: str, text: str) -> dict[int, float]:
    try:
        pairs = [part.split(":") for part in text.split(",")]
        return {int(worker): float(factor) for worker, factor in pairs}
    except ValueError:
        raise SettingError(option, f"must be WORKER:FACTOR, such as 0:4 or 0:4,3:2; got {text!r}.") from None


def _parse_absences(kind: Callable[..., Pause | Death], expected: str, option: str, text: str) -> list[Pause | Death]:
    """Returns pauses or deaths. A death without a length is permanent."""
    found = []
    for part in text.split(","):
        match = _ABSENCE.fullmatch(part.strip())
        if match is None:
            raise SettingError(option, f"must be {expected}, such as 3@10s+2s; got {part!r}.")
        if match[3] is None and kind is Pause:
            raise SettingError(option, f"must say how long, as in 3@10s+2s; got {text!r}.")
        found.append(kind(int(match[1]), *(parse_seconds(option, time) for time in match.groups()[1:] if time)))
    return found


# The parsers of options that are texts. Other options are values already.
_PARSERS: dict[str, Callable[[str, Any], Any]] = {
    "grads_to_wait": functools.partial(parse_number, int, f"an integer or {_WORKERS}"),
    "max_delay": lambda option, given: (
        math.inf if given == "inf" else parse_number(int, "an integer or inf", option, given)
    ),
    "delay": parse_delay,
    "period": parse_seconds,
    "slow_down": _parse_slow_down,
    "stragglers": parse_share,
    "slow_steps": parse_share,
    "pauses": functools.partial(_parse_absences, Pause, "WORKER@TIME+TIME"),
    "deaths": functools.partial(_parse_absences, Death, "WORKER@TIME, or WORKER@TIME+TIME for one that returns"),
    "detection": parse_seconds,
    "bandwidth": parse_rate,
    "model_bytes": parse_bytes,
    "gradient_bytes": parse_bytes,
    "update": parse_seconds,
    "seconds": parse_seconds,
}
