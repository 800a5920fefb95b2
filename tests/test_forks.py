"""Tests of what a process that was forked from the client leaves alone."""

import os
import traceback
from collections.abc import Callable

import pytest

from coordinator.background_thread import only_here, refuse_forked


def in_child(check: Callable[[], object]) -> None:
    """Calls a function in a process that is forked from this one; fails if it raises."""
    child = os.fork()
    if not child:
        try:
            check()
        except BaseException:  # noqa: BLE001 - the parent fails
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0


def test_a_call_is_made_in_the_process_that_it_is_meant_for_alone() -> None:
    called: list[int] = []
    call = only_here(lambda: called.append(1))

    def check() -> None:
        call()
        assert not called

    in_child(check)
    call()
    assert called == [1]


def test_a_forked_process_is_told_whose_object_it_uses() -> None:
    owner = os.getpid()
    refuse_forked(owner, "The strategy")

    def check() -> None:
        with pytest.raises(RuntimeError, match=rf"^The strategy belongs to process {owner}, from which this process"):
            refuse_forked(owner, "The strategy")

    in_child(check)
