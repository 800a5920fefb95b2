"""What benchmarks print for made-up measurements: their tables, ratios and verdicts."""

from collections.abc import Callable, Mapping
from typing import Any

import pytest

from benchmarks import (
    data,
    dense,
    devices,
    dispatch,
    embeddings,
    event_cost,
    latency,
    memory,
    pauses,
    recommender,
    recovery,
    rounding,
    scale,
    table_contest,
)
from benchmarks.alternated import alternated
from benchmarks.recovery_outcome import PATIENCE, Event, Outcome, judge
from benchmarks.rounds import Rounds, ratio
from benchmarks.staleness_comparison import Comparison
from benchmarks.staleness_figures import Outcome as Learning
from benchmarks.staleness_figures import RuleFigures, is_falling_to_little, is_rescued
from benchmarks.staleness_idle_curve import IdleCurve, Idleness
from benchmarks.staleness_modulation import Modulation
from benchmarks.staleness_rules import ASYNCHRONOUS, bounded_delay


class Contestant:
    """Returns the number of its round, or fails in one round."""

    def __init__(self, fails_in: int | None = None) -> None:
        self.rounds = 0
        self._fails_in = fails_in

    def __call__(self) -> dict[str, Any]:
        self.rounds += 1
        if self.rounds == self._fails_in:
            return {"error": "InternalError: it broke"}
        return {"figures": {"rate": float(self.rounds)}}


def test_contestants_take_turns_and_one_that_failed_is_not_run_again() -> None:
    turns: list[str] = []
    broken = Contestant(fails_in=2)
    found = alternated({"ours": Contestant(), "peer": Contestant(), "broken": broken}, 3, turns.append)
    assert turns[:6] == ["ours", "peer", "broken", "broken", "peer", "ours"]
    assert broken.rounds == 2
    # The first round is not counted.
    assert [figures["rate"] for figures in found["ours"].figures] == [2.0, 3.0, 4.0]
    assert (found["peer"].median("rate"), found["broken"].text("rate", ".1f")) == (3.0, "InternalError")
    assert ratio(found["ours"], found["broken"], "rate") == ratio(found["broken"], Rounds(), "rate") == "-"
    # Of rounds of the same turn.
    idle, busy = ([{"rate": rate} for rate in rates] for rates in ((8.0, 1.0, 6.0), (4.0, 0.5, 4.0)))
    assert ratio(Rounds(idle), Rounds(busy), "rate") == "2.00"


def rates(**sides: float) -> dict[str, Rounds]:
    return {side.replace("_", " "): Rounds([{"rate": rate}]) for side, rate in sides.items()}


def each(columns: Mapping[str, Any] | tuple[str, ...], rate: float, **figures: float) -> dict[str, Rounds]:
    """Returns rounds with a rate that grows from column to column."""
    return {column: Rounds([{"rate": rate * number, **figures}]) for number, column in enumerate(columns, 1)}


SPANS = {f"{span}_p{percent}": 0.002 for span in ("schedule", "start", "result", "whole") for percent in (50, 99)}
DENSE = rates(ours=2000, bare=2000, single=2000) | {"peer": Rounds(error="ValueError: not so")}
DISPATCH = rates(ours=3000, runs=6000, loop=4500, other_loop=750, peer=1500) | {"bare": Rounds(error="Bad: x")}
EVENTS = {
    side: Rounds([{"rate": rate, "cpu": cpu, "events": events} for rate in of_round])
    for side, of_round, cpu, events in (("without", (100, 200, 400), 1e-5, 0.0), ("with", (99, 180, 400), 2e-5, 2.0))
}
HANDED_OUT = {data.HANDED_OUT: {"ranges": Rounds([{"us": 8.25}])}}
SLOW, FAST = Rounds([{"seconds": 0.5}]), Rounds([{"seconds": 0.01}])


