"""Tests of which workers may run a function for the first time."""

import pytest

from coordinator import build_turns
from coordinator.build_turns import BuildTurns


@pytest.mark.parametrize(("workers", "most"), [(1, 1), (2, 1), (3, 1), (4, 2), (9, 4)])
def test_at_most_half_of_the_workers_have_a_turn_but_at_least_one(workers: int, most: int) -> None:
    turns = BuildTurns()
    turns.workers = workers
    assert [turns.take(worker) for worker in range(workers)] == [True] * most + [False] * (workers - most)


def test_a_turn_that_was_given_back_is_free() -> None:
    turns = BuildTurns()
    assert turns.take(0)
    assert not turns.take(1)
    turns.give_back(1)
    assert not turns.take(1)
    turns.give_back(0)
    assert turns.take(1)


def test_a_turn_that_is_never_given_back_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = BuildTurns()
    assert turns.take(0)
    monkeypatch.setattr(build_turns, "_MOST_SECONDS", 0.0)
    assert turns.take(1)
