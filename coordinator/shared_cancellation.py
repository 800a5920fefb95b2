"""The cancellations of closures that run in one call, which can be cancelled only as a whole."""

import threading
from collections.abc import Sequence

from coordinator.runtime import Cancellation


class SharedCancellation:
    """Cancels a call when each of those that share it was cancelled: one alone must not take the others with it.

    Args:
      call: cancels the call.
      count: how many share it.

    Attributes:
      shares: one `Cancellation` for each.
    """

    def __init__(self, call: Cancellation, count: int) -> None:
        self._call = call
        # A leaf: nothing is called while it is held.
        self._lock = threading.Lock()
        self.shares: Sequence[Cancellation] = tuple(_Share(self) for _ in range(count))
        self._left = set(self.shares)

    def give_up(self, share: "_Share") -> None:
        """One of them wants the call no more; again, does nothing."""
        with self._lock:
            was_last = share in self._left and len(self._left) == 1
            self._left.discard(share)
        if was_last:
            self._call.cancel()


class _Share:
    """See `coordinator.runtime.Cancellation`."""

    def __init__(self, whole: SharedCancellation) -> None:
        self._whole = whole

    def cancel(self) -> None:
        self._whole.give_up(self)