@pytest.mark.parametrize(
    ("table", "found", "row"),
    [
        (data.table, {"TFRecord": each(data.WAYS, 500.0), **HANDED_OUT}, "500 1,000 1,500 2.00 3.00"),
        (dense.table, {"digits": DENSE}, "digits 2,000 ValueError 2,000 2,000 - 1.00 1.00"),
        (devices.table, {"digits": rates(one_device=4000, two_devices=3000, peer=2000)}, "2,000 2.00 1.50 0.75"),
        (dispatch.table, {1: {"nothing": DISPATCH}}, "750 1,500 Bad 2.00 - 2.00 0.75 0.50"),
        (
            embeddings.table,
            {"Adam 1000 64": {"ours": FAST, "dense": SLOW, "peer": SLOW}},
            "10.0 500.0 500.0 50.00 50.00",
        ),
        (latency.table, {"scalars": {side: Rounds([SPANS]) for side in latency.SIDES}}, "2.00 2.00 2.00 1.00"),
        (
            memory.table,
            {"ours": {"client": [200_000_000, 205_000_000, 210_000_000]}},
            "ours, client 200 210 +5.0% 5.00",
        ),
        (pauses.table, {"32": {side: Rounds([{"pause": 0.1, "steps": 9.0}]) for side in pauses.SIDES}}, "9 9 1.00"),
        (recommender.table, {"batch 32": each(recommender.COLUMNS, 1000.0)}, "0.25 0.50 0.60 1.50 0.14"),
        (rounding.accuracy_table, {"32 bits": [0.96, 0.98]}, "32 bits 96.00 98.00 97.00"),
        (table_contest.table, {"256": each(table_contest.COLUMNS, 100.0, processor=1e-6)}, "1.0 1.0 1.0 1.00"),
        (lambda found: event_cost.table(found, 1e-6), {"nothing": EVENTS}, "200 180 0.990 0.945 to 0.995"),
    ],
    ids=lambda value: value.__module__.rpartition(".")[2] if callable(value) else "",
)
def test_a_table_has_figures_and_ratios(table: Callable[[Any], str], found: object, row: str) -> None:
    assert row in " ".join(table(found).split())


def test_the_tables_of_scale_have_medians_and_growth() -> None:
    def rounds(cpu: float) -> list[dict[str, float]]:
        return [{"wall": 2e-5, "cpu": seconds, "switches": 1.5} for seconds in (cpu, cpu, 1.0)]

    queued = [{"bytes": 480.0, "schedule_p50": 2e-5, "schedule_p99": 1e-4}]
    few_many = {4: rounds(2e-5), 64: rounds(3e-5)}
    found = scale.Scale(few_many, {4: rounds(1e-5), 64: rounds(1e-5)}, {4: rounds(1e-6)}, queued)
    many = scale.workers_table(found).splitlines()[-1].split()
    assert many == ["64", "50,000", "64,000", "30.0", "10.0", "1.50", "1.50", "1.50"]
    assert scale.runs_table(found).splitlines()[-1].split() == ["4", "50,000", "1.00"]
    assert scale.queue_table(found, 1000).splitlines()[-1].split() == ["1,000", "480", "20.0", "100.0"]


# Recovery: an outcome is derived from the events after a fault at 100, when a step is possible from 105 on.
STEP = Event("step", 108.0, began=107.0, worker=1)
ERROR = Event("raised", 106.0, error="UnavailableError")
OLD_ERROR = Event("raised", 99.0, error="UnavailableError")
OTHER = Event("held", 112.0, began=111.0, worker=2)
STALE = Event("held", 112.0, began=103.0, worker=2)
RAISES = Outcome(error="UnavailableError")


