"""Tests of tables in checkpoints, and of deltas."""

import contextlib
import pathlib
import threading

import keras
import numpy as np
import pytest
import tensorflow as tf

from coordinator.embeddings import MinCount, OlderThan
from coordinator.ps_strategy.recovery.snapshots import Snapshots
from tests.embeddings.tables import Trainer, make_table


def content_of(table):
    """Returns all that a table has, whatever server has it: rows, slots and stamps by key, waiting keys, counts."""
    rows, waiting = {}, {}
    for shard in table.shards:
        # Read as a whole: an element of a tensor is an operation on the server.
        keys, values, slots, stamps = tf.nest.map_structure(np.asarray, shard.read_rows(0, 10_000, 0))
        for number, key in enumerate(keys.tolist()):
            assert key not in rows
            rows[key] = [values[number].tolist(), int(stamps[number]), *(slot[number].tolist() for slot in slots)]
        counted = (np.asarray(each).tolist() for each in shard.read_waiting(0, 10_000))
        waiting |= dict(zip(*counted, strict=True))
    return rows, waiting, table.statistics()


@pytest.fixture(scope="module")
def table():
    """Its functions are built once for two tests. Each test may begin with any rows."""
    return make_table(None, optimizer=keras.optimizers.Adagrad(0.1), admission=MinCount(2), eviction=OlderThan(2))


@pytest.fixture(scope="module")
def trainer(table):
    return Trainer(None, table)


@pytest.mark.unconnected
def test_a_table_is_restored_with_rows_slots_stamps_waiting_keys_and_counts(table, trainer, tmp_path):
    for first in (0, 0, 50, 50, 120):
        trainer.train(np.arange(first, first + 80) * 7)
    assert table.evict() > 0
    table.learning_rate = 0.05
    before = content_of(table)
    assert len(before[0]) > 40
    assert before[1]
    checkpoint = tf.train.Checkpoint(table=table, step=tf.Variable(3))
    path = checkpoint.save(str(tmp_path / "saved"))
    for _ in range(2):
        trainer.train(np.arange(300, 380))
    table.learning_rate = 1.0
    checkpoint.restore(path).assert_consumed()
    assert content_of(table) == before
    assert table.learning_rate == pytest.approx(0.05)
    # Into another one, which is created later.
    later = tf.train.Checkpoint()
    status = later.read(path)
    later.table = make_table(None, 4000, keras.optimizers.Adagrad(0.2), admission=MinCount(2))
    status.expect_partial()
    assert content_of(later.table)[:2] == before[:2]
    with pytest.raises(ValueError, match=r"is of a table with rows \[4\], slot _accumulators \[4\], and 'words' has"):
        tf.train.Checkpoint(table=make_table(None)).read(path)
    # It goes on as it would have.
    trainer.train(np.arange(80) * 7)
    assert table.statistics().steps == before[2].steps + 1
    assert not [each for each in tmp_path.iterdir() if "temp" in each.name]


@pytest.mark.unconnected
def test_a_checkpoint_and_its_deltas_are_the_table_with_evictions(table, trainer, tmp_path):
    for first in (0, 0, 50, 50, 120):
        trainer.train(np.arange(first, first + 80) * 7)
    full = tf.train.Checkpoint(table=table).write(str(tmp_path / "full"))
    moments = []
    for number in range(2):
        for first in (200, 200, 10 * number, 330):
            trainer.train(np.arange(first, first + 80) * 7)
        evicted = table.evict()
        # Some that were evicted return.
        for _ in range(2):
            trainer.train(np.arange(number, 80 + number) * 9)
        assert evicted > 0
        table.save_delta(str(tmp_path / f"delta{number}"))
        moments.append(content_of(table))
    other = make_table(None, 2000, keras.optimizers.Adagrad(0.1), admission=MinCount(2), eviction=OlderThan(2))
    tf.train.Checkpoint(table=other).read(full).assert_consumed()
    with pytest.raises(ValueError, match="it is not the delta that was saved next"):
        other.restore_delta(str(tmp_path / "delta1"))
    for number, (rows, waiting, statistics) in enumerate(moments):
        other.restore_delta(str(tmp_path / f"delta{number}"))
        restored = content_of(other)
        assert restored[:2] == (rows, waiting)
        assert (restored[2].admitted, restored[2].evicted) == (statistics.admitted, statistics.evicted)
    # A delta may follow, too.
    Trainer(None, other).train(np.arange(9) * 7)
    other.save_delta(str(tmp_path / "next"))


def test_what_was_not_finished_is_no_base_of_a_delta(strategy, tmp_path):
    table = make_table(strategy)
    trainer, checkpoint = Trainer(strategy, table), tf.train.Checkpoint(table=table)
    full, delta = str(tmp_path / "full"), str(tmp_path / "delta")
    trainer.train([1, 2])
    with unwritable(full), pytest.raises(tf.errors.OpError):
        checkpoint.write(full)
    snapshot = Snapshots(checkpoint, 2**26).take(full)
    with pytest.raises(ValueError, match="has no delta: save it first"):
        table.save_delta(delta)
    snapshot.write(threading.Event())
    trainer.train([2, 3])
    with unwritable(delta), pytest.raises(tf.errors.OpError):
        table.save_delta(delta)
    table.save_delta(delta)
    other = make_table(strategy)
    tf.train.Checkpoint(table=other).read(full).assert_consumed()
    other.restore_delta(delta)
    assert content_of(other) == content_of(table)


@contextlib.contextmanager
def unwritable(path):
    """A scope in which a checkpoint cannot be finished, as a folder has the name of one of its files."""
    folder = pathlib.Path(f"{path}.index")
    (folder / "full").mkdir(parents=True)
    yield
    (folder / "full").rmdir()
    folder.rmdir()
