"""Tests of epochs on workers in memory: the loop, failures, checkpoints, the window of ranges, the progress bar."""

import concurrent.futures
import contextlib
import dataclasses
import io
import itertools
import logging
import sys
import threading
from collections import Counter
from collections.abc import Iterator

import numpy as np
import pytest
import tensorflow as tf

from coordinator.data import Epochs, Source, arrays
from coordinator.data.ledger import Ledger
from coordinator.errors import ClosureCancelledError, ClosureQuarantined, ParameterServerLost
from coordinator.testing.fake_runtime import Gate
from tests.data.fake_strategy import FakeStrategy
from tests.deadline import LIMIT, wait_until
from tests.fake_cluster import OPTIONS

ALONE = dataclasses.replace(OPTIONS, stop_on_error=False)


@pytest.fixture
def source() -> Source:
    return arrays(np.arange(103))


@contextlib.contextmanager
def strategy_of(options=OPTIONS, workers=2) -> Iterator[FakeStrategy]:
    with contextlib.closing(FakeStrategy(options, workers)) as strategy:
        yield strategy


class Model:
    """Counts how often each example was trained in each epoch."""

    def __init__(self) -> None:
        self.visits: Counter[tuple[int, int]] = Counter()
        self._lock = threading.Lock()

    def step(self, worker: int, positions: np.ndarray) -> None:
        epoch, start, count, _, _ = positions
        with self._lock:
            self.visits.update((int(epoch), int(start) + each) for each in range(count))

    def is_exact(self, epochs: int, size: int = 103) -> bool:
        return self.visits == Counter({(epoch, each): 1 for epoch in range(epochs) for each in range(size)})


def train(strategy, epochs, step, **settings):
    """Runs the loop to its end."""
    for positions in epochs.on(strategy, **settings):
        strategy.schedule(step, (positions,))


def test_every_example_is_trained_once_and_a_loop_may_end_before_an_epoch(source):
    model, epochs, numbers = Model(), Epochs(source, batch_size=10, epochs=4), []
    epochs.begin_at(1)
    epochs.begin_at(0)  # It is further.
    with strategy_of() as strategy:
        for end in (2, 4):
            for positions in epochs.on(strategy, until=end):
                numbers.append(int(positions[3]))
                strategy.schedule(model.step, (positions,))
            assert (epochs.epoch, epochs.done, epochs.remaining) == (end, end == 4, 11 * (4 - end))
        # The loop ends when all futures are done, and a closure is settled a moment after its future.
        wait_until(strategy.scheduler.done)
    assert model.visits == Counter({(epoch, each): 1 for epoch in (1, 2, 3) for each in range(103)})
    assert numbers == list(range(11, 44))


def test_the_last_range_is_shorter_or_dropped_and_ranges_may_have_several_batches(source):
    for settings, counts in (
        ({"batch_size": 50}, [50, 50, 3]),
        ({"batch_size": 50, "drop_remainder": True}, [50, 50]),
        ({"batch_size": 10, "batches_per_range": 4}, [40, 40, 23]),
    ):
        found = []
        with strategy_of() as strategy:
            train(strategy, Epochs(source, **settings), lambda worker, positions, to=found: to.append(positions[2]))
        assert sorted(found, reverse=True) == counts


def test_a_lost_worker_repeats_its_range_and_no_range_is_left_out(source):
    model, epochs = Model(), Epochs(source, batch_size=10)
    with strategy_of() as strategy, concurrent.futures.ThreadPoolExecutor(1) as thread:
        gate = Gate(strategy.runtime)

        def step(worker, positions):
            if positions[3] == 2:
                gate(worker)
            model.step(worker, positions)

        def kill():
            gate.wait_arrived()
            for happens in (strategy.runtime.kill, strategy.runtime.restart):
                for worker in (0, 1):
                    happens(worker)
            gate.open()

        killed = thread.submit(kill)
        train(strategy, epochs, step)
        killed.result(LIMIT)
    assert set(model.visits) == {(0, each) for each in range(103)}


