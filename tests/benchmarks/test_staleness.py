"""The staleness benchmark runs on real servers; its figures are within the guarantees of the rules on any machine."""

import json

import pytest

from benchmarks.staleness import PARTS, chosen_parts, main, report
from benchmarks.staleness_comparison import Comparison
from benchmarks.staleness_figures import Outcome, RuleFigures
from benchmarks.staleness_idle_curve import IdleCurve, Idleness
from benchmarks.staleness_modulation import Modulation
from benchmarks.staleness_pauses import HeavyTail
from benchmarks.staleness_rules import ASYNCHRONOUS, RULES, WORKERS, bounded_delay, synchronous

PROGRAM = """
    import sys

    from benchmarks.staleness import main

    main(sys.argv[1:])
"""
TINY = """
    import json

    from benchmarks.staleness import measure, report
    from benchmarks.staleness_comparison import Comparison
    from benchmarks.staleness_idle_curve import IdleCurve
    from benchmarks.staleness_modulation import Modulation

    parts = {
        "rules": Comparison(repeats=1, steps=15, seconds=0.2),
        "idle": IdleCurve(delays=(0, 2), repeats=1, steps=20),
        "modulation": Modulation(seeds=(0,), pushes=4, gradients=16),
    }
    print(json.dumps(report(parts, measure(parts))))
"""


@pytest.mark.cluster
@pytest.mark.release
@pytest.mark.timeout(900)
def test_every_rule_trains_and_keeps_its_bound(run_program):
    found = json.loads(run_program(TINY, timeout=880).stdout.splitlines()[-1])

    rules = found["rules"]["found"]
    assert set(rules) == {choice.name for choice in RULES}
    for choice in RULES:
        (figures,) = rules[choice.name]
        assert 0 <= figures["accuracy_at_steps"] <= 1
        assert 0 <= figures["accuracy_at_time"] <= 1
        assert figures["steps_per_second"] > 0
        assert figures["updates"] > 0
        assert len(figures["idle_shares"]) == WORKERS
        assert all(0 <= share <= 1 for share in figures["idle_shares"])
        assert choice.most_staleness is None or figures["max_staleness"] <= choice.most_staleness
        assert figures["rejected"] == 0 or "synchronous" in choice.name

    idle = found["idle"]["found"]
    assert [delay for delay, (seen,) in idle.items() if seen["max_staleness"] <= int(delay)] == ["0", "2"]

    assert {name: len(seen) for name, seen in found["modulation"]["found"].items()} == {
        "synchronous, 4 gradients": 1,
        "asynchronous": 1,
        "asynchronous, rate / staleness": 1,
    }


@pytest.mark.cluster
@pytest.mark.release
@pytest.mark.timeout(700)
def test_dividing_the_rate_by_staleness_rescues_training(run_program, tmp_path):
    path = tmp_path / "figures.json"
    program = run_program(PROGRAM, "--only", "modulation", "--quick", "--json", path, timeout=680)
    assert "The effect showed" in program.stdout
    figures = json.loads(path.read_text())
    assert figures["cpus"] > 0
    assert set(figures["versions"]) == {"coordinator", "tensorflow", "keras", "grpcio"}


FIGURES = RuleFigures(51.26, 0.8125, 0.9, 1.5, 4, 100, 0.25, (0.0, 0.125, 1.0))


def test_the_comparison_has_a_row_for_each_rule():
    comparison = Comparison(rules=(ASYNCHRONOUS, bounded_delay(4)), steps=15, seconds=0.5)
    head, _, *rows = comparison.table({"asynchronous": [FIGURES], "bounded delay 4": [FIGURES] * 3}).splitlines()
    assert "accuracy: 15 steps" in head
    assert [row.split("  ")[0] for row in rows] == ["asynchronous", "bounded delay 4"]
    assert rows[0].split()[1:] == ["51.3", "0.812", "0.900", "1.50", "4", "100", "25%", "0%", "12%", "100%"]


