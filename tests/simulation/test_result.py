import numpy as np
import pytest

from coordinator.simulation.learning import Learning, LogisticRegression
from coordinator.simulation.result import advice, aligned, summary, table
from coordinator.simulation.rules import BoundedDelay, StaleSynchronous, Synchronous
from coordinator.simulation.setting import Setting
from coordinator.simulation.simulated_cluster import simulate


@pytest.fixture(scope="module")
def result():
    return simulate(Setting(workers=6, rule=Synchronous(3), compute="exponential(50ms)", latency=0.001, pushes=3000))


def test_arrays_agree_with_one_another(result) -> None:
    assert len(result.push_times) == len(result.push_workers) == len(result.staleness) == 3000
    assert (np.diff(result.push_times) >= 0).all()
    assert result.staleness_counts.sum() == 3000
    assert result.clocks.sum() == 3000 - result.rejected
    assert result.updates == (3000 - result.rejected) // 3


def test_percentiles_are_observed_values(result) -> None:
    ordered = np.sort(result.staleness)
    assert result.p99_staleness == ordered[2969]
    assert result.staleness_percentile(50) == ordered[1499]
    assert result.max_staleness == ordered[-1]


def test_the_throughput_over_time_is_that_of_all_pushes(result) -> None:
    middles, rates = result.throughput(bins=20)
    assert len(middles) == len(rates) == 20
    assert (rates * result.seconds / 20).sum() == pytest.approx(3000)


def test_a_result_without_pushes_has_figures() -> None:
    result = simulate(Setting(compute=10.0, seconds=1.0))
    assert (result.mean_staleness, result.p99_staleness, result.max_staleness) == (0, 0, 0)
    assert result.compute_share == pytest.approx(1.0)
    assert "0 updates/s" in repr(result)


def test_a_summary_has_a_line_for_each_kind_of_figure() -> None:
    result = simulate(Setting(workers=2, rule=BoundedDelay(1), compute=0.1, pushes=20))
    lines = summary(result).splitlines()
    assert lines[0] == "cluster        2 workers, 1 ps, bounded_delay(max_delay=1)"
    assert lines[1] == "updates        20 /s"
    titles = [line[:13].rstrip() for line in lines]
    assert titles == ["cluster", "updates", "gradients", "staleness", "workers' time", "home server", "simulated"]


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


def test_the_first_column_is_left_aligned_and_figures_are_right_aligned():
    text = aligned(("fault", "ours"), [("killed", "1.50 s"), ("frozen for long", "12.00 s")])
    assert text.splitlines() == [
        "fault               ours",
        "---------------  -------",
        "killed            1.50 s",
        "frozen for long  12.00 s",
    ]