def test_the_error_of_a_function_is_raised_and_its_range_is_handed_out_again(source):
    model, epochs, failures = Model(), Epochs(source, batch_size=10), [3, 3]

    def step(worker, positions):
        if positions[3] in failures:
            failures.remove(positions[3])
            raise ZeroDivisionError
        model.step(worker, positions)

    for options in (OPTIONS, ALONE):
        with strategy_of(options) as strategy, pytest.raises(ZeroDivisionError):
            train(strategy, epochs, step)
        # Those that wait are cancelled when the strategy is closed, and are handed out again.
    with strategy_of() as strategy:
        train(strategy, epochs, step)
    assert model.is_exact(1)
    assert epochs.statistics().given_back >= 2


def test_a_bad_range_is_skipped_after_some_failures_and_listed(source, caplog):
    model, epochs = Model(), Epochs(source, batch_size=10)

    def step(worker, positions):
        if positions[3] == 3:
            raise ZeroDivisionError
        model.step(worker, positions)

    with strategy_of(ALONE) as strategy, caplog.at_level(logging.WARNING, "coordinator"):
        for positions in epochs.on(strategy, on_bad_range="skip"):
            # Neither function ends before the other one is scheduled.
            with strategy.scheduler.quiet(LIMIT):
                strategy.schedule(step, (positions,))
                # Finishes each time.
                strategy.schedule(Model().step, (positions,))
    statistics = epochs.statistics()
    assert statistics.skipped == ((0, 30, 10),)
    assert (statistics.done, statistics.given_back) == (11, OPTIONS.max_attempts - 1)
    assert "The range of epoch 0, position 30, 10 examples is skipped: ZeroDivisionError" in caplog.text
    other = Epochs(source, batch_size=10)
    other.deserialize(epochs.serialize())
    assert other.statistics().skipped == ((0, 30, 10),)


def test_a_cancelled_function_counts_as_no_failure_of_its_range():
    ledger = Ledger(2)
    ledger.most_failures = 1
    for error in (None, ClosureCancelledError(), ParameterServerLost("ps 0", "lost")):
        number = ledger.next()
        ledger.schedule(number)
        assert not ledger.fail(number, error)
    assert (ledger.next(), ledger.skipped) == (0, set())
    ledger.schedule(0)
    assert ledger.fail(0, ZeroDivisionError())
    assert ledger.skipped == {0}


def test_a_range_that_kills_its_workers_is_raised_and_not_tried_without_end(source):
    epochs = Epochs(source, batch_size=10)
    with strategy_of() as strategy:

        def step(worker, positions):
            if positions[3] == 1:
                strategy.runtime.kill(worker)
                strategy.runtime.restart(worker)

        with pytest.raises(ClosureQuarantined):
            train(strategy, epochs, step)
        with contextlib.suppress(ClosureQuarantined):
            strategy.scheduler.join(LIMIT)


def test_ranges_without_a_function_are_an_error_and_not_forgotten(source):
    model, epochs = Model(), Epochs(source, batch_size=10)
    with strategy_of() as strategy:
        ranges = epochs.on(strategy)
        for positions in itertools.islice(ranges, 11):
            if positions[3] != 4:
                strategy.schedule(model.step, (positions,))
        with pytest.raises(RuntimeError, match="1 ranges were handed out, and no function was scheduled with them: 4"):
            next(ranges)
        train(strategy, epochs, model.step)
        many = Epochs(arrays(np.arange(5000)), batch_size=1)
        with pytest.raises(RuntimeError, match="1000 ranges were handed out"):
            list(many.on(strategy))
    assert model.is_exact(1)


def test_a_checkpoint_continues_with_what_is_left_on_other_workers(source, tmp_path):
    model, epochs = Model(), Epochs(source, batch_size=10, epochs=2, shuffle=7)
    checkpoint = tf.train.Checkpoint(epochs=epochs)
    with strategy_of() as strategy:
        for positions in epochs.on(strategy):
            strategy.schedule(model.step, (positions,))
            if positions[3] == 8:
                break
        with strategy.scheduler.quiet(LIMIT):
            path = checkpoint.write(str(tmp_path / "saved"))
            visits, done = model.visits.copy(), epochs.statistics().done
        train(strategy, epochs, model.step)
    model.visits = visits
    resumed = Epochs(source, batch_size=10, epochs=3, shuffle=7)
    tf.train.Checkpoint(epochs=resumed).read(path).assert_consumed()
    assert resumed.remaining == 33 - done
    with strategy_of(workers=3) as strategy:
        train(strategy, resumed, model.step)
    assert model.is_exact(3)


