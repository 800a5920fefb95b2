"""A parameter server dies while `fit` runs."""

import pytest

from tests.program_runner import ProgramRunner

PROGRAM = """
    import threading

    import keras
    import numpy as np
    import pytest
    import tensorflow as tf

    import coordinator
    from coordinator.testing import LocalCluster

    x = np.random.default_rng(0).normal(size=(400, 4)).astype("float32")
    y = (x[:, :1] > 0).astype("float32")


    class Loss(keras.callbacks.Callback):
        restarting = None

        def on_train_batch_end(self, batch, logs=None):
            if batch == 40 and self.restarting is None:
                cluster.kill("ps", 1)
                self.restarting = threading.Thread(target=cluster.restart, args=("ps", 1))
                if self.returns:
                    self.restarting.start()


    with LocalCluster(workers=2, ps=2) as cluster:
        for returns in (True, False):
            strategy = coordinator.ParameterServerStrategy(cluster.resolver)
            with strategy.scope():
                layers = [keras.layers.Dense(8, "relu"), keras.layers.Dense(1, "sigmoid")]
                model = keras.Sequential([keras.Input((4,)), *layers])
                model.compile(keras.optimizers.Adam(0.02), "binary_crossentropy", metrics=["accuracy"])
            loss = Loss()
            loss.returns = returns
            if not returns:
                with pytest.raises(coordinator.ParameterServerLost) as raised:
                    model.fit(x, y, batch_size=5, epochs=3, callbacks=[loss], verbose=0)
                assert raised.value.task == "/job:ps/task:1"
                continue
            before = model.fit(x, y, batch_size=5, epochs=1, verbose=0).history["loss"]
            checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
            manager = tf.train.CheckpointManager(checkpoint, "checkpoints", max_to_keep=2)
            manager.save()
            strategy.restore_from(manager, model.optimizer.iterations.value)
            history = model.fit(x, y, batch_size=5, epochs=3, callbacks=[loss], verbose=0).history
            loss.restarting.join()
            # What was done between the checkpoint and the loss was rolled back.
            assert len(history["loss"]) == 3 and history["loss"][-1] < before[0]
            strategy.close()
        strategy.close()
"""


@pytest.mark.cluster
@pytest.mark.timeout(300)
@pytest.mark.release
def test_fit_continues_after_a_recovery_and_otherwise_names_the_lost_server(run_program: ProgramRunner) -> None:
    run_program(PROGRAM, timeout=280)
