"""Settings of a simulation from the trace of a real training.

Each call in the trace says how long its steps took, and its counters how busy were the hosts and processes that all
workers share. The busiest of these is simulated as the only parameter server: with more workers, steps wait for it, and
the rate is at most what it can serve. Its times are exponential, as those of the network by which `scale_advice` tells
waiting from work. Computation of the worker is the rest: what a step takes of itself, and of all else that is shared.
"""

import dataclasses
import itertools
import json
import os
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from coordinator.dashboard.scale_advice import Load, Resource, own_seconds
from coordinator.errors import SettingError
from coordinator.events.trace import BUSY
from coordinator.paths import local_path
from coordinator.simulation.distribution import Distribution, Exponential, Samples

_WORKER = re.compile(r"worker (\d+)")
# What reading a file may lead to that has other names, types or numbers than a trace.
_STRANGE = (ArithmeticError, AttributeError, LookupError, MemoryError, RecursionError, TypeError, ValueError)
# A pull and a push.
_MESSAGES = 2


@dataclasses.dataclass(frozen=True, eq=False)
class Measured(Distribution):
    """Times that were measured, drawn at random.

    Attributes:
      times: in seconds, at least one.
    """

    times: Samples

    @property
    def mean(self) -> float:
        return float(self.times.mean())

    def sample(self, generator: np.random.Generator, count: int) -> Samples:
        return generator.choice(self.times, count)


@dataclasses.dataclass(frozen=True)
class Calibration:
    """What a trace says about a training.

    Attributes:
      load: how it went.
      settings: of a simulation of it, by names of `Setting`.
    """

    load: Load
    settings: dict[str, Any]


def calibration(path: str | os.PathLike[str]) -> Calibration:
    """Reads the trace of a training.

    Args:
      path: of the trace; see `strategy.trace`.

    Returns:
      The calibration. Steps that failed or were lost do not count, nor does the time before the first call.

    Raises:
      SettingError: the file cannot be read, is no trace, or has no finished call.
    """
    try:
        return _calibration(path, _events(path))
    except SettingError:
        raise
    except _STRANGE as error:
        # Another program's trace, or one that was changed.
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
    # One per step: a call of many steps has their mean.
    times = np.repeat([call["dur"] / 1e6 / _steps(call) for call in every], [_steps(call) for call in every])
    gaps = [gap for of_worker in calls.values() for gap in _gaps(of_worker)]
    load = Load(len(calls), rate, _resources(events), idle)
    others = (sum(resource.share for resource in load.resources) - load.busiest.share) / rate
    compute = max(own_seconds(load) + others - float(np.mean(gaps)), 0.0)
    settings = {
        "workers": len(calls),
        "ps": 1,
        "compute": Measured(times * (compute / times.mean())),
        "dispatch": Measured(np.array(gaps)),
        "service": Exponential(load.busiest.share / rate / _MESSAGES),
    }
    return Calibration(load, settings)


def _events(path: str | os.PathLike[str]) -> Sequence[Mapping[str, Any]]:
    try:
        with open(local_path(path, "It"), encoding="utf-8") as file:
            events: Sequence[Mapping[str, Any]] = json.load(file)["traceEvents"]
    except OSError as error:
        raise SettingError("from_trace", f"cannot read the trace {path}: {error}") from error
    return events


def _resources(events: Sequence[Mapping[str, Any]]) -> list[Resource]:
    shares = defaultdict(list)
    for each in events:
        if each.get("ph") == "C" and each["name"] == BUSY:
            for name, share in each["args"].items():
                shares[name].append(share)
    resources = [Resource(name, float(np.mean(found))) for name, found in shares.items()]
    return resources or [Resource("the parameter server", 0.0)]


def _steps(call: Mapping[str, Any]) -> int:
    return int(call["args"]["closures"])


def _end(call: Mapping[str, Any]) -> float:
    return float(call["ts"] + call["dur"])


def _gaps(calls: Sequence[Mapping[str, Any]]) -> list[float]:
    """Returns the time before each step in which its worker ran nothing, in seconds."""
    calls = sorted(calls, key=lambda call: float(call["ts"]))
    gaps = [0.0]
    for before, call in itertools.pairwise(calls):
        gap = max(0.0, call["ts"] - _end(before)) / 1e6
        gaps += [gap / _steps(call)] * _steps(call)
    return gaps
