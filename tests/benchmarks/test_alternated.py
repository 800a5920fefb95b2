"""Contestants take turns, and one that fails does not stop the others."""

import itertools

from benchmarks import alternated as alternated_module
from benchmarks.alternated import alternated
from benchmarks.rounds import Rounds, ratio


class Contestant:
    """Returns the number of its round, or fails in one round."""

    def __init__(self, fails_in=None):
        self.rounds = 0
        self._fails_in = fails_in

    def __call__(self):
        self.rounds += 1
        if self.rounds == self._fails_in:
            return {"error": "InternalError: it broke"}
        return {"figures": {"rate": float(self.rounds)}}


def test_contestants_take_turns_and_the_first_round_is_not_counted():
    turns = []
    found = alternated({"ours": Contestant(), "peer": Contestant()}, 3, turns.append)
    assert turns == ["ours", "peer", "peer", "ours", "ours", "peer", "peer", "ours"]
    assert [figures["rate"] for figures in found["ours"].figures] == [2.0, 3.0, 4.0]
    assert found["peer"].median("rate") == 3.0


def test_rounds_are_not_counted_until_all_have_run_for_as_long_as_they_need(monkeypatch):
    seconds = itertools.count()
    monkeypatch.setattr(alternated_module.time, "monotonic", lambda: next(seconds))
    turns = []
    broken = Contestant(fails_in=2)
    found = alternated({"ours": Contestant(), "broken": broken}, 1, turns.append, warm_up=2.5)
    assert turns == ["ours", "broken", "broken", "ours"]
    # The rounds begin at 0, and end at 1, 2 and 3.
    assert [figures["rate"] for figures in found["ours"].figures] == [4.0]
    assert (broken.rounds, found["broken"].error) == (2, "InternalError: it broke")


def test_a_failed_contestant_is_not_run_again_and_the_others_continue():
    broken, unable, whole = Contestant(fails_in=3), Contestant(fails_in=1), Contestant()
    found = alternated({"broken": broken, "unable": unable, "whole": whole}, 4, lambda _: None)
    assert (broken.rounds, unable.rounds, whole.rounds) == (3, 1, 5)
    assert found["broken"].error == found["unable"].error == "InternalError: it broke"
    assert found["whole"].error is None


def test_missing_figures_are_described_in_words():
    good = Rounds([{"rate": 1.0}, {"rate": 4.0}, {"rate": 2.0}])
    bad = Rounds([{"rate": 1.0}], "InternalError: it broke")
    assert good.text("rate", ".1f", 1e3) == "2000.0"
    assert bad.text("rate", ".1f") == "InternalError"
    assert Rounds().text("rate", ".1f") == "not run"
    assert ratio(good, bad, "rate") == ratio(bad, good, "rate") == ratio(good, Rounds(), "rate") == "-"


def test_a_ratio_compares_rounds_of_the_same_turn():
    idle, busy = ([{"rate": rate} for rate in rates] for rates in ((8.0, 1.0, 6.0), (4.0, 0.5, 4.0)))
    assert ratio(Rounds(idle), Rounds(busy), "rate") == "2.00"
