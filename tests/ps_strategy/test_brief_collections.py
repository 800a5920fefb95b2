"""Tests of which objects are searched for garbage while a strategy is open."""

import gc
import weakref

import pytest

from coordinator.ps_strategy.parameter_server_strategy import BriefCollections


class Cycle(BriefCollections):
    """Refers to itself, as a strategy does."""

    def __init__(self) -> None:
        self.itself = self


@pytest.fixture(autouse=True)
def nothing_frozen():
    """The strategy of other tests may be open."""
    was_frozen = gc.get_freeze_count() > 10_000
    gc.unfreeze()
    yield
    gc.unfreeze()
    if was_frozen:
        gc.freeze()


def test_what_exists_before_is_not_searched_until_the_object_ends_or_is_forgotten():
    class Node:
        pass

    former = Node()
    former.itself = former
    cycle, later = Cycle(), Node()
    later.itself = later
    references = [weakref.ref(each) for each in (former, later)]
    del former, later
    gc.collect()
    assert [reference() is None for reference in references] == [False, True]
    cycle.end_brief_collections()
    gc.collect()
    assert references[0]() is None
    forgotten = weakref.ref(Cycle())
    gc.collect()
    assert forgotten() is None
    assert gc.get_freeze_count() < 10_000  # Python 3.12 itself freezes some hundreds.


def test_a_program_that_has_frozen_its_objects_is_left_as_it_is():
    gc.freeze()
    cycle = Cycle()
    cycle.end_brief_collections()
    assert gc.get_freeze_count() > 10_000
