"""A plain training loop without any `try`, whose parameter servers are lost in one way after another.

It prints one JSON object: for each case of `CASES`, what the loop and its callback saw.
"""

import json
import pathlib
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import coordinator
from coordinator.testing import LocalCluster
from tests.deadline import wait_until
from tests.ps_strategy.every_worker import unhealthy
from tests.ps_strategy.tensorflow_internals.private_names import writing_replaced

TIMEOUT = 200.0
STEPS = 10


class Training:
    """A Keras model with Adam, a step counter in the checkpoint, and a loop without failure handling."""

    def __init__(self, strategy: coordinator.ParameterServerStrategy, folder: pathlib.Path) -> None:
        self.strategy = strategy
        self.traces = 0
        self.epochs = 0
        self.rollbacks: list[coordinator.Rollback] = []
        with strategy.scope():
            self.model = model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(8), keras.layers.Dense(1)])
            self.optimizer = optimizer = keras.optimizers.Adam(0.01)
            optimizer.build(model.trainable_variables)
            self.step_count = step_count = tf.Variable(0, dtype=tf.int64)
        data = tf.data.Dataset.from_tensors(np.ones((4, 3), np.float32)).repeat()
        self._iterator = iter(strategy.experimental_distribute_dataset(data))
        checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, step=step_count)
        self.manager = tf.train.CheckpointManager(checkpoint, str(folder), max_to_keep=2)

        @tf.function
        def step(iterator: tf.data.Iterator) -> tf.Tensor:
            self.traces += 1
            x = next(iterator)
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(tf.square(model(x) - 1.0))
            optimizer.apply_gradients(
                zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
            )
            step_count.assign_add(1)
            return loss

        self._step = step
        strategy.restore_from(self.manager, step=step_count, on_rollback=self.rollbacks.append)

    def run(self, stop: threading.Event) -> None:
        """Trains epoch after epoch, as in a user's program."""
        while not stop.is_set():
            for _ in range(STEPS):
                self.strategy.schedule(self._step, args=(self._iterator,))
            self.strategy.join(TIMEOUT)
            self.manager.save()
            self.epochs += 1


def one_server(cluster: LocalCluster, training: Training) -> None:
    cluster.kill("ps", 0)
    cluster.restart("ps", 0)


def both_servers(cluster: LocalCluster, training: Training) -> None:
    cluster.kill("ps", 0)
    cluster.kill("ps", 1)
    cluster.restart("ps", 1)
    cluster.restart("ps", 0)


def one_server_and_a_worker(cluster: LocalCluster, training: Training) -> None:
    cluster.kill("worker", 0)
    cluster.kill("ps", 1)
    cluster.restart("ps", 1)
    cluster.restart("worker", 0)


def one_server_while_a_checkpoint_is_saved(cluster: LocalCluster, training: Training) -> None:
    """Kills the server within the save, when the checkpoint is about to be written."""
    is_dead = threading.Event()

    def die(write: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not is_dead.is_set():
            cluster.kill("ps", 0)
            is_dead.set()
        return write(*args, **kwargs)

    with writing_replaced(training.manager.checkpoint, die):
        assert is_dead.wait(TIMEOUT)
    cluster.restart("ps", 0)


def one_server_again_while_it_is_recovered(cluster: LocalCluster, training: Training) -> None:
    cluster.kill("ps", 0)
    cluster.restart("ps", 0)
    cluster.restart("ps", 0)
    cluster.restart("ps", 1)


CASES: dict[str, Callable[[LocalCluster, Training], None]] = {
    "one": one_server,
    "both": both_servers,
    "one and a worker": one_server_and_a_worker,
    "one during a save": one_server_while_a_checkpoint_is_saved,
    "one again during its recovery": one_server_again_while_it_is_recovered,
}


def frozen_server_while_a_worker_dies(cluster: LocalCluster, training: Training) -> dict[str, Any]:
    """Its variables are still there when it thaws, and nothing is rolled back."""
    # A server that freezes while a worker is being connected does lose its variables.
    wait_until(lambda: not unhealthy(training.strategy))
    count, epochs = len(training.rollbacks), training.epochs
    cluster.freeze("ps", 0)
    cluster.kill("worker", 1)
    wait_until(lambda: training.strategy.cluster.workers[1].state.value == "lost")
    wait_until(lambda: not training.strategy.parameter_servers[0].healthy())
    cluster.restart("worker", 1, wait=False)
    cluster.thaw("ps", 0)
    cluster.wait_ready("worker", 1)
    wait_until(lambda: training.epochs >= epochs + 2)
    wait_until(lambda: not unhealthy(training.strategy))
    return {"rollbacks": len(training.rollbacks) - count}


def observe(case: Callable[[LocalCluster, Training], None], cluster: LocalCluster, training: Training) -> dict:
    epochs, count = training.epochs, len(training.rollbacks)
    wait_until(lambda: training.epochs >= epochs + 1)
    case(cluster, training)
    wait_until(lambda: len(training.rollbacks) > count)
    after = training.epochs
    wait_until(lambda: training.epochs >= after + 2)
    return {
        "servers": sorted({name for each in training.rollbacks[count:] for name in each.parameter_servers}),
        "checkpoints": [each.checkpoint is not None for each in training.rollbacks[count:]],
        "steps lost": [each.steps_lost for each in training.rollbacks[count:]],
    }


def main() -> None:
    options = coordinator.Options(heartbeat_interval=0.2, heartbeat_timeout=2.0, parameter_server_timeout=TIMEOUT)
    with (
        tempfile.TemporaryDirectory() as folder,
        LocalCluster(workers=2, ps=2) as cluster,
        coordinator.ParameterServerStrategy(cluster.resolver, options=options) as strategy,
    ):
        training = Training(strategy, pathlib.Path(folder))
        stop, errors = threading.Event(), []

        def train() -> None:
            try:
                training.run(stop)
            except BaseException as error:
                errors.append(repr(error))
                raise

        loop = threading.Thread(target=train)
        loop.start()
        try:
            seen: dict[str, Any] = {name: observe(case, cluster, training) for name, case in CASES.items()}
            retried = strategy.cluster.statistics().retried
            seen["frozen"] = frozen_server_while_a_worker_dies(cluster, training)
        finally:
            stop.set()
            loop.join()
        seen["errors"] = errors
        seen["traces"] = training.traces
        steps = int(training.step_count.numpy())
        seen["steps"], seen["iterations"] = steps, int(training.optimizer.iterations)
        seen["retried since the last restoration"] = strategy.cluster.statistics().retried - retried
    print(json.dumps(seen))  # noqa: T201 - its answer


if __name__ == "__main__":
    main()
