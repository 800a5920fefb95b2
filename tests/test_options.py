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
UNSET_COUNTS = ["steps_per_dispatch"]
ADDRESSES = ["dashboard"]
PATHS = ["trace"]
DTYPES = ["transfer_dtype"]
TIMES = [
    name
    for name, default in DEFAULTS.items()
    if type(default) is float or (default is None and name not in UNSET_COUNTS + ADDRESSES + PATHS + DTYPES)
]
UNLIMITED = [name for name, default in DEFAULTS.items() if default is None]


def test_every_option_has_a_default_that_passes() -> None:
    words = ["sparse_updates", "version_mismatch", "log_format"]
    assert {*COUNTS, *UNSET_COUNTS, *SWITCHES, *TIMES, *ADDRESSES, *PATHS, *DTYPES, *words} == set(DEFAULTS)
    assert Options() == Options()


@pytest.mark.parametrize("name", [*COUNTS, *UNSET_COUNTS])
def test_a_count_is_a_positive_integer(name: str) -> None:
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


def test_only_times_that_are_unlimited_by_default_can_be_unlimited() -> None:
    for name in UNLIMITED:
        assert getattr(Options(**{name: None}), name) is None
    for name in set(TIMES) - set(UNLIMITED):
        with pytest.raises(ValueError, match=name):
            Options(**{name: None})


@pytest.mark.parametrize(
    "value", ["8080", ":8080", "here:99999", "here:80/a/b", "here:80/a b", "http://here:80", 80, True]
)
def test_what_is_no_address_is_refused(value: object) -> None:
    with pytest.raises(ValueError, match=r"^Options.dashboard must be 'host:port', such as '127.0.0.1:0', or "):
        Options(dashboard=value)


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_is_on_or_off(name: str) -> None:
    for value in (0, 1, None, "no"):
        with pytest.raises(ValueError, match=rf"^Options.{name} must be True or False, got {value!r}\.$"):
            Options(**{name: value})
    assert getattr(Options(**{name: not DEFAULTS[name]}), name) is not DEFAULTS[name]


@pytest.mark.parametrize(
    ("name", "first", "second"), [("version_mismatch", "error", "warn"), ("sparse_updates", "rows", "dense")]
)
def test_a_choice_is_one_of_two_words(name: str, first: str, second: str) -> None:
    assert Options(**{name: first}) != Options(**{name: second})
    for value in ("ignore", None, True):
        with pytest.raises(ValueError, match=rf'^Options.{name} must be "{first}" or "{second}", got {value!r}\.$'):
            Options(**{name: value})


@pytest.mark.parametrize(
    ("value", "maximum", "message"),
    [
        (0, None, "count must be an integer of at least 1, got 0."),
        (9, 8, "count must be an integer from 1 to 8, got 9."),
    ],
)
def test_an_integer_has_bounds(value: int, maximum: int | None, message: str) -> None:
    check_integer("count", 1, 1, maximum)
    check_integer("count", maximum or 2**70, 1, maximum)
    with pytest.raises(SettingError) as caught:
        check_integer("count", value, 1, maximum)
    assert str(caught.value) == message
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


def test_the_trace_of_each_start_has_a_file_unless_the_program_has_named_one() -> None:
    environment = {TRACE: "folder.d/trace.json", RESTART_COUNT: "0"}
    assert with_program_settings(None, environment).trace == "folder.d/trace.json"
    assert with_program_settings(None, environment | {RESTART_COUNT: "2"}).trace == "folder.d/trace.2.json"
    assert with_program_settings(Options(trace="own.json"), environment).trace == "own.json"


def test_a_wrong_address_of_the_environment_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Options\.dashboard must be 'host:port'"):
        with_program_settings(None, {DASHBOARD: "here"})
