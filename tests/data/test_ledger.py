"""Tests of the ledger of ranges: tables of events, and random orders of all of them."""

import json
import random

import pytest

from coordinator.data.ledger import Ledger


def handed_out(ledger: Ledger, count: int) -> list[int]:
    numbers = []
    for _ in range(count):
        assert ledger.has_next()
        number = ledger.next()
        assert number is not None
        numbers.append(number)
        ledger.schedule(number)
    return numbers


def test_no_range_above_the_limit_is_handed_out_although_one_was_given_back() -> None:
    ledger = Ledger(6)
    first, *_ = handed_out(ledger, 4)
    ledger.give_back(3)
    ledger.limit = 2
    assert not ledger.has_next()
    for number in (first, 1):
        ledger.finish(number)
    assert ledger.is_over
    ledger.limit = 6
    assert handed_out(ledger, 3) == [3, 4, 5]


def test_ranges_are_handed_out_in_order_until_all_are_done() -> None:
    ledger = Ledger(3)
    assert handed_out(ledger, 3) == [0, 1, 2]
    assert not ledger.has_next()
    for number in (2, 0, 1):
        assert not ledger.is_over
        ledger.finish(number)
    assert ledger.is_over
    assert (ledger.below, ledger.done, ledger.count_out) == (3, set(), 0)


def test_a_range_given_back_comes_before_the_others() -> None:
    ledger = Ledger(10)
    handed_out(ledger, 5)
    for number in (3, 1):
        ledger.give_back(number)
    assert handed_out(ledger, 3) == [1, 3, 5]
    assert ledger.given_back == 2


def test_a_range_that_was_never_scheduled_is_given_back_as_well() -> None:
    ledger = Ledger(2)
    assert ledger.next() == 0
    assert ledger.is_unscheduled(0)
    ledger.give_back(0)
    assert not ledger.is_unscheduled(0)
    assert handed_out(ledger, 2) == [0, 1]


def test_a_range_with_several_functions_is_done_with_the_last_of_them() -> None:
    ledger = Ledger(1)
    handed_out(ledger, 1)
    ledger.schedule(0)
    ledger.finish(0)
    assert not ledger.is_over
    ledger.finish(0)
    assert ledger.is_over


@pytest.mark.parametrize("ends", [("give_back", "finish"), ("finish", "give_back"), ("give_back", "give_back")])
def test_a_range_of_which_one_function_has_failed_is_handed_out_again(ends: tuple[str, str]) -> None:
    ledger = Ledger(1)
    for _ in range(2):
        handed_out(ledger, 1)
        ledger.schedule(0)
        for number, end in enumerate(ends):
            assert (ledger.count_out, ledger.has_next()) == (1, False), number
            getattr(ledger, end)(0)
    handed_out(ledger, 1)
    ledger.finish(0)
    assert (ledger.is_over, ledger.given_back) == (True, 2)


def test_a_function_that_is_scheduled_late_takes_its_range_from_those_given_back() -> None:
    ledger = Ledger(2)
    assert ledger.next() == 0
    ledger.give_back(0)
    ledger.schedule(0)
    assert handed_out(ledger, 1) == [1]
    assert not ledger.has_next()


def test_a_failure_counts_though_another_function_is_scheduled_after_it() -> None:
    ledger = Ledger(2)
    assert ledger.next() == 0
    ledger.schedule(0)
    # Before the loop takes the next range.
    ledger.give_back(0)
    ledger.schedule(0)
    ledger.finish(0)
    assert (ledger.count_done, ledger.given_back) == (0, 2)
    assert handed_out(ledger, 2) == [0, 1]
    for number in (0, 1):
        ledger.finish(number)
    assert ledger.is_over


def test_a_skipped_range_is_done_and_listed() -> None:
    ledger = Ledger(2)
    handed_out(ledger, 2)
    ledger.skip(1)
    ledger.finish(0)
    assert ledger.is_over
    assert ledger.skipped == {1}


@pytest.mark.parametrize("end", ["finish", "give_back", "skip"])
def test_another_function_with_a_skipped_range_may_end_later(end: str) -> None:
    ledger = Ledger(1)
    handed_out(ledger, 1)
    ledger.schedule(0)
    ledger.skip(0)
    getattr(ledger, end)(0)
    assert (ledger.is_over, ledger.count_out, ledger.skipped, ledger.has_next()) == (True, 0, {0}, False)


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


def test_after_a_restore_what_is_out_and_fails_comes_again_once() -> None:
    ledger = Ledger(4)
    handed_out(ledger, 2)
    ledger.restore(0, [])
    ledger.give_back(0)
    ledger.give_back(1)
    assert handed_out(ledger, 4) == [0, 1, 2, 3]
    assert not ledger.has_next()


@pytest.mark.parametrize("total", [3, 5, 20])
def test_a_state_of_more_epochs_is_cut_and_of_fewer_is_continued(total: int) -> None:
    ledger = Ledger(total)
    ledger.restore(4, [6, 7])
    remaining = []
    while ledger.has_next():
        remaining += handed_out(ledger, 1)
    assert remaining == [number for number in range(4, total) if number not in (6, 7)]


@pytest.mark.parametrize("seed", range(100))
def test_any_interleaving_of_events_leaves_each_range_in_the_model_once(seed: int) -> None:
    """The model is a count for each range, which goes back with the ledger when a checkpoint is restored."""
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
        assert ledger.count_done == sum(model)
        assert ledger.count_out == len(out)
    assert model == [1] * total
    assert not out
