import contextlib
import signal

import pytest

from coordinator.checkpoints import save_at_signals


def test_a_signal_ends_the_program_after_it_has_saved() -> None:
    saved = []
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1)}

    def save() -> None:
        # Slurm sends SIGTERM too, some time after the signal that was asked for.
        signal.raise_signal(signal.SIGTERM)
        saved.append(True)

    try:
        with pytest.raises(SystemExit) as raised, save_at_signals(save):
            signal.raise_signal(signal.SIGUSR1)
        assert raised.value.code == 128 + signal.SIGUSR1
        assert saved == [True]
        signal.raise_signal(signal.SIGTERM)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@pytest.mark.parametrize("error", [None, SystemExit(3), ValueError("x")])
def test_without_a_signal_nothing_is_saved_and_handlers_are_restored(error) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    with contextlib.suppress(SystemExit, ValueError), save_at_signals(pytest.fail, signals=[signal.SIGUSR2]):
        if error is not None:
            raise error
    assert signal.getsignal(signal.SIGUSR2) is before
