"""Tests of the ledger of ranges: orders of events, and random orders of all of them."""

import json
import random

from coordinator.data.ledger import WINDOW, Ledger


def handed_out(ledger: Ledger, count: int) -> list[int]:
    numbers = []
    for _ in range(count):
        assert ledger.has_next()
        number = ledger.next()
        assert number is not None
        numbers.append(number)
        ledger.schedule(number)
    return numbers


def test_ranges_that_were_given_back_come_first_and_none_above_the_limit() -> None:
    ledger = Ledger(6)
    assert handed_out(ledger, 4) == [0, 1, 2, 3]
    for number in (3, 2):
        ledger.give_back(number)
    ledger.limit = 2
    assert not ledger.has_next()
    for number in (1, 0):
        assert not ledger.is_over
        ledger.finish(number)
    assert ledger.is_over
    ledger.limit = 6
    assert handed_out(ledger, 4) == [2, 3, 4, 5]
    assert (ledger.below, ledger.count_out, ledger.given_back, ledger.has_next()) == (2, 4, 2, False)


def test_a_range_that_takes_long_stops_the_others_at_the_end_of_the_window() -> None:
    ledger = Ledger(2 * WINDOW)
    handed_out(ledger, WINDOW)
    for number in range(1, WINDOW):
        ledger.finish(number)
    assert not ledger.has_next()
    ledger.finish(0)
    assert ledger.next() == WINDOW


def test_a_range_that_was_never_scheduled_is_given_back_or_scheduled_late() -> None:
    ledger = Ledger(2)
    for number in (0, 0):
        assert ledger.next() == number
        assert ledger.is_unscheduled(0)
        ledger.give_back(0)
        assert not ledger.is_unscheduled(0)
    ledger.schedule(0)
    assert handed_out(ledger, 1) == [1]
    assert not ledger.has_next()


def test_a_range_with_several_functions_is_done_if_all_of_them_have_finished() -> None:
    for ends in (("finish", "finish"), ("give_back", "finish"), ("finish", "give_back")):
        ledger = Ledger(1)
        handed_out(ledger, 1)
        ledger.schedule(0)
        for end in ends:
            assert (ledger.count_out, ledger.has_next(), ledger.is_over) == (1, False, False), ends
            getattr(ledger, end)(0)
        has_failed = "give_back" in ends
        assert (ledger.is_over, ledger.has_next(), ledger.given_back) == (not has_failed, has_failed, has_failed)


def test_what_was_done_after_a_checkpoint_is_handed_out_again_but_not_what_is_out() -> None:
    ledger = Ledger(10)
    handed_out(ledger, 6)
    for number in (0, 1, 4):
        ledger.finish(number)
    ledger.restore(1, [4])
    assert ledger.rolled_back == 1
    # 2, 3 and 5 are out still.
    assert handed_out(ledger, 5) == [1, 6, 7, 8, 9]
    assert not ledger.has_next()
    for number in (3, 2):
        ledger.give_back(number)
    assert handed_out(ledger, 2) == [2, 3]
    assert not ledger.has_next()


def test_any_interleaving_of_events_leaves_each_range_in_the_model_once() -> None:
    """The model is a count for each range, which goes back with the ledger when a checkpoint is restored."""
    for seed in range(100):
        chance = random.Random(seed)
        total = chance.randrange(1, 60)
        ledger, model, out = Ledger(total), [0] * total, []
        saved = json.dumps([ledger.below, sorted(ledger.done), model])
        steps = 0
        while not ledger.is_over:
            steps += 1
            event = chance.choice(["next", "next", "finish", "finish", "fail", "save", "restore", "restart"])
            if steps > 5000 and event in ("fail", "restore", "restart"):
                continue
            if event == "next" and ledger.has_next() and len(out) < 8:
                out += handed_out(ledger, 1)
            elif event == "finish" and out:
                number = out.pop(chance.randrange(len(out)))
                model[number] += 1
                ledger.finish(number)
            elif event == "fail" and out:
                ledger.give_back(out.pop(chance.randrange(len(out))))
            elif event == "save":
                saved = json.dumps([ledger.below, sorted(ledger.done), model])
            elif event in ("restore", "restart"):
                if event == "restart":
                    ledger, out = Ledger(total), []
                below, done, model = json.loads(saved)
                ledger.restore(below, done)
            assert (ledger.count_done, ledger.count_out) == (sum(model), len(out)), seed
        assert (model, out) == ([1] * total, []), seed
