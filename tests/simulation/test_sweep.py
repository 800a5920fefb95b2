import pytest

from coordinator.errors import SettingError
from coordinator.simulation.sweep import NAMES, Sweep, sweep_of


@pytest.mark.parametrize(
    ("text", "sweep"),
    [
        ("workers=1..512", Sweep("workers", (1, 2, 4, 8, 16, 32, 64, 128, 256, 512))),
        ("workers=3..20", Sweep("workers", (3, 6, 12, 20))),
        ("max_delay=0..16", Sweep("max_delay", (0, 1, 2, 4, 8, 16))),
        ("max-delay=0..0", Sweep("max_delay", (0,))),
        ("ps=8,1,1,3", Sweep("ps", (1, 3, 8))),
    ],
)
def test_a_range_doubles_and_a_list_is_a_list(text: str, sweep: Sweep) -> None:
    assert sweep_of(text) == sweep


@pytest.mark.parametrize("text", ["workers", "workers=", "workers=8..1", "workers=a..b", "workers=1,-2", "workers=0.5"])
def test_what_has_no_values_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(SettingError, match=r"^sweep must have values such as workers=1\.\.512 or workers=1,8,32"):
        sweep_of(text)


def test_what_cannot_be_swept_is_refused_with_what_can() -> None:
    with pytest.raises(SettingError, match=f"^sweep must be of one of {', '.join(NAMES)}"):
        sweep_of("colour=1..3")
