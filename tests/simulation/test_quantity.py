import pytest

from coordinator.errors import SettingError
from coordinator.simulation.quantity import bytes_of, bytes_per_second_of, seconds_of, share_of, shown_seconds


@pytest.mark.parametrize(
    ("read", "text", "meant"),
    [
        (seconds_of, "200us", 200e-6),
        (seconds_of, "50 ms", 0.05),
        (seconds_of, "1.5s", 1.5),
        (seconds_of, "1e-3s", 1e-3),
        (seconds_of, "0", 0.0),
        (bytes_of, "100MB", 1e8),
        (bytes_of, "500kB", 5e5),
        (bytes_of, "8B", 8.0),
        (bytes_per_second_of, "10Gbit", 1.25e9),
        (bytes_per_second_of, "100MB", 1e8),
        (bytes_per_second_of, "inf", float("inf")),
        (share_of, "5%", 0.05),
        (share_of, "0.25", 0.25),
        (share_of, "100%", 1.0),
    ],
)
def test_a_quantity_is_read_with_its_unit(read, text: str, meant: float) -> None:
    assert read("option", text) == pytest.approx(meant)


@pytest.mark.parametrize(
    ("read", "text"),
    [
        (seconds_of, "50"),
        (seconds_of, "-5ms"),
        (seconds_of, "5min"),
        (bytes_of, "5"),
        (bytes_of, "5mb"),
        (bytes_per_second_of, "5ms"),
        (share_of, "150%"),
        (share_of, "-5%"),
        (share_of, "many"),
    ],
)
def test_what_is_no_such_quantity_is_refused_by_the_name_of_its_option(read, text: str) -> None:
    with pytest.raises(SettingError, match=f"^latency must be .*, such as .*, got '{text}'"):
        read("latency", text)


@pytest.mark.parametrize(("seconds", "shown"), [(2.0, "2 s"), (0.05, "50 ms"), (2e-4, "200 us"), (0.0, "0 s")])
def test_a_time_is_shown_with_the_unit_that_suits_it(seconds: float, shown: str) -> None:
    assert shown_seconds(seconds) == shown
