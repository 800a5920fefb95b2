"""How far training has come, and how far each checkpoint of it."""

from collections.abc import Callable


class SavedProgress:
    """Counts finished functions, without those that a recovery undid.

    Args:
      finished: how many functions have finished so far, undone ones among them.
    """

    def __init__(self, finished: Callable[[], int]) -> None:
        self._finished = finished
        self._undone = 0
        # By the path of the checkpoint. One that is not here was written before this program began to train.
        self._saved: dict[str, int] = {}

    def count(self) -> int:
        """How many functions have finished whose effect is in the variables."""
        return self._finished() - self._undone

    def record(self, checkpoint: str, count: int) -> None:
        """Tells what `count` was when the writing of a checkpoint began."""
        self._saved[checkpoint] = count

    def roll_back(self, checkpoint: str | None) -> tuple[int, int]:
        """Tells that a checkpoint was restored, or the initial values; returns `count` before and after."""
        before = self.count()
        after = 0 if checkpoint is None else min(before, self._saved.get(checkpoint, 0))
        self._undone += before - after
        return before, after
