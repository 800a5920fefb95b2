"""Tests of tables on other numbers of parameter servers, and of tables whose server is lost."""

import pytest

pytestmark = [pytest.mark.cluster, pytest.mark.long]

RESHARDING = """
    import pickle
    import sys

    import keras
    import numpy as np
    import tensorflow as tf

    import coordinator
    from coordinator.embeddings import MinCount, OlderThan
    from coordinator.testing import LocalCluster
    from tests.embeddings.tables import Trainer, make_table
    from tests.embeddings.test_table_checkpoint import content_of

    def restore(cluster, servers, former, path):
        spec = {"worker": cluster.spec["worker"], "ps": cluster.spec["ps"][:servers]}
        resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(
            tf.train.ClusterSpec(spec), task_type="chief", task_id=0, rpc_layer="grpc"
        )
        partitioner = tf.distribute.experimental.partitioners.FixedShardsPartitioner(servers)
        with coordinator.ParameterServerStrategy(resolver, partitioner) as strategy:
            table = make_table(strategy, 4000, keras.optimizers.Adam(0.1), admission=MinCount(2), eviction=OlderThan(2))
            with strategy.scope():
                variable, optimizer = keras.Variable(np.zeros([10, 2])), keras.optimizers.Adam(0.1)
                optimizer.build([variable])
            if servers > 1:
                for each in (variable, *optimizer.variables[2:]):
                    assert len({part.device for part in each.value.variables}) == servers
            checkpoint = tf.train.Checkpoint(table=table, variable=variable, optimizer=optimizer)

            def content():
                return content_of(table), [each.numpy().tolist() for each in (variable, *optimizer.variables)]

            for each in former:
                checkpoint.read(each).assert_consumed()
                with open(each + ".pickle", "rb") as file:
                    assert content() == pickle.load(file)
            print(table.size())
            if not path:
                return
            # It is trained further, and saved again.
            trainer = Trainer(strategy, table)
            for _ in range(2):
                trainer.train(np.arange(200 * servers, 200 * servers + 500) * 11)
                gradient = tf.random.stateless_normal([10, 2], [servers, 0])
                strategy.schedule(tf.function(lambda: optimizer.apply([gradient], [variable]))).result(120)
            table.evict()
            checkpoint.write(path)
            with open(path + ".pickle", "wb") as file:
                pickle.dump(content(), file)

    former = []
    with LocalCluster(workers=1, ps=4) as cluster:
        for servers in (1, 4, 3, 2):
            path = None if sys.argv[1:] else f"saved_{servers}"
            restore(cluster, servers, sys.argv[1:] or former, path)
            former = [path]
"""


@pytest.mark.timeout(1000)
def test_tables_and_sharded_variables_are_restored_on_any_number_of_servers(run_program):
    first = run_program(RESHARDING, timeout=300).stdout.split()
    assert first[0] == "0"
    assert all(int(size) > 0 for size in first[1:])
    # What another process has saved, on each number of servers, is restored on each number of them.
    run_program(RESHARDING, *[f"saved_{servers}" for servers in range(1, 5)], timeout=300)


LOSING = """
    import numpy as np
    import tensorflow as tf

    import coordinator
    from coordinator.embeddings import MinCount
    from coordinator.testing import LocalCluster
    from tests.embeddings.tables import Trainer, make_table
    from tests.embeddings.test_table_checkpoint import content_of

    recovered = []
    with LocalCluster(workers=1, ps=2) as cluster, coordinator.ParameterServerStrategy(cluster.resolver) as strategy:
        table, other = make_table(strategy, admission=MinCount(2)), make_table(strategy)
        trainer, beside = Trainer(strategy, table), Trainer(strategy, other)
        for keys in ([1, 2, 3], [1, 2, 3], range(2, 90), range(60, 100)):
            trainer.train(list(keys))
            beside.train(list(keys))
        manager = tf.train.CheckpointManager(tf.train.Checkpoint(table=table), "saved", max_to_keep=2)
        strategy.restore_from(manager, on_rollback=recovered.append)
        manager.save()
        saved = content_of(table)
        assert saved[0] and saved[1]
        trainer.train(list(range(90)))
        for index in (0, 1):
            cluster.kill("ps", index)
            cluster.restart("ps", index)
            try:
                strategy.schedule(tf.function(lambda: 0)).result(120)
                strategy.join(120)
            except coordinator.ParameterServerLost:
                pass
            while len(recovered) <= index:
                strategy.join(1)
            assert content_of(table) == saved
            # No checkpoint has the other one.
            assert other.size() == 0
            rows = trainer.train(list(range(2, 90)))
            assert beside.train([5]).shape == (1, 4)
            assert table.statistics().steps == saved[2].steps + 1
        print("recovered")
"""