def test_other_data_or_settings_are_refused_in_words(source):
    given = {"source": source, "batch_size": 10, "shuffle": 7}
    saved = Epochs(**given).serialize()
    for settings, words in (
        ({"batch_size": 20}, r"batch_size \(10 then, 20 now\)"),
        ({"shuffle": None}, r"shuffle \(7 then, None now\)"),
        ({"drop_remainder": True}, "drop_remainder"),
        ({"source": arrays(np.arange(104))}, r"examples \(103 then, 104 now\), the content of the data"),
        ({"source": arrays(np.arange(1, 104))}, "these differ: the content of the data"),
    ):
        with pytest.raises(ValueError, match=words):
            Epochs(**given | settings).deserialize(saved)
    with pytest.raises(ValueError, match="release of TensorFlow that shuffles in another way"):
        Epochs(**given).deserialize(saved.replace('"permutation": [', '"permutation": [1'))


def test_the_epochs_begin_again_when_the_variables_do(source, caplog):
    model, epochs = Model(), Epochs(source, batch_size=10)
    with strategy_of() as strategy:
        for positions in epochs.on(strategy):
            strategy.schedule(model.step, (positions,))
            if positions[3] == 5 and not caplog.text:
                # As a recovery does, while nothing runs.
                strategy.scheduler.join(LIMIT)
                assert strategy.states == [epochs]
                with caplog.at_level(logging.WARNING, "coordinator"):
                    strategy.states[0].reset()
                    model.visits.clear()
                    strategy.schedule(model.step, (next(epochs.on(strategy)),))
    assert model.is_exact(1)
    assert epochs.statistics().rolled_back == 6
    assert "The epochs begin again with their first example" in caplog.text


def test_no_range_is_handed_out_between_a_reset_and_the_restoring_of_a_checkpoint(source):
    model, epochs = Model(), Epochs(source, batch_size=10)
    with strategy_of() as strategy:
        ranges = epochs.on(strategy)
        for _ in range(5):
            strategy.schedule(model.step, (next(ranges),))
        strategy.scheduler.join(LIMIT)
        saved = epochs.serialize()
        # As a recovery does, while the loop asks for the next range.
        epochs.hold()
        epochs.reset()
        with concurrent.futures.ThreadPoolExecutor(1) as thread:
            following = thread.submit(next, ranges)
            with pytest.raises(concurrent.futures.TimeoutError):
                following.result(0.1)
            epochs.deserialize(saved)
            epochs.resume()
            assert following.result(LIMIT)[3] == 5
            strategy.schedule(model.step, (following.result(),))
        for positions in ranges:
            strategy.schedule(model.step, (positions,))
        wait_until(strategy.scheduler.done)
    assert model.is_exact(1)


def test_wrong_settings_are_refused(source):
    for settings, words in (
        ({"batch_size": 0}, "batch_size"),
        ({"batch_size": 10, "epochs": 0}, "epochs"),
        ({"batch_size": 10, "shuffle": -1}, "shuffle"),
        ({"batch_size": 10, "shuffle": 2**63}, "shuffle must be an integer from 0 to 9223372036854775807, got 92"),
        ({"batch_size": 104, "drop_remainder": True}, "nothing is left"),
        ({"source": [1, 2], "batch_size": 1}, r"coordinator.data.arrays\(x, y\)"),
    ):
        with pytest.raises((TypeError, ValueError), match=words):
            Epochs(**{"source": source, **settings})
    epochs = Epochs(source, batch_size=10, shuffle=2**63 - 1)
    with strategy_of() as strategy:
        with pytest.raises(ValueError, match=r"Options\(stop_on_error=False\)"):
            epochs.on(strategy, on_bad_range="skip")
        with pytest.raises(ValueError, match='"raise" or "skip"'):
            epochs.on(strategy, on_bad_range="drop")


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
