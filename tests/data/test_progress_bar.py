"""Tests of the progress bar of epochs, on workers in memory."""

import io
import sys

import numpy as np
import pytest

from coordinator.data import Epochs, arrays
from tests.data.test_epochs import Model, strategy_of
from tests.deadline import wait_until


def test_a_bar_follows_the_ledger_forward_and_back():
    epochs, written = Epochs(arrays(np.arange(103)), batch_size=10, epochs=2), io.StringIO()
    with strategy_of() as strategy, epochs.progress(file=written, desc="train") as bar:
        for positions in epochs.on(strategy):
            strategy.schedule(Model().step, (positions,))
        wait_until(lambda: bar.n == 22)
        epochs.reset()
        wait_until(lambda: bar.n == 0)
        strategy.schedule(Model().step, (next(epochs.on(strategy)),)).result()
        strategy.scheduler.settled()
        assert epochs.statistics().done == 1
    assert bar.n == 1
    assert "train: 100%" in written.getvalue()


def test_a_bar_without_tqdm_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tqdm.auto", None)
    with pytest.raises(ImportError, match="needs tqdm: pip install 'coordinator-tf\\[data\\]'"):
        Epochs(arrays(np.arange(3)), batch_size=1).progress().__enter__()
