"""Tests of iterators whose positions are in the checkpoint, while servers and the client die."""

import os

import pytest

from tests.program_runner import ProgramRunner

TRAINING = """
    import os

    import numpy as np
    import tensorflow as tf

    import coordinator
    from coordinator.testing import LocalCluster

    SIZE = 12_000

    def numbers(context):
        data = tf.data.Dataset.range(SIZE).shard(context.num_input_pipelines, context.input_pipeline_id)
        return data.shuffle(1000).batch(5).prefetch(4)

    def train(cluster, folder, die_at=None):
        strategy = coordinator.ParameterServerStrategy(cluster.resolver)
        with strategy.scope():
            counts = [tf.Variable(lambda: tf.zeros([SIZE], tf.int32)) for _ in range(2)]

        @tf.function
        def step(iterator):
            ids = next(iterator)
            for count in counts:
                count.scatter_nd_add(ids[:, tf.newaxis], tf.ones_like(ids, tf.int32))

        iterator = iter(strategy.experimental_distribute_datasets_from_function(numbers))
        checkpoint = tf.train.Checkpoint(counts=counts, iterator=iterator)
        manager = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=2)
        manager.restore_or_initialize()
        strategy.restore_from(manager)
        for scheduled in range(10 * SIZE):
            try:
                strategy.schedule(step, args=(iterator,))
            except tf.errors.OutOfRangeError:
                break
            if scheduled % 300 == 0:
                manager.save()
            if scheduled == die_at:
                os._exit(9)
        strategy.join()
        found = [(int((each == 0).sum()), int(np.maximum(each - 1, 0).sum())) for each in map(np.array, counts)]
        strategy.close()
        return found
"""


@pytest.mark.long
@pytest.mark.cluster
def test_data_and_model_continue_together_when_the_client_was_restarted(run_program: ProgramRunner, tmp_path) -> None:
    for die_at in (400, 700, None):
        run_program(
            TRAINING
            + f"""
    with LocalCluster(workers=2, ps=2) as cluster:
        assert (found := train(cluster, {os.fspath(tmp_path)!r}, die_at={die_at})) == [(0, 0)] * 2, found
    """,
            exit_code=0 if die_at is None else 9,
        )
