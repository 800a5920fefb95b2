import pytest

from coordinator.errors import SettingError
from coordinator.simulation.distribution import format_seconds, parse_bytes, parse_rate, parse_seconds, parse_share


@pytest.mark.parametrize(
    ("read", "text", "expected"),
    [
        (parse_seconds, "200us", 200e-6),
        (parse_seconds, "50 ms", 0.05),
        (parse_seconds, "1.5s", 1.5),
        (parse_seconds, "1e-3s", 1e-3),
        (parse_seconds, "0", 0.0),
        (parse_bytes, "100MB", 1e8),
        (parse_bytes, "500kB", 5e5),
        (parse_bytes, "8B", 8.0),
        (parse_rate, "10Gbit", 1.25e9),
        (parse_rate, "100MB", 1e8),
        (parse_rate, "inf", float("inf")),
        (parse_share, "5%", 0.05),
        (parse_share, "0.25", 0.25),
        (parse_share, "100%", 1.0),
    ],
)
def test_a_quantity_is_read_with_its_unit(read, text: str, expected: float) -> None:
    assert read("option", text) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (parse_seconds, "50"),
        (parse_seconds, "-5ms"),
        (parse_seconds, "5min"),
        (parse_bytes, "5"),
        (parse_bytes, "5mb"),
        (parse_rate, "5ms"),
        (parse_share, "150%"),
        (parse_share, "-5%"),
        (parse_share, "many"),
    ],
)
def test_an_invalid_quantity_is_refused_with_the_name_of_its_option(read, text: str) -> None:
    with pytest.raises(SettingError, match=f"^latency must be .*, such as .*, got '{text}'"):
        read("latency", text)


@pytest.mark.parametrize(("seconds", "shown"), [(2.0, "2 s"), (0.05, "50 ms"), (2e-4, "200 us"), (0.0, "0 s")])
def test_a_time_is_shown_with_the_unit_that_suits_it(seconds: float, shown: str) -> None:
    assert format_seconds(seconds) == shown