def idleness(*shares):
    return {delay: [Idleness(share, delay, 50.0)] for delay, share in zip((0, 2, 16), shares, strict=True)}


def test_the_curve_is_drawn_and_judged():
    curve = IdleCurve(delays=(0, 2, 16), repeats=1)
    _, _, *rows, verdict = curve.table(idleness(0.5, 0.3, 0.02)).splitlines()
    assert [row.count("#") for row in rows] == [20, 12, 1]
    assert rows[0].split()[2:] == ["50.0%", "0", "50.0"]
    assert verdict.startswith("The shape was reproduced")
    assert "The shape was NOT reproduced" in curve.table(idleness(0.5, 0.3, 0.3))


def test_the_effect_is_reported_with_every_seeds_loss():
    modulation = Modulation(seeds=(0, 1), pushes=4)
    names = [choice.name for choice, _ in modulation.rules]
    good, bad = Outcome(0.2, 0.94, 20.0), Outcome(None, 0.1, 20.0)
    text = modulation.table(dict(zip(names, [[good, good], [bad, bad], [good, good]], strict=True)))
    assert text.splitlines()[3].split("  ")[-1].strip() == "0.100 0.100"
    assert text.count("not finite") == 2
    assert "The effect showed" in text
    assert "The effect did NOT show" in modulation.table(dict(zip(names, [[good] * 2] * 3, strict=True)))


@pytest.mark.parametrize("part", PARTS)
def test_each_part_says_what_it_shows_and_how_many_trainings_it_has(part):
    for is_quick in (False, True):
        (chosen,) = chosen_parts([part], 3, is_quick=is_quick).values()
        assert chosen.trainings > 0
        assert len(chosen.describe()) > 100


def test_all_parts_are_measured_unless_some_are_chosen():
    assert tuple(chosen_parts(None, 3, is_quick=False)) == PARTS
    assert tuple(chosen_parts(["modulation", "rules"], 3, is_quick=True)) == ("rules", "modulation")


def test_repeats_apply_to_every_part():
    parts = chosen_parts(None, 5, is_quick=False)
    assert parts["rules"].trainings == 5 * len(RULES)
    assert parts["idle"].trainings == 5 * len(parts["idle"].delays)
    assert parts["modulation"].seeds == (0, 1, 2, 3, 4)


def test_the_report_has_every_figure():
    parts = {"rules": Comparison(rules=(ASYNCHRONOUS,)), "idle": IdleCurve(delays=(0,))}
    figures = json.loads(
        json.dumps(report(parts, {"rules": {"asynchronous": [FIGURES]}, "idle": {0: [Idleness(0.5, 0, 50.0)]}}))
    )
    assert figures["rules"]["found"]["asynchronous"][0]["idle_shares"] == [0.0, 0.125, 1.0]
    assert figures["idle"]["found"]["0"] == [{"idle_share": 0.5, "max_staleness": 0, "steps_per_second": 50.0}]


def test_every_rule_has_a_unique_name():
    assert len({choice.name for choice in RULES}) == len(RULES)
    assert synchronous(2).name == "synchronous, 2 of 3"
    assert synchronous(16).name == "synchronous, 16 gradients"


def test_stragglers_are_reproducible_and_have_the_stated_share():
    pauses = HeavyTail(unit=1.0)
    seconds = [float(pauses.seconds(0, step)) for step in range(300)]
    assert seconds == [float(pauses.seconds(1, step)) for step in range(300)]
    assert set(seconds) == {1.0, 8.0, 40.0}
    assert 0.1 < sum(each > 1 for each in seconds) / 300 < 0.2


@pytest.mark.parametrize("arguments", [["--only", "weather"], ["--repeats", "0"]])
def test_invalid_arguments_are_refused(arguments, capsys):
    with pytest.raises(SystemExit):
        main(arguments)
    assert arguments[0] in capsys.readouterr().err
