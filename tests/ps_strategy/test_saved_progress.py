"""Counting what finished, what checkpoints hold of it, and what recoveries undid."""

from coordinator.ps_strategy.saved_progress import SavedProgress


class Finished:
    """How many functions have finished."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> int:
        return self.count


def test_what_a_recovery_undid_does_not_count():
    finished = Finished()
    progress = SavedProgress(finished)
    finished.count = 10
    progress.record("ckpt-1", progress.count())
    finished.count = 25
    assert progress.roll_back("ckpt-1") == (25, 10)
    assert progress.count() == 10
    finished.count = 30
    assert progress.count() == 15
    progress.record("ckpt-2", progress.count())
    finished.count = 32
    assert progress.roll_back("ckpt-2") == (17, 15)
    assert progress.roll_back("ckpt-1") == (15, 10)


def test_a_checkpoint_from_before_this_program_holds_nothing_of_it():
    finished = Finished()
    progress = SavedProgress(finished)
    finished.count = 5
    assert progress.roll_back("of-an-earlier-run") == (5, 0)
    finished.count = 9
    assert progress.roll_back(None) == (4, 0)
