"""Tests of tables whose workers and parameter servers are lost, or are others. Each program has its own cluster."""

import pytest

from tests.program_runner import ProgramRunner

pytestmark = [pytest.mark.cluster, pytest.mark.long, pytest.mark.timeout(400)]

RESHARDING = """
    import keras
    import numpy as np
    import tensorflow as tf

    import coordinator
    from coordinator.embeddings import MinCount, OlderThan
    from coordinator.testing import LocalCluster
    from tests.embeddings.tables import Trainer, make_table
    from tests.embeddings.test_table_checkpoint import content_of

    contents = {}

    def restore(servers, path):
        spec = {"worker": cluster.spec["worker"], "ps": cluster.spec["ps"][:servers]}
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(spec), task_type="chief", task_id=0, rpc_layer="grpc"
        )
        with coordinator.ParameterServerStrategy(resolver) as strategy:
            table = make_table(strategy, 4000, keras.optimizers.Adam(0.1), admission=MinCount(2), eviction=OlderThan(2))
            checkpoint = tf.train.Checkpoint(table=table)
            for former, content in contents.items():
                checkpoint.read(former).assert_consumed()
                assert content_of(table) == content, (servers, former)
            # It is trained further, and saved again.
            trainer = Trainer(strategy, table)
            for _ in range(2):
                trainer.train(np.arange(200 * servers, 200 * servers + 500) * 11)
            table.evict()
            checkpoint.write(path)
            contents[path] = content_of(table)
            assert table.size() >= 500

    with LocalCluster(workers=1, ps=4) as cluster:
        for number, servers in enumerate((1, 4, 3, 2, 1)):
            restore(servers, f"saved_{number}")
"""


def test_tables_are_restored_on_any_number_of_servers(run_program: ProgramRunner) -> None:
    run_program(RESHARDING, timeout=300)


WORKER_DIES = """
    import threading

    import numpy as np
    import tensorflow as tf

    import coordinator
    from coordinator.embeddings import Uniform
    from coordinator.testing import LocalCluster
    from tests.embeddings.tables import DIM, make_step, make_table

    STEPS, DEATHS, BATCH = 1000, 2, 200
    batches = [np.random.default_rng(seed).integers(0, 20_000, BATCH) for seed in range(STEPS)]
    with LocalCluster(workers=3, ps=2) as cluster, coordinator.ParameterServerStrategy(cluster.resolver) as strategy:
        table = make_table(strategy, 40_000)
        step, finished = make_step(table), threading.Semaphore(0)
        for batch in batches:
            strategy.schedule(step, args=(batch, np.float32(2.0))).add_done_callback(lambda _: finished.release())
        for death in range(DEATHS):
            for _ in range(STEPS // (DEATHS + 2)):
                finished.acquire()
            cluster.kill("worker", death)
            assert not strategy.done()
            cluster.restart("worker", death)
        strategy.join(300)
        expected, counts = np.unique(np.concatenate(batches), return_counts=True)
        parts = [shard.read_rows(0, shard.capacity) for shard in table.shards]
        keys, rows = (np.concatenate([part[number] for part in parts]) for number in (0, 1))
        order = np.argsort(keys)
        assert keys[order].tolist() == expected.tolist()
        added = np.round(Uniform()(tf.constant(keys[order]), DIM).numpy() - rows[order]).astype(int)
        assert (added == added[:, :1]).all()
        # A step whose worker died may run twice, in part or as a whole; nothing is lost.
        assert (added[:, 0] >= counts).all()
        again = (added[:, 0] - counts).sum()
        assert again <= BATCH * strategy.cluster.statistics().retried, (again, strategy.cluster.statistics())
"""


def test_a_table_is_whole_after_workers_died(run_program: ProgramRunner) -> None:
    run_program(WORKER_DIES, timeout=380)


SERVER_DIES = """
    import keras
    import numpy as np
    import pytest
    import tensorflow as tf

    import coordinator
    from coordinator.embeddings import Constant, Embedding, MinCount, export, export_delta
    from coordinator.testing import LocalCluster
    from tests.embeddings.tables import DIM, Trainer, make_table, wait_recovered
    from tests.embeddings.test_table_checkpoint import content_of

    KEYS, recovered = np.arange(20), []
    with LocalCluster(workers=1, ps=2) as cluster, coordinator.ParameterServerStrategy(cluster.resolver) as strategy:
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
"""


def test_a_lost_server_gets_back_what_was_saved_of_tables(run_program: ProgramRunner) -> None:
    run_program(SERVER_DIES, timeout=250)
