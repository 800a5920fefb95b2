"""Options are checked when they are made."""

import dataclasses
import math

import pytest

from coordinator.options import Options

COUNTS = [field.name for field in dataclasses.fields(Options) if isinstance(field.default, int)]
TIMES = [field.name for field in dataclasses.fields(Options) if not isinstance(field.default, int)]


def test_every_option_has_a_default_that_passes() -> None:
    assert len(COUNTS) + len(TIMES) == len(dataclasses.astuple(Options()))
    assert Options() == Options()


@pytest.mark.parametrize("name", COUNTS)
def test_a_count_is_a_positive_whole_number(name: str) -> None:
    for value in (-1, 1.0, "2", None, True):
        with pytest.raises(ValueError, match=rf"^Options.{name} must be a whole number .*, got {value!r}\.$"):
            Options(**{name: value})


def test_no_count_is_zero_but_that_of_retries() -> None:
    for name in set(COUNTS) - {"transient_retries"}:
        with pytest.raises(ValueError, match=f"^Options.{name} must be a whole number above 0, got 0"):
            Options(**{name: 0})
    assert Options(transient_retries=0).transient_retries == 0


@pytest.mark.parametrize("name", TIMES)
def test_a_time_is_a_positive_finite_number(name: str) -> None:
    for value in (0, -1.0, math.nan, math.inf, 1e300, 10**400, "2", True):
        with pytest.raises(ValueError, match=f"^Options.{name} must be a finite number of seconds above 0, got "):
            Options(**{name: value})
    for value in (1, 0.001):
        assert getattr(Options(**{name: value}), name) == value


def test_only_the_time_that_schedule_may_block_can_be_unlimited() -> None:
    assert Options(schedule_timeout=None).schedule_timeout is None
    for name in set(TIMES) - {"schedule_timeout"}:
        with pytest.raises(ValueError, match=name):
            Options(**{name: None})


def test_options_are_frozen_and_named() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Options().close_timeout = 1.0
    with pytest.raises(TypeError, match="positional"):
        Options(5)
