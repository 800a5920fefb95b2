"""Tests that four workers lose nothing when they change the same rows: of variables, sharded ones and tables."""

import pytest

from tests.program_runner import ProgramRunner

PROGRAM = """
import numpy as np, tensorflow as tf
import coordinator
from coordinator.embeddings import Table, Uniform
from coordinator.testing import LocalCluster

DIM, KEYS, BATCH, STEPS, IN_A_STEP = 4, 3000, 100, 300, 10
partitioner = tf.distribute.experimental.partitioners.MinSizePartitioner(256, max_shards=2)
with (
    LocalCluster(workers=4, ps=2) as cluster,
    coordinator.ParameterServerStrategy(cluster.resolver, variable_partitioner=partitioner) as strategy,
):
    with strategy.scope():
        table = Table("words", DIM, 2 * KEYS, lambda rows, gradient: rows.assign_sub(gradient))
        plain = tf.Variable(tf.zeros([1, DIM]))
        sharded = tf.Variable(tf.zeros([100, DIM]))
    assert [len(getattr(each, "variables", [each])) for each in (plain, sharded)] == [1, 2]

    def keys_of(seed):
        return tf.random.stateless_uniform([BATCH], [seed, 0], 0, KEYS, tf.int64)

    @tf.function
    def step(seed):
        keys = keys_of(seed)
        with tf.GradientTape() as tape:
            rows = table.lookup(keys, training=True)
        table.apply_gradients(tape.gradient(rows, table.variable))
        for _ in tf.range(IN_A_STEP):
            for variable, row in ((plain, 0), (sharded, 0), (sharded, 99)):
                variable.scatter_add(tf.IndexedSlices(2.0 * tf.ones([1, DIM]), tf.constant([row])))
                variable.scatter_sub(tf.IndexedSlices(tf.ones([1, DIM]), tf.constant([row])))

    for seed in range(STEPS):
        strategy.schedule(step, args=(tf.constant(seed),), worker=seed % 4)
    strategy.join(300)
    for variable, row in ((plain, 0), (sharded, 0), (sharded, 99)):
        np.testing.assert_array_equal(variable[row], np.full(DIM, STEPS * IN_A_STEP))
    expected, counts = np.unique(np.concatenate([keys_of(seed) for seed in range(STEPS)]), return_counts=True)
    parts = [shard.read_rows(0, shard.capacity) for shard in table.shards]
    keys, rows = (np.concatenate([part[number] for part in parts]) for number in (0, 1))
    order = np.argsort(keys)
    assert keys[order].tolist() == expected.tolist()
    added = Uniform()(tf.constant(keys[order]), DIM).numpy() - rows[order]
    np.testing.assert_allclose(added, np.outer(counts, np.ones(DIM)), atol=1e-4)
"""


@pytest.mark.cluster
@pytest.mark.long
def test_four_racing_workers_lose_no_addition_and_make_one_row_for_a_key(run_program: ProgramRunner) -> None:
    run_program(PROGRAM)
