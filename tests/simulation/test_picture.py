"""Tests of plots: all axes and lines have names and units."""

from pathlib import Path

import pytest

from coordinator.errors import SettingError
from coordinator.simulation import picture
from coordinator.simulation.learning import Learning, LogisticRegression
from coordinator.simulation.rules import Asynchronous, BoundedDelay, Delayed
from coordinator.simulation.setting import Setting
from coordinator.simulation.simulated_cluster import simulate
from coordinator.simulation.simulated_tasks import Death


def result(rule=None, workers: int = 12, learning: Learning | None = None):
    return simulate(
        Setting(
            workers=workers,
            rule=rule or Asynchronous(),
            compute="lognormal(50ms,0.4)",
            latency=0.002,
            deaths=[Death(0, 0.2, 0.3)],
            pushes=600,
            learning=learning,
        )
    )


LEARNING = Learning(LogisticRegression())


@pytest.mark.parametrize(
    "draw",
    [
        lambda: picture.picture(result(BoundedDelay(2), learning=LEARNING)),
        lambda: picture.comparison([("one", result(learning=LEARNING)), ("two", result(learning=LEARNING))]),
        lambda: picture.scaling("workers", [2, 4], [("one", [result(workers=2), result(workers=4)])]),
        pytest.param(lambda: picture.picture(result(Delayed(float("inf")))), marks=pytest.mark.long),
    ],
    ids=["one that learns", "rules", "workers", "without updates"],
)
def test_every_subplot_has_a_title_and_named_axes(draw, tmp_path: Path) -> None:
    figure = draw()
    for axes in figure.axes:
        assert axes.get_title()
        assert axes.get_xlabel()
        assert axes.get_ylabel() or axes.get_title() in {"Speed", "Staleness", "Workers' time"}
    picture.save(figure, tmp_path / "out.png")
    assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_timelines_show_the_first_steps_of_a_few_workers_and_their_deaths() -> None:
    axes = picture.picture(result(workers=50)).axes[0]
    assert [label.get_text() for label in axes.get_yticklabels()][:2] == ["0", "5"]
    assert len(axes.get_yticks()) == 10
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "compute",
        "communicate",
        "wait for the rule",
        "dead",
    ]


def test_a_plot_that_cannot_be_written_is_an_error_of_its_option(tmp_path: Path) -> None:
    figure = picture.new_figure(2, 2)
    for path in (tmp_path / "no" / "out.png", tmp_path / "out.what"):
        with pytest.raises(SettingError, match=r"^plot cannot be written to"):
            picture.save(figure, path)


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(SettingError, match=r"^plot needs matplotlib: pip install 'coordinator-tf\[plots\]'"):
        picture.new_figure(2, 2)
