"""Tests that options are checked when they are created."""

import dataclasses
import math

import pytest

from coordinator.options import Options

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


def test_the_file_of_a_trace_is_a_path() -> None:
    with pytest.raises(ValueError, match=r"^Options\.trace must be a path, got 3\.$"):
        Options(trace=3)
    with pytest.raises(ValueError, match=r"^Options\.trace must be on a local file system, got 'gs://b/trace'"):
        Options(trace="gs://b/trace")
    assert Options(trace="trace.json").trace == "trace.json"


@pytest.mark.parametrize("name", [*COUNTS, *UNSET_COUNTS])
def test_a_count_is_a_positive_integer(name: str) -> None:
    for value in (-1, 1.0, "2", *[None] * (name in COUNTS), True):
        with pytest.raises(ValueError, match=rf"^Options.{name} must be an integer .*, got {value!r}\.$"):
            Options(**{name: value})


def test_only_the_count_of_retries_may_be_zero() -> None:
    for name in {*COUNTS, *UNSET_COUNTS} - {"transient_retries"}:
        with pytest.raises(ValueError, match=f"^Options.{name} must be an integer of at least 1, got 0"):
            Options(**{name: 0})
    assert Options(transient_retries=0).transient_retries == 0


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


@pytest.mark.parametrize("value", ["127.0.0.1:0", "[::1]:80", "0.0.0.0:9090/secret-1", None])
def test_an_address_is_a_host_and_a_port_and_perhaps_a_token(value: str | None) -> None:
    assert Options(dashboard=value).dashboard == value


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


def test_a_server_of_another_version_is_an_error_or_a_warning() -> None:
    assert Options().version_mismatch == "error"
    assert Options(version_mismatch="warn").version_mismatch == "warn"
    for value in ("ignore", None, 1):
        with pytest.raises(ValueError, match=rf'^Options.version_mismatch must be "error" or "warn", got {value!r}\.$'):
            Options(version_mismatch=value)


def test_sparse_updates_are_by_rows_or_dense() -> None:
    assert Options(sparse_updates="rows") != Options(sparse_updates="dense")
    for value in ("row", None, True):
        with pytest.raises(ValueError, match=rf'^Options.sparse_updates must be "rows" or "dense", got {value!r}\.$'):
            Options(sparse_updates=value)


def test_options_are_frozen_and_named() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().close_timeout = 1.0
    with pytest.raises(TypeError, match="positional"):
        Options(5)
