"""Tests that options are checked when they are created."""

import dataclasses
import math
import types

import numpy as np
import pytest

from coordinator.errors import SettingError
from coordinator.options import (
    DASHBOARD,
    RESTART_COUNT,
    TRACE,
    Options,
    SettingTypeError,
    check_integer,
    check_number,
    check_transfer_dtype,
    with_program_settings,
)

DEFAULTS = {field.name: field.default for field in dataclasses.fields(Options)}


COUNTS = [name for name, default in DEFAULTS.items() if type(default) is int]
SWITCHES = [name for name, default in DEFAULTS.items() if type(default) is bool]
UNLIMITED = [name for name, default in DEFAULTS.items() if default is None]
WORDS = {
    "version_mismatch": ("error", "warn"),
    "sparse_updates": ("rows", "dense"),
    "log_format": ("text", "json"),
}
# Unset by default, and no time.
OTHERS = ["steps_per_dispatch", "dashboard", "trace", "transfer_dtype"]
TIMES = [name for name in DEFAULTS if name not in {*COUNTS, *SWITCHES, *WORDS, *OTHERS}]


def test_every_option_has_a_default_that_passes() -> None:
    assert Options() == Options()
    assert {type(DEFAULTS[name]) for name in TIMES} <= {float, type(None)}


def test_a_count_is_a_positive_integer() -> None:
    for name in (*COUNTS, "steps_per_dispatch"):
        for value in (-1, 1.0, "2", *[None] * (name in COUNTS), True):
            with pytest.raises(ValueError, match=rf"^Options.{name} must be an integer .*, got {value!r}\.$"):
                Options(**{name: value})


@pytest.mark.parametrize("name", TIMES)
def test_a_time_is_a_positive_finite_number(name: str) -> None:
    for value in (0, -1.0, math.nan, math.inf, 1e300, 10**400, "2", True):
        with pytest.raises(ValueError, match=f"^Options.{name} must be a number of seconds above 0 .*, got "):
            Options(**{name: value})
    for value in (1, 0.001):
        assert getattr(Options(**{name: value}), name) == value
    # Only those that are unlimited by default can be.
    if name in UNLIMITED:
        assert getattr(Options(**{name: None}), name) is None
    else:
        with pytest.raises(ValueError, match=name):
            Options(**{name: None})


def test_what_is_no_address_is_refused() -> None:
    for value in ("8080", ":8080", "here:99999", "here:80/a/b", "here:80/a b", "http://here:80", 80, True):
        with pytest.raises(ValueError, match=r"^Options.dashboard must be 'host:port', such as '127.0.0.1:0', or "):
            Options(dashboard=value)


def test_a_switch_is_on_or_off_and_a_choice_is_one_of_two_words() -> None:
    for name in SWITCHES:
        for value in (0, 1, None, "no"):
            with pytest.raises(ValueError, match=rf"^Options.{name} must be True or False, got {value!r}\.$"):
                Options(**{name: value})
        assert getattr(Options(**{name: not DEFAULTS[name]}), name) is not DEFAULTS[name]
    for name, (first, second) in WORDS.items():
        assert Options(**{name: first}) != Options(**{name: second})
        for value in ("ignore", None, True):
            with pytest.raises(ValueError, match=rf'^Options.{name} must be "{first}" or "{second}", got {value!r}\.$'):
                Options(**{name: value})


def test_an_integer_has_bounds() -> None:
    for value, maximum, message in ((0, None, "of at least 1, got 0."), (9, 8, "from 1 to 8, got 9.")):
        check_integer("count", 1, 1, maximum)
        check_integer("count", maximum or 2**70, 1, maximum)
        with pytest.raises(SettingError) as caught:
            check_integer("count", value, 1, maximum)
        assert str(caught.value) == f"count must be an integer {message}"
        assert not isinstance(caught.value, TypeError)


@pytest.mark.parametrize(
    ("value", "bounds", "message"),
    [
        (math.nan, {"minimum": 0, "maximum": math.inf}, "of at least 0, got nan"),
        (math.inf, {"minimum": 0}, "of at least 0, got inf"),
        (2, {"minimum": 0, "maximum": 1}, "from 0 to 1, got 2"),
        (0, {"above": 0}, "above 0, got 0"),
        (9, {"above": 0, "maximum": 8}, "above 0 and at most 8, got 9"),
    ],
)
def test_a_number_has_bounds(value: float, bounds: dict[str, float], message: str) -> None:
    for good in (1, 0.5, np.float32(0.5)):
        check_number("time", good, **bounds)
    with pytest.raises(SettingError) as caught:
        check_number("time", value, unit="seconds", **bounds)
    assert str(caught.value) == f"time must be a number of seconds {message}."


def test_a_value_of_another_type_is_a_type_error_too() -> None:
    for value in (True, 1.0, "1", None):
        with pytest.raises(SettingTypeError, match=r"^count must be an integer of at least 0, or inf, got .*\.$"):
            check_integer("count", value, 0, note=", or inf")
    for value in (True, "1", None, 1j):
        with pytest.raises(SettingTypeError, match=r"^time must be a number of at least 0, got "):
            check_number("time", value, 0)


def test_another_dtype_of_messages_is_refused_and_float16_with_the_reason() -> None:
    check_transfer_dtype("transfer_dtype", types.SimpleNamespace(name="bfloat16"))
    with pytest.raises(SettingError, match=r"^transfer_dtype must be .*\(its numbers end at 65,504, and smaller ones"):
        check_transfer_dtype("transfer_dtype", types.SimpleNamespace(name="float16"))
    for value in ("bfloat16", 16, True):
        with pytest.raises(SettingTypeError, match=rf"^transfer_dtype must be tf.bfloat16, .*, got {value!r}\.$"):
            check_transfer_dtype("transfer_dtype", value)


def test_the_address_of_the_environment_is_used_unless_the_program_has_one() -> None:
    environment = {DASHBOARD: "127.0.0.1:8080/token"}
    assert with_program_settings(None, environment).dashboard == "127.0.0.1:8080/token"
    own = Options(dashboard="localhost:0", max_attempts=7)
    assert with_program_settings(own, environment) == own
    assert with_program_settings(own, {}) == own
    assert with_program_settings(None, {}) == Options()
    with pytest.raises(ValueError, match=r"Options\.dashboard must be 'host:port'"):
        with_program_settings(None, {DASHBOARD: "here"})


def test_the_trace_of_each_start_has_a_file_unless_the_program_has_named_one() -> None:
    environment = {TRACE: "folder.d/trace.json", RESTART_COUNT: "0"}
    assert with_program_settings(None, environment).trace == "folder.d/trace.json"
    assert with_program_settings(None, environment | {RESTART_COUNT: "2"}).trace == "folder.d/trace.2.json"
    assert with_program_settings(Options(trace="own.json"), environment).trace == "own.json"