def test_rows_and_index_of_a_lost_server_come_back(run_program):
    assert run_program(LOSING, timeout=250).stdout.split() == ["recovered"]


EMPTIED = """
    import keras
    import tensorflow as tf

    import coordinator
    from coordinator.embeddings import Embedding, export, export_delta
    from coordinator.testing import LocalCluster
    from tests.embeddings.tables import Trainer, make_table, wait_recovered

    def refused(function, *arguments):
        try:
            function(*arguments)
        except ValueError as error:
            return str(error)

    recovered = []
    with LocalCluster(workers=1, ps=2) as cluster, coordinator.ParameterServerStrategy(cluster.resolver) as strategy:
        table = make_table(strategy)
        with strategy.scope():
            number = tf.Variable(1)
            model = keras.Sequential([keras.Input((1,), dtype="int64"), Embedding(table)])
        trainer, apart = Trainer(strategy, table), tf.train.Checkpoint(table=table)
        manager = tf.train.CheckpointManager(tf.train.Checkpoint(number=number), "saved", max_to_keep=2)
        strategy.restore_from(manager, on_rollback=recovered.append)
        manager.save()
        trainer.train([1, 2, 3])
        apart.write("full")
        trainer.train([1, 2])
        table.save_delta("delta")
        apart.read("full").assert_consumed()
        export(model, "1")
        cluster.kill("ps", 1)
        cluster.restart("ps", 1)
        wait_recovered(strategy, recovered)
        assert table.size() == 0
        # As many as before.
        for _ in range(2):
            trainer.train([4])
        print(refused(table.save_delta, "next"))
        print(refused(table.restore_delta, "delta"))
        print(refused(export_delta, model, "2", "1"))
        apart.write("full2")
        table.save_delta("delta2")
        export(model, "3")
        export_delta(model, "4", "3")
"""


def test_what_a_recovery_has_emptied_has_no_delta(run_program):
    delta, restored, exported = run_program(EMPTIED, timeout=250).stdout.splitlines()
    assert "has no delta: save it first" in delta
    assert "it is not the delta that was saved next" in restored
    assert "is no base for a delta of the table 'words' as it is now" in exported


ACCUMULATING = """
    import keras
    import numpy as np
    import tensorflow as tf

    import coordinator
    from coordinator.embeddings import Constant, Embedding
    from coordinator.testing import LocalCluster
    from tests.embeddings.tables import DIM, make_table, wait_recovered

    KEYS = np.arange(20)

    def train(steps):
        for _ in range(steps):
            strategy.schedule(step).result(120)

    recovered = []
    with LocalCluster(workers=1, ps=2) as cluster, coordinator.ParameterServerStrategy(cluster.resolver) as strategy:
        saved, apart = (make_table(strategy, initializer=Constant(0.0)) for _ in range(2))
        with strategy.scope():
            number = tf.Variable(0.0)
            variables = [number, Embedding(saved).rows, Embedding(apart).rows]
            optimizer = keras.optimizers.SGD(1.0, gradient_accumulation_steps=4)
            optimizer.build(variables)

        @tf.function
        def step():
            with tf.GradientTape() as tape:
                rows = [tf.reduce_sum(table.lookup(KEYS, training=True)) for table in (saved, apart)]
                loss = tf.add_n([number, *rows])
            optimizer.apply(tape.gradient(loss, [number, saved.variable, apart.variable]), variables)

        checkpoint = tf.train.Checkpoint(number=number, optimizer=optimizer, table=saved)
        manager = tf.train.CheckpointManager(checkpoint, "saved", max_to_keep=2)
        strategy.restore_from(manager, on_rollback=recovered.append)
        train(4)
        manager.save()
        train(2)
        cluster.kill("ps", 1)
        cluster.restart("ps", 1)
        wait_recovered(strategy, recovered)
        assert number.numpy() == -1
        # The same steps again.
        train(4)
        assert number.numpy() == -2
        np.testing.assert_allclose(saved.lookup(KEYS), np.full([20, DIM], -1.0))
        np.testing.assert_allclose(apart.lookup(KEYS), np.full([20, DIM], -0.5))
        print("consistent")
"""


def test_a_recovery_undoes_gradients_that_wait_for_an_update(run_program):
    assert run_program(ACCUMULATING, timeout=250).stdout.split() == ["consistent"]
