import math
import types

import numpy as np
import pytest

from coordinator.errors import SettingError
from coordinator.options import SettingTypeError, check_integer, check_number, check_transfer_dtype


@pytest.mark.parametrize("value", [1, 5, 2**70])
def test_an_integer_within_its_bounds_passes(value: int) -> None:
    check_integer("count", value, 1)
    check_integer("count", value, 1, 2**70)


@pytest.mark.parametrize(
    ("value", "maximum", "message"),
    [
        (0, None, "count must be an integer of at least 1, got 0."),
        (9, 8, "count must be an integer from 1 to 8, got 9."),
    ],
)
def test_an_integer_out_of_bounds_is_refused(value: int, maximum: int | None, message: str) -> None:
    with pytest.raises(SettingError) as caught:
        check_integer("count", value, 1, maximum)
    assert str(caught.value) == message
    assert not isinstance(caught.value, TypeError)


@pytest.mark.parametrize("value", [True, 1.0, "1", None])
def test_a_value_that_is_not_an_integer_is_a_type_error_too(value: object) -> None:
    with pytest.raises(SettingTypeError, match=r"^count must be an integer of at least 0, or inf, got .*\.$"):
        check_integer("count", value, 0, note=", or inf")


def test_a_number_within_its_bounds_passes() -> None:
    for value in (1, 0.5, np.float32(0.5), 10**300):
        check_number("time", value, 0)
        check_number("time", value, above=0)
    check_number("time", math.inf, 0, math.inf)


@pytest.mark.parametrize(
    ("value", "bounds", "message"),
    [
        (-0.1, {"minimum": 0}, "of at least 0, got -0.1"),
        (math.nan, {"minimum": 0, "maximum": math.inf}, "of at least 0, got nan"),
        (math.inf, {"minimum": 0}, "of at least 0, got inf"),
        (2, {"minimum": 0, "maximum": 1}, "from 0 to 1, got 2"),
        (0, {"above": 0}, "above 0, got 0"),
        (9, {"above": 0, "maximum": 8}, "above 0 and at most 8, got 9"),
    ],
)
def test_a_number_out_of_bounds_is_refused(value: float, bounds: dict[str, float], message: str) -> None:
    with pytest.raises(SettingError) as caught:
        check_number("time", value, unit="seconds", **bounds)
    assert str(caught.value) == f"time must be a number of seconds {message}."


@pytest.mark.parametrize("value", [True, "1", None, 1j])
def test_a_value_that_is_not_a_number_is_a_type_error_too(value: object) -> None:
    with pytest.raises(SettingTypeError, match=r"^time must be a number of at least 0, got "):
        check_number("time", value, 0)


@pytest.mark.parametrize("name", ["bfloat16", "float32"])
def test_a_dtype_of_messages_passes(name: str) -> None:
    check_transfer_dtype("transfer_dtype", types.SimpleNamespace(name=name))
    check_transfer_dtype("transfer_dtype", None)


def test_another_dtype_of_messages_is_refused_and_float16_with_the_reason() -> None:
    with pytest.raises(SettingError, match=r"^transfer_dtype must be .*\(its numbers end at 65,504, and smaller ones"):
        check_transfer_dtype("transfer_dtype", types.SimpleNamespace(name="float16"))
    for value in ("bfloat16", 16, True):
        with pytest.raises(SettingTypeError, match=rf"^transfer_dtype must be tf.bfloat16, .*, got {value!r}\.$"):
            check_transfer_dtype("transfer_dtype", value)
