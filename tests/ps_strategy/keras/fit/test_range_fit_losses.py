"""Servers and the client die while `fit` trains on arrays, sources and epochs; visits are counted on two servers."""

import os

import pytest

from tests.program_runner import ProgramRunner

pytestmark = [pytest.mark.long, pytest.mark.cluster, pytest.mark.timeout(600)]

TRAINING = """
    import os
    import tempfile
    import threading

    import keras
    import numpy as np
    import pytest
    import tensorflow as tf

    import coordinator
    from coordinator.data import Epochs, arrays, client
    from coordinator.testing import LocalCluster
    from tests.ps_strategy.keras.fit.test_fit_data import CountedModel

    SIZE = 3000
    x = np.stack([np.arange(SIZE), np.ones(SIZE)], axis=1).astype("float32")
    y = np.arange(SIZE, dtype="float32")[:, None]


    class Twice(CountedModel):
        # The second count is on the other server.
        def __init__(self):
            super().__init__(SIZE)
            self.dense = keras.layers.Dense(1, kernel_initializer="zeros")
            self.others = tf.Variable(tf.zeros([SIZE]), trainable=False)
            self.in_weights = self.add_weight(shape=(SIZE,), initializer="zeros", trainable=False, name="counts")

        def train_step(self, data):
            seen = tf.reduce_sum(tf.one_hot(tf.cast(data[0][:, 0], tf.int32), SIZE), axis=0)
            self.others.assign_add(seen)
            self.in_weights.assign_add(seen)
            return super().train_step(data)

        def counts(self):
            assert self.visits.device != self.others.device
            return np.array([self.visits, self.others])


    def compiled(strategy):
        with strategy.scope():
            model = Twice()
            # It always predicts 0, so that the mean absolute error is the mean number of the examples.
            model.compile(keras.optimizers.SGD(0.0), "mae")
        return model


    class At(keras.callbacks.Callback):
        def __init__(self, actions):
            super().__init__()
            self.actions, self.epoch = dict(actions), 0

        def on_epoch_begin(self, epoch, logs=None):
            self.epoch = epoch

        def on_train_batch_end(self, batch, logs=None):
            if action := self.actions.pop((self.epoch, batch), None):
                action()


    def in_background(function, *args):
        thread = threading.Thread(target=function, args=args)
        thread.start()
"""

SERVERS_DIE = """
    class Pairs:
        def __len__(self):
            return SIZE

        def __getitem__(self, index):
            return x[index], y[index]


    def lose_server():
        # At once: in the background it might live until all steps are done.
        cluster.kill("ps", 1)
        in_background(cluster.restart, "ps", 1)

    with LocalCluster(workers=2, ps=2) as cluster:
        strategy = coordinator.ParameterServerStrategy(cluster.resolver)
        for data in (arrays(x, y), client(Pairs())):
            model = compiled(strategy)
            actions = At({at: lambda: in_background(cluster.restart, "worker", 1) for at in ((0, 40), (1, 60))})
            retried = strategy.cluster.statistics().retried
            model.fit(data, batch_size=20, epochs=2, callbacks=[actions], verbose=0)
            assert not actions.actions
            # A call that was lost runs again: of a lost worker at most four, of one step each.
            repeats = strategy.cluster.statistics().retried - retried
            assert repeats <= 8
            assert 300 <= int(model.optimizer.iterations) <= 300 + repeats
            assert (model.counts() >= 2).all()
            assert (model.counts().sum(axis=1) <= 20 * (300 + repeats)).all()
        strategy.close()

        for data, saves, kill in (
            ({"x": x, "y": y, "batch_size": 20, "epochs": 2}, [(0, 30), (1, 40)], (1, 120)),
            ({"x": Epochs(arrays(x, y), 20, 2, shuffle=3)}, [(0, 30)], (1, 20)),
        ):
            strategy = coordinator.ParameterServerStrategy(cluster.resolver)
            model = compiled(strategy)
            checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
            manager = tf.train.CheckpointManager(checkpoint, tempfile.mkdtemp(), max_to_keep=2)
            rollbacks = []
            strategy.restore_from(manager, on_rollback=rollbacks.append)
            actions = At({**{at: manager.save for at in saves}, kill: lose_server})
            history = model.fit(**data, callbacks=[actions], verbose=0).history
            assert len(rollbacks) == 1, rollbacks
            assert (model.counts() == 2).all(), (saves, model.counts(), rollbacks)
            assert int(model.optimizer.iterations) == 300
            # The metrics go back, too, if the checkpoint is of the same epoch.
            if len(saves) == 2:
                np.testing.assert_allclose(history["loss"], np.full(2, (SIZE - 1) / 2), rtol=1e-5)
            strategy.close()

        # Without a checkpoint, `fit` names the lost server.
        strategy = coordinator.ParameterServerStrategy(cluster.resolver)
        model = compiled(strategy)
        with pytest.raises(coordinator.ParameterServerLost) as raised:
            model.fit(x, y, batch_size=20, callbacks=[At({(0, 50): lambda: cluster.kill("ps", 1)})], verbose=0)
        assert raised.value.task == "/job:ps/task:1"
        strategy.close()
"""


def test_every_example_counts_once_in_each_epoch_when_servers_die(run_program: ProgramRunner) -> None:
    run_program(TRAINING + SERVERS_DIE, timeout=500)


def test_a_program_that_dies_goes_on_with_its_backup_inside_an_epoch(run_program: ProgramRunner, tmp_path) -> None:
    folder = os.fspath(tmp_path / "backup")
    # Other numbers of servers the second time, which comes to the end.
    for workers, servers, die in ((2, 1, (1, 33)), (1, 2, None)):
        run_program(
            TRAINING
            + f"""
    with LocalCluster(workers={workers}, ps={servers}) as cluster:
        strategy = coordinator.ParameterServerStrategy(cluster.resolver)
        model = compiled(strategy)
        with strategy.scope():
            model(x[:1])
        backup = keras.callbacks.BackupAndRestore({folder!r}, save_freq=25)
        at = At({{{die}: lambda: os._exit(9)}})
        history = model.fit(x, y, batch_size=20, epochs=2, callbacks=[backup, at], verbose=0)
        assert history.epoch == [1], history.epoch
        assert (model.in_weights.numpy() == 2).all(), model.in_weights.numpy()
        assert int(model.optimizer.iterations) == 300
        strategy.close()
    """,
            exit_code=0 if die is None else 9,
            timeout=200,
        )
