"""Tests of tables whose workers and parameter servers are lost, or are others."""

import threading

import numpy as np
import pytest
import tensorflow as tf

from coordinator.embeddings import Uniform
from tests.embeddings.tables import DIM, TIMEOUT, make_step, make_table

pytestmark = pytest.mark.long


def test_a_table_is_whole_after_a_worker_died(strategy, shared_cluster):
    steps, size = 400, 200
    batches = [np.random.default_rng(seed).integers(0, 20_000, size) for seed in range(steps)]
    table = make_table(strategy, 40_000)
    step, finished, retried = make_step(table), threading.Semaphore(0), strategy.cluster.statistics().retried
    for batch in batches:
        strategy.schedule(step, args=(batch, np.float32(2.0))).add_done_callback(lambda _: finished.release())
    for _ in range(steps // 4):
        finished.acquire()
    shared_cluster.kill("worker", 1)
    assert not strategy.done()
    shared_cluster.restart("worker", 1)
    strategy.join(TIMEOUT)
    expected, counts = np.unique(np.concatenate(batches), return_counts=True)
    parts = [shard.read_rows(0, shard.capacity) for shard in table.shards]
    keys, rows = (np.concatenate([part[number] for part in parts]) for number in (0, 1))
    order = np.argsort(keys)
    assert keys[order].tolist() == expected.tolist()
    added = np.round(Uniform()(tf.constant(keys[order]), DIM).numpy() - rows[order]).astype(int)
    assert (added == added[:, :1]).all()
    # A step whose worker died may run twice, in part or as a whole; nothing is lost.
    assert (added[:, 0] >= counts).all()
    assert (added[:, 0] - counts).sum() <= size * (strategy.cluster.statistics().retried - retried)


SERVERS = """
    import keras
    import numpy as np
    import pytest
    import tensorflow as tf

    import coordinator
    from coordinator.embeddings import Constant, Embedding, MinCount, OlderThan, export, export_delta
    from coordinator.testing import LocalCluster
    from tests.embeddings.tables import DIM, Trainer, make_table, wait_recovered
    from tests.embeddings.test_table_checkpoint import content_of

    KEYS, recovered, contents = np.arange(20), [], {}

    def on_servers(count):
        spec = {"worker": cluster.spec["worker"], "ps": cluster.spec["ps"][:count]}
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(spec), task_type="chief", task_id=0, rpc_layer="grpc"
        )
        return coordinator.ParameterServerStrategy(resolver)

    def lose_a_server(strategy):
        saved, apart = (make_table(strategy, initializer=Constant(0.0)) for _ in range(2))
        counted = make_table(strategy, admission=MinCount(2))
        with strategy.scope():
            number = tf.Variable(0.0)
            variables = [number, Embedding(saved).rows, Embedding(apart).rows]
            optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=4)
            optimizer.build(variables)
            model = keras.Sequential([keras.Input((1,), dtype="int64"), Embedding(apart)])

        @tf.function
        def step():
            with tf.GradientTape() as tape:
                rows = [tf.reduce_sum(table.lookup(KEYS, training=True)) for table in (saved, apart)]
                loss = tf.add_n([number, *rows])
            optimizer.apply(tape.gradient(loss, [number, saved.variable, apart.variable]), variables)

        def train(steps):
            for _ in range(steps):
                strategy.schedule(step).result(120)

        trainer = Trainer(strategy, counted)
        for keys in ([1, 2, 3], [1, 2, 3], range(2, 90), range(60, 100)):
            trainer.train(list(keys))
        checkpoint = tf.train.Checkpoint(number=number, optimizer=optimizer, table=saved, counted=counted)
        manager = tf.train.CheckpointManager(checkpoint, "saved", max_to_keep=2)
        strategy.restore_from(manager, on_rollback=recovered.append)
        train(4)
        manager.save()
        before = content_of(counted)
        assert before[0] and before[1]
        of_apart = tf.train.Checkpoint(table=apart)
        of_apart.write("full")
        train(2)
        trainer.train(list(range(90)))
        apart.save_delta("delta")
        export(model, "1")
        cluster.kill("ps", 1)
        cluster.restart("ps", 1)
        wait_recovered(strategy, recovered)
        # Rows, waiting keys and gradients that wait for an update are those of the checkpoint.
        assert content_of(counted) == before
        assert number.numpy() == -1
        # No checkpoint of the manager has the other one, which has no delta now.
        assert apart.size() == 0
        train(4)
        assert number.numpy() == -2
        np.testing.assert_allclose(saved.lookup(KEYS), np.full([20, DIM], -1.0))
        np.testing.assert_allclose(apart.lookup(KEYS), np.full([20, DIM], -0.5))
        for refused, message in (
            (lambda: apart.save_delta("next"), "has no delta: save it first"),
            (lambda: apart.restore_delta("delta"), "it is not the delta that was saved next"),
            (lambda: export_delta(model, "2", "1"), "is no base for a delta of the table 'words' as it is now"),
        ):
            with pytest.raises(ValueError, match=message):
                refused()
        of_apart.write("full2")
        apart.save_delta("delta2")

    def restored(strategy):
        table = make_table(strategy, 4000, keras.optimizers.Adagrad(0.1), admission=MinCount(2), eviction=OlderThan(2))
        checkpoint = tf.train.Checkpoint(table=table)
        for former, content in contents.items():
            checkpoint.read(former).assert_consumed()
            assert content_of(table) == content, former
        return table, checkpoint

    def train_further(servers, strategy):
        table, checkpoint = restored(strategy)
        trainer = Trainer(strategy, table)
        for _ in range(2):
            trainer.train(np.arange(200 * servers, 200 * servers + 500) * 11)
        table.evict()
        path = checkpoint.write(f"on_{servers}")
        contents[path] = content_of(table)
        assert table.size() >= 500

    with LocalCluster(workers=1, ps=3) as cluster:
        with on_servers(2) as strategy:
            lose_a_server(strategy)
        for servers in (1, 3):
            with on_servers(servers) as strategy:
                train_further(servers, strategy)
        with on_servers(2) as strategy:
            restored(strategy)
"""


@pytest.mark.cluster
@pytest.mark.timeout(400)
def test_a_lost_server_and_other_numbers_of_servers_get_back_what_was_saved(run_program):
    run_program(SERVERS, timeout=300)
