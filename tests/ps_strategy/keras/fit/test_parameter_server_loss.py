"""A parameter server dies while `fit` runs."""

import pytest

from tests.program_runner import ProgramRunner

PROGRAM = """
    import threading

    import keras
    import numpy as np
    import tensorflow as tf

    import coordinator
    from coordinator.testing import LocalCluster

    x = np.random.default_rng(0).normal(size=(400, 4)).astype("float32")
    y = (x[:, :1] > 0).astype("float32")



    def compiled(strategy):
        dense = keras.layers.Dense
        with strategy.scope():
            model = keras.Sequential([keras.Input((4,)), dense(8, "relu"), dense(1, "sigmoid")])
            model.compile(keras.optimizers.Adam(0.02), "binary_crossentropy", metrics=["accuracy"])
        return model


    with LocalCluster(workers=2, ps=2) as cluster:
        strategy = coordinator.ParameterServerStrategy(cluster.resolver)
        model = compiled(strategy)

        class Loss(keras.callbacks.Callback):
            killed = False

            def on_train_batch_end(self, batch, logs=None):
                if batch == 40 and not self.killed:
                    self.killed = True
                    cluster.kill("ps", 1)
                    if self.returns:
                        self.thread = threading.Thread(target=cluster.restart, args=("ps", 1))
                        self.thread.start()

        model.fit(x, y, batch_size=5, epochs=1, verbose=0)
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        manager = tf.train.CheckpointManager(checkpoint, "checkpoints", max_to_keep=2)
        manager.save()
        strategy.restore_from(manager, model.optimizer.iterations.value)
        loss = Loss()
        loss.returns = True
        history = model.fit(x, y, batch_size=5, epochs=3, callbacks=[loss], verbose=0).history
        loss.thread.join()
        assert loss.killed and len(history["loss"]) == 3
        # What was done between the checkpoint and the loss was rolled back.
        print("iterations", int(model.optimizer.iterations), "loss", history["loss"][-1])
        assert 80 + 160 < int(model.optimizer.iterations) <= 80 + 240
        assert history["accuracy"][-1] > 0.9
        strategy.close()

        strategy = coordinator.ParameterServerStrategy(cluster.resolver)
        model = compiled(strategy)
        loss = Loss()
        loss.returns = False
        try:
            model.fit(x, y, batch_size=5, epochs=3, callbacks=[loss], verbose=0)
        except coordinator.ParameterServerLost as error:
            print("lost", error.task)
        strategy.close()
"""


@pytest.mark.cluster
@pytest.mark.timeout(300)
@pytest.mark.release
def test_fit_continues_after_a_recovery_and_otherwise_names_the_lost_server(
    run_program: ProgramRunner,
) -> None:
    printed = run_program(PROGRAM, timeout=280).stdout
    assert "iterations" in printed
    assert "lost /job:ps/task:1" in printed