@pytest.mark.parametrize(
    ("events", "now", "expected"),
    [
        ([], 105.0, None),
        ([], 165.0, Outcome()),
        ([STEP], 109.0, Outcome(3.0)),
        ([ERROR], 107.0, None),
        ([ERROR], 106.0 + PATIENCE, RAISES),
        ([ERROR, STEP], 109.0, Outcome(3.0, "UnavailableError")),
        ([OLD_ERROR, STEP], 109.0, Outcome(3.0)),
        ([ERROR, OTHER], 106.0 + PATIENCE, None),
        ([ERROR, OTHER], 165.0, Outcome()),
        ([ERROR, STALE], 106.0 + PATIENCE, RAISES),
        ([Event("step", 104.0, began=103.0, worker=0)], 106.0, Outcome(0.0)),
    ],
)
def test_the_outcome_of_a_fault_is_derived_from_events(
    events: list[Event], now: float, expected: Outcome | None
) -> None:
    is_awaited = lambda event: event.kind == "step"  # noqa: E731 - shorter
    assert judge(events, is_awaited, hurt_at=100.0, since=105.0, now=now, limit=60.0) == expected


def test_the_table_of_recovery_distinguishes_hanging_from_raising() -> None:
    found = {
        "worker-killed": {"ours": [(Outcome(0.1), Outcome(1.0))], "peer": [(Outcome(0.2), Outcome(3.0))]},
        "ps-restarted": {"ours": [(Outcome(2.0),)], "peer": [(RAISES,)]},
        "worker-frozen": {"ours": [(Outcome(5.0),)], "peer": [(Outcome(),)]},
    }
    _, _, first, second, frozen, lost = recovery.table(recovery.chosen_faults(list(found)), found, 60.0).splitlines()
    assert first.split()[-5:] == ["0.10", "s", "0.20", "s", "2.00"]
    assert second.split()[-5:] == ["1.00", "s", "3.00", "s", "3.00"]
    assert frozen.endswith("hangs (deadline 60 s)         > 12")
    assert "raises UnavailableError; restart the client" in lost


def test_the_tables_of_staleness_have_figures_and_verdicts() -> None:
    figures = RuleFigures(51.26, 0.8125, 0.9, 1.5, 4, 100, 0.25, (0.0, 0.125, 1.0))
    comparison = Comparison(rules=(ASYNCHRONOUS, bounded_delay(4)), steps=15, seconds=0.5)
    row = comparison.table({"asynchronous": [figures], "bounded delay 4": [figures] * 3}).splitlines()[2]
    assert row.split()[1:] == ["51.3", "0.812", "0.900", "1.50", "4", "100", "25%", "0%", "12%", "100%"]

    curve = IdleCurve(delays=(0, 2, 16), repeats=1)
    shares = {delay: [Idleness(share, delay, 50.0)] for delay, share in ((0, 0.5), (2, 0.3), (16, 0.02))}
    assert "The shape was reproduced" in curve.table(shares)
    assert "The shape was NOT reproduced" in curve.table({**shares, 16: [Idleness(0.3, 16, 50.0)]})

    modulation = Modulation(seeds=(0, 1), pushes=4)
    names = [choice.name for choice, _ in modulation.rules]
    good, bad = [Learning(0.2, 0.94, 20.0)] * 2, [Learning(None, 0.1, 20.0)] * 2
    text = modulation.table(dict(zip(names, [good, bad, good], strict=True)))
    assert text.count("not finite") == 2
    assert "The effect showed" in text
    assert "The effect did NOT show" in modulation.table(dict.fromkeys(names, good))


@pytest.mark.parametrize(
    ("shares", "expected"),
    [([0.5, 0.3, 0.33, 0.02], True), ([0.5, 0.1, 0.3, 0.02], False), ([0.1, 0.02], False), ([0.5, 0.3], False)],
)
def test_a_curve_falls_if_it_begins_high_ends_low_and_never_rises(shares: list[float], expected: bool) -> None:
    assert is_falling_to_little(shares) is expected


def test_an_effect_is_one_only_if_every_seed_shows_it() -> None:
    good, bad, middle = Learning(0.2, 0.94, 20.0), Learning(2.3, 0.1, 20.0), Learning(0.9, 0.7, 20.0)
    assert is_rescued([good, good], [bad, Learning(None, 0.99, 0.0)], [good, good])
    for plain, modulated in (([bad, good], [good, good]), ([bad, middle], [good, good]), ([bad, bad], [good, middle])):
        assert not is_rescued([good, good], plain, modulated)
