from pathlib import Path

import numpy as np
import pytest

from coordinator.errors import SettingError
from coordinator.simulation import picture
from coordinator.simulation.learning import Learning, LogisticRegression
from coordinator.simulation.result import advice, table
from coordinator.simulation.rules import BoundedDelay, StaleSynchronous, Synchronous
from coordinator.simulation.setting import Setting
from coordinator.simulation.simulated_cluster import simulate
from coordinator.simulation.simulated_tasks import Death


@pytest.fixture(scope="module")
def result():
    return simulate(Setting(workers=6, rule=Synchronous(3), compute="exponential(50ms)", latency=0.001, pushes=3000))


def test_arrays_agree_with_one_another_and_percentiles_are_observed_values(result) -> None:
    assert len(result.push_times) == len(result.push_workers) == len(result.staleness) == 3000
    assert (np.diff(result.push_times) >= 0).all()
    assert result.staleness_counts.sum() == 3000
    assert result.clocks.sum() == 3000 - result.rejected
    assert result.updates == (3000 - result.rejected) // 3
    ordered = np.sort(result.staleness)
    assert result.p99_staleness == ordered[2969]
    assert result.staleness_percentile(50) == ordered[1499]
    assert result.max_staleness == ordered[-1]


def test_a_table_has_a_row_for_each_and_a_loss_where_something_is_learned() -> None:
    learning = Learning(LogisticRegression())
    results = [(name, simulate(Setting(pushes=100, learning=learning))) for name in ("one", "the other")]
    head, ruler, *rows = table("rule", results).splitlines()
    assert head.split()[0] == "rule"
    assert head.split()[-1] == "loss"
    assert set(ruler) == {"-", " "}
    assert [row.split("  ")[0] for row in rows] == ["one", "the other"]
    assert {len(row) for row in rows} == {len(head)}


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ({"workers": 40, "rule": BoundedDelay(3)}, "at most 4 of 40 workers can be under way. With --grads-to-wait"),
        ({"rule": BoundedDelay(0, grads_to_wait=4), "slow_down": {0: 5.0}}, "try a larger --max-delay"),
        ({"rule": StaleSynchronous(max_lead=2), "slow_down": {0: 5.0}}, "all end up at its pace"),
        ({"rule": Synchronous(4), "compute": "exponential(50ms)"}, "were computed for nothing"),
        ({"workers": 50, "update": 0.01}, "more workers bring nothing"),
    ],
)
def test_advice_says_what_stands_out_and_what_to_try(setting, words: str) -> None:
    (sentence,) = advice(simulate(Setting(pushes=2000, **setting)))
    assert words in sentence


@pytest.mark.long
def test_every_subplot_has_a_title_and_named_axes(tmp_path: Path) -> None:
    settings = {"compute": "lognormal(50ms,0.4)", "latency": 0.002, "deaths": [Death(0, 0.2, 0.3)], "pushes": 600}
    one, two = (
        simulate(Setting(workers=workers, rule=BoundedDelay(2), learning=Learning(LogisticRegression()), **settings))
        for workers in (12, 4)
    )
    for figure in (
        picture.picture(one),
        picture.comparison([("one", one), ("two", two)]),
        picture.scaling("workers", [4, 12], [("one", [two, one])]),
    ):
        for axes in figure.axes:
            assert axes.get_title()
            assert axes.get_xlabel()
            assert axes.get_ylabel() or axes.get_title() in {"Speed", "Staleness", "Workers' time"}
        picture.save(figure, tmp_path / "out.png")
        assert (tmp_path / "out.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.figure", None)
    with pytest.raises(SettingError, match=r"^plot needs matplotlib: pip install 'coordinator-tf\[plots\]'"):
        picture.new_figure(2, 2)
