from coordinator.simulation.learning import Learning
from coordinator.simulation.problem import LogisticRegression
from coordinator.simulation.rules.bounded_delay import BoundedDelay
from coordinator.simulation.setting import Setting
from coordinator.simulation.simulated_cluster import simulate
from coordinator.simulation.text_report import sheet, table


def test_a_sheet_has_a_line_for_each_kind_of_figure() -> None:
    result = simulate(Setting(workers=2, rule=BoundedDelay(1), compute=0.1, pushes=20))
    lines = sheet(result).splitlines()
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
