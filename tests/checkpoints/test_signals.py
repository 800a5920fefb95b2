import contextlib
import signal
import sys
import threading

import pytest

from coordinator.checkpoints import save_at_signals
from tests.deadline import LIMIT


@pytest.fixture
def handlers():
    """Restores those that are replaced when a signal has arrived."""
    before = {number: signal.getsignal(number) for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_a_signal_ends_the_program_after_it_has_saved(handlers) -> None:
    saved = []
    before = signal.signal(signal.SIGTERM, signal.SIG_DFL)

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
        signal.signal(signal.SIGTERM, before)


def test_without_a_signal_nothing_is_saved_and_handlers_are_restored(handlers) -> None:
    before = signal.getsignal(signal.SIGUSR2)
    for error in (None, SystemExit(3), ValueError("x")):
        with contextlib.suppress(SystemExit, ValueError), save_at_signals(pytest.fail, signals=[signal.SIGUSR2]):
            if error is not None:
                raise error
        assert signal.getsignal(signal.SIGUSR2) is before
    with pytest.raises(KeyboardInterrupt), save_at_signals(pytest.fail, signals=[signal.SIGUSR2]):
        signal.raise_signal(signal.SIGINT)


def test_a_signal_that_arrives_in_a_finalizer_ends_the_program_shortly_after(handlers) -> None:
    class Finalized:
        def __del__(self) -> None:
            signal.raise_signal(signal.SIGUSR2)

    saved: list[bool] = []
    before = signal.getsignal(signal.SIGINT), sys.unraisablehook

    def wait() -> None:
        Finalized()
        assert threading.Event().wait(LIMIT), "It was ignored."

    with pytest.raises(SystemExit), save_at_signals(lambda: saved.append(True), signals=[signal.SIGUSR2]):
        wait()
    assert saved == [True]
    assert (signal.getsignal(signal.SIGINT), sys.unraisablehook) == before


@pytest.mark.parametrize("first", [signal.SIGUSR1, signal.SIGUSR2])
def test_what_runs_on_the_way_out_is_not_cut_by_further_signals(first: signal.Signals, handlers) -> None:
    steps: list[str] = []

    def train() -> None:
        try:
            signal.raise_signal(first)
            pytest.fail("It goes on.")
        finally:
            for number in (signal.SIGUSR2, signal.SIGUSR1) * 3:
                signal.raise_signal(number)
                steps.append(number.name)

    saving = save_at_signals(lambda: steps.append("saved"), signals=[signal.SIGUSR2, signal.SIGUSR1])
    with pytest.raises(SystemExit) as raised, saving:
        train()
    assert raised.value.code == 128 + first
    assert steps == ["SIGUSR2", "SIGUSR1"] * 3 + ["saved"]


def test_ctrl_c_cuts_what_runs_on_the_way_out_and_what_is_saved(handlers) -> None:
    def interrupt() -> None:
        signal.raise_signal(signal.SIGINT)

    def train() -> None:
        try:
            signal.raise_signal(signal.SIGUSR2)
        finally:
            with pytest.raises(KeyboardInterrupt):
                interrupt()

    with pytest.raises(KeyboardInterrupt), save_at_signals(interrupt, signals=[signal.SIGUSR2]):
        train()
