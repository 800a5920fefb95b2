"""Tests that a call that several closures share is cancelled only when all of them are cancelled."""

from coordinator.queueing.closure import shared_cancellations


class Counted:
    """A `Cancellation` that counts its calls."""

    def __init__(self) -> None:
        self.count = 0

    def cancel(self) -> None:
        self.count += 1


def test_a_call_continues_when_one_of_its_closures_is_cancelled() -> None:
    call = Counted()
    first, second, third = shared_cancellations(call, 3)
    first.cancel()
    first.cancel()
    third.cancel()
    assert call.count == 0
    second.cancel()
    assert call.count == 1
    second.cancel()
    assert call.count == 1
