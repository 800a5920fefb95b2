"""Tests of how far above the first range that is not done ranges are handed out, and of what a signal interrupts."""

import contextlib

import numpy as np
import pytest

from coordinator.data import Epochs, arrays
from coordinator.testing.fake_runtime import Gate
from tests.data.fake_strategy import FakeStrategy
from tests.deadline import LIMIT
from tests.fake_cluster import OPTIONS


def test_functions_far_above_a_restored_checkpoint_are_cancelled(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("ledger", "epochs"):
        monkeypatch.setattr(f"coordinator.data.{module}.WINDOW", 5)
    done = []
    epochs = Epochs(arrays(np.arange(20)), 1)
    with contextlib.closing(FakeStrategy(OPTIONS, workers=1)) as strategy:
        gate = Gate(strategy.runtime)

        def step(worker: int, positions: np.ndarray) -> None:
            if positions[3] >= 3:
                gate(worker)
            done.append(int(positions[3]))

        saved = epochs.serialize()
        ranges = epochs.on(strategy)
        futures = [strategy.schedule(step, (next(ranges),)) for _ in range(3)]
        strategy.scheduler.join(LIMIT)
        futures += [strategy.schedule(step, (next(ranges),)) for _ in range(5)]
        gate.wait_arrived(1)
        # The functions of ranges 3 to 7 are under way; with all before 0 done again, 5 to 7 are too far ahead.
        epochs.hold()
        epochs.deserialize(saved)
        epochs.resume()
        assert [future.cancelled() for future in futures] == [False] * 5 + [True] * 3
        gate.open()
        for positions in ranges:
            strategy.schedule(step, (positions,))
        strategy.scheduler.join(LIMIT)
    assert sorted(done[3:]) == list(range(20)), "each once in the restored model"
    assert done[:3] == [0, 1, 2]


def test_an_interrupted_schedule_gives_its_range_back(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    done = []
    epochs = Epochs(arrays(np.arange(20)), 1)
    with contextlib.closing(FakeStrategy(OPTIONS, workers=1)) as strategy:

        def train() -> None:
            for positions in epochs.on(strategy):
                strategy.schedule(lambda worker, positions: done.append(int(positions[3])), (positions,))

        with monkeypatch.context() as patched:
            patched.setattr(strategy.scheduler.queue, "put", interrupted)
            with pytest.raises(KeyboardInterrupt):
                train()
        assert epochs.statistics().out == 0
        train()
    assert sorted(done) == list(range(20))
