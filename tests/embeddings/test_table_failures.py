"""Tests of tables whose workers and parameter servers are lost. Each program has its own cluster."""

import pytest

from tests.program_runner import ProgramRunner

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(400)]
TIMEOUT = 380

PROGRAM = """
import threading
import numpy as np, tensorflow as tf
import coordinator
from coordinator.embeddings import Table, Uniform
from coordinator.testing import LocalCluster

DIM, BATCH, SOME_TIME = 4, 200, threading.Event()

def make(name, capacity):
    with strategy.scope():
        table = Table(name, DIM, capacity, lambda rows, gradient: rows.assign_sub(gradient))

    @tf.function
    def step(seed):
        keys = tf.random.stateless_uniform([BATCH], [seed, 0], 0, 20_000, tf.int64)
        with tf.GradientTape() as tape:
            rows = table.lookup(keys, training=True)
        table.apply_gradients(tape.gradient(rows, table.variable))

    return table, step

def keys_of(seed):
    return tf.random.stateless_uniform([BATCH], [seed, 0], 0, 20_000, tf.int64).numpy()

def content(table):
    parts = [shard.read_rows(0, shard.capacity) for shard in table.shards]
    return [np.concatenate([part[number] for part in parts]) for number in (0, 1)]
"""

WORKER_DIES = """
STEPS, DEATHS = 1500, 3
with LocalCluster(workers=4, ps=2) as cluster, coordinator.ParameterServerStrategy(cluster.resolver) as strategy:
    table, step = make("words", 40_000)
    for seed in range(STEPS):
        strategy.schedule(step, args=(tf.constant(seed),))
    for death in range(DEATHS):
        while strategy.cluster.statistics().finished < (death + 1) * STEPS // (DEATHS + 2):
            SOME_TIME.wait(0.01)
        cluster.kill("worker", death)
        assert not strategy.done()
        cluster.restart("worker", death)
    strategy.join(300)
    expected, counts = np.unique(np.concatenate([keys_of(seed) for seed in range(STEPS)]), return_counts=True)
    keys, rows = content(table)
    assert len(keys) == len(np.unique(keys)) == table.size(), (len(keys), len(np.unique(keys)), table.size())
    assert sorted(keys) == expected.tolist()
    order = np.argsort(keys)
    added = np.round(Uniform()(tf.constant(keys[order]), DIM).numpy() - rows[order]).astype(int)
    assert (added == added[:, :1]).all()
    # A step whose worker died may run twice, in part or as a whole; nothing is lost.
    assert (added[:, 0] >= counts).all()
    again = (added[:, 0] - counts).sum()
    assert again <= BATCH * strategy.cluster.statistics().retried, (again, strategy.cluster.statistics())
    print("rows", len(keys), "added again", again, strategy.cluster.statistics())
"""

SERVER_DIES = """
with LocalCluster(workers=2, ps=2) as cluster, coordinator.ParameterServerStrategy(cluster.resolver) as strategy:
    table, step = make("words", 40_000)
    with strategy.scope():
        number = tf.Variable(3)
    import tempfile
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(number=number), tempfile.mkdtemp(), 2)
    manager.save()
    rolled_back = threading.Event()
    strategy.restore_from(manager, on_rollback=lambda _: rolled_back.set())
    for seed in range(20):
        strategy.schedule(step, args=(tf.constant(seed),))
    strategy.join(120)
    assert table.size() > 3000
    cluster.kill("ps", 1)
    cluster.restart("ps", 1)
    assert rolled_back.wait(120)
    # No checkpoint holds the table: it is empty on both servers, and trains on.
    assert table.size() == 0, table.statistics()
    for seed in range(20):
        strategy.schedule(step, args=(tf.constant(seed),))
    strategy.join(120)
    expected, counts = np.unique(np.concatenate([keys_of(seed) for seed in range(20)]), return_counts=True)
    keys, rows = content(table)
    order = np.argsort(keys)
    assert keys[order].tolist() == expected.tolist()
    added = Uniform()(tf.constant(keys[order]), DIM).numpy() - rows[order]
    np.testing.assert_allclose(added, np.outer(counts, np.ones(DIM)), atol=1e-4)
"""


@pytest.mark.parametrize("case", [WORKER_DIES, SERVER_DIES], ids=["a worker dies", "a parameter server dies"])
def test_a_table_is_whole_after(run_program: ProgramRunner, case: str) -> None:
    run_program(PROGRAM + case, timeout=TIMEOUT)
