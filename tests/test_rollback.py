"""Tests of the description of a recovery."""

import dataclasses

import pytest

from coordinator.errors import Rollback

ROLLBACK = Rollback(
    parameter_servers=("/job:ps/task:0", "/job:ps/task:1"),
    checkpoint="folder/ckpt-3",
    step_before=120,
    step_after=100,
    seconds=2.25,
)


def test_the_text_of_a_rollback_says_what_was_lost() -> None:
    assert ROLLBACK.steps_lost == 20
    assert str(ROLLBACK) == (
        "/job:ps/task:0, /job:ps/task:1 recovered from checkpoint folder/ckpt-3, 20 steps back, at step 100 (2.2 s)"
    )


@pytest.mark.parametrize("unknown", ["step_before", "step_after"])
def test_an_unknown_number_of_lost_steps_is_left_out(unknown: str) -> None:
    rolled_back = dataclasses.replace(ROLLBACK, checkpoint=None, **{unknown: None})
    assert rolled_back.steps_lost is None
    assert str(rolled_back) == "/job:ps/task:0, /job:ps/task:1 recovered from the initial values (2.2 s)"
