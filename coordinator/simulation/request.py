"""What `coordinator simulate` is asked for: texts, read into settings."""

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import Any

from coordinator.errors import SettingError
from coordinator.simulation.absence import Death, Pause
from coordinator.simulation.learning import Learning
from coordinator.simulation.problem import LogisticRegression, Problem, SmallNetwork
from coordinator.simulation.quantity import bytes_of, bytes_per_second_of, seconds_of, share_of
from coordinator.simulation.rules.by_name import RULE_NAMES, rule_of
from coordinator.simulation.setting import Setting
from coordinator.simulation.sweep import Sweep, sweep_of

PROBLEMS: dict[str, type[LogisticRegression | SmallNetwork]] = {
    "logistic_regression": LogisticRegression,
    "small_network": SmallNetwork,
}
_WORKERS = "workers"
_ABSENCE = re.compile(r"(\d+)@([^+]+)(?:\+(.+))?", re.ASCII)


@dataclasses.dataclass(frozen=True)
class Request:
    """The settings to simulate.

    Attributes:
      sweep: the setting that takes several values; None if none does.
      rules: the names of the rules that are compared, at least one.
      options: what was given, by the name of the option with underscores.
    """

    sweep: Sweep | None
    rules: tuple[str, ...]
    options: Mapping[str, Any]

    @classmethod
    def of(cls, options: Mapping[str, Any]) -> "Request":
        """Reads what was given: texts, integers, or None for what was not.

        Raises:
          SettingError: something is wrong with it.
        """
        given = {name: value for name, value in options.items() if value is not None}
        sweep = sweep_of(given["sweep"]) if "sweep" in given else None
        if "rule" in given and "compare" in given:
            raise SettingError("compare", "names the rules; --rule cannot be given beside it.")
        names = given["compare"].split(",") if "compare" in given else [given.get("rule", "asynchronous")]
        rules = tuple(name.strip() for name in names)
        if wrong := [name for name in rules if name not in RULE_NAMES]:
            option = "compare" if "compare" in given else "rule"
            raise SettingError(option, f"must be of {', '.join(RULE_NAMES)}; got {wrong[0]!r}.")
        return cls(sweep, rules, given)

    def setting(self, rule: str, value: int | None = None) -> Setting:
        """The setting with one of the rules, and a value of the sweep.

        Raises:
          SettingError: something is wrong with it.
        """
        given = dict(self.options)
        if self.sweep is not None and value is not None:
            given[self.sweep.name] = value
        read: dict[str, Any] = {name: given[name] for name in _TAKEN_AS_THEY_ARE if name in given}
        read |= {name: reader(name, given[name]) for name, reader in _READERS.items() if name in given}
        return Setting(**read, rule=rule_of(rule, _rule_options(rule, given)), learning=_learning(given))


def _rule_options(rule: str, given: Mapping[str, Any]) -> dict[str, Any]:
    options = dict(given)
    workers = given.get("workers", Setting.workers)
    if "max_delay" in given:
        options["max_delay"] = _whole("max_delay", given["max_delay"], "inf", math.inf)
    if "grads_to_wait" in given:
        options["grads_to_wait"] = _whole("grads_to_wait", given["grads_to_wait"], _WORKERS, workers)
    elif rule == "synchronous":
        options["grads_to_wait"] = workers
    if "delay" in given:
        options["delay"] = math.inf if given["delay"] == "inf" else seconds_of("delay", given["delay"])
    if "period" in given:
        options["period"] = seconds_of("period", given["period"])
    return options


def _whole(option: str, given: int | str, word: str, meaning: float) -> float:
    """A whole number, or what a word means."""
    if given == word:
        return meaning
    try:
        return int(given)
    except ValueError:
        raise SettingError(option, f"must be a whole number or {word}, got {given!r}.") from None


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


def _slow_down(option: str, text: str) -> dict[int, float]:
    try:
        pairs = [part.split(":") for part in text.split(",")]
        return {int(worker): float(factor) for worker, factor in pairs}
    except ValueError:
        raise SettingError(option, f"must be WORKER:FACTOR, such as 0:4 or 0:4,3:2; got {text!r}.") from None


def _pauses(option: str, text: str) -> list[Pause]:
    found = _absences(option, text, "WORKER@TIME+TIME, such as 3@10s+2s")
    if any(length is None for _, _, length in found):
        raise SettingError(option, f"must say how long, as in 3@10s+2s; got {text!r}.")
    return [Pause(worker, at, length or 0.0) for worker, at, length in found]


def _deaths(option: str, text: str) -> list[Death]:
    found = _absences(option, text, "WORKER@TIME, or WORKER@TIME+TIME for one that returns, such as 3@10s+5s")
    return [Death(worker, at, math.inf if length is None else length) for worker, at, length in found]


def _absences(option: str, text: str, expected: str) -> list[tuple[int, float, float | None]]:
    found = []
    for part in text.split(","):
        match = _ABSENCE.fullmatch(part.strip())
        if match is None:
            raise SettingError(option, f"must be {expected}; got {part!r}.")
        length = None if match[3] is None else seconds_of(option, match[3])
        found.append((int(match[1]), seconds_of(option, match[2]), length))
    return found


_TAKEN_AS_THEY_ARE = (
    "workers",
    "ps",
    "compute",
    "straggler_factor",
    "slow_step_factor",
    "dispatch",
    "latency",
    "service",
    "pushes",
    "seed",
)
_READERS = {
    "slow_down": _slow_down,
    "stragglers": share_of,
    "slow_steps": share_of,
    "pauses": _pauses,
    "deaths": _deaths,
    "detection": seconds_of,
    "bandwidth": bytes_per_second_of,
    "model_bytes": bytes_of,
    "gradient_bytes": bytes_of,
    "update": seconds_of,
    "seconds": seconds_of,
}
