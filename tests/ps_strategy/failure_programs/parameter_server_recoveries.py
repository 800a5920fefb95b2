"""A plain training loop without any `try`, whose parameter servers are lost or moved in one way after another.

After each recovery, before training goes on, all is compared with the restored checkpoint as the client reads it.
It ends with code 0 if every case passes.
"""

import contextlib
import os
import pathlib
import queue
import tempfile
import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import coordinator
from coordinator.launch.server_process import LocalServers, free_addresses
from coordinator.testing import LocalCluster
from tests.deadline import LIMIT, wait_until
from tests.ps_strategy.every_worker import unhealthy
from tests.ps_strategy.tensorflow_internals.private_names import writing_replaced

TIMEOUT = 200.0
STEPS = 10
X = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)


class Model(tf.Module):
    """A Keras model, plain variables, one that is saved in blocks and a table, and a step that trains all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
        self.optimizer = keras.optimizers.Adam(0.01)
        self.optimizer.build(self.model.trainable_variables)
        self.step = tf.Variable(0, dtype=tf.int64)
        self.texts = tf.Variable(["", ""])
        self.large = tf.Variable(tf.zeros([20_000, 16]))
        self.seen = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, default_value=-1)
        self.traces = 0
        self.evaluate = tf.function(self._evaluate)

    def train(self, x: Any) -> None:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(self.model(x) ** 2)
        gradients = tape.gradient(loss, self.model.trainable_variables)
        self.optimizer.apply_gradients(zip(gradients, self.model.trainable_variables, strict=True))
        step = self.step.assign_add(1)
        self.texts.assign(tf.fill([2], tf.strings.as_string(step)))
        self.seen.insert([step], [step])
        self.large.assign_add(tf.ones_like(self.large))

    def _evaluate(self) -> Any:
        self.traces += 1
        return tf.function(lambda: self.model(X))()

    def content(self) -> list[Any]:
        """Returns the values of all variables and of the table, and what functions on the client compute of them."""
        variables = [*self.model.variables, *self.optimizer.variables, self.step, self.texts, self.large]
        values = [variable.numpy() for variable in variables]
        return [*values, np.sort(self.seen.export()[0]), self.evaluate().numpy()]


class Program:
    """The loop, and what a recovery has to restore."""

    def __init__(self, strategy: coordinator.ParameterServerStrategy, folder: pathlib.Path) -> None:
        self.strategy = strategy
        self.traces = self.epochs = 0
        self.between: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self.rollbacks: list[coordinator.Rollback] = []
        self.problems: list[str] = []
        # On the client.
        self._twin = Model()
        with strategy.scope():
            self.model = Model()
            # No checkpoint holds these, on both parameter servers.
            self._counts = [tf.Variable(5), tf.Variable(lambda: 6)]
            self._crossed = [tf.Variable(16.0), tf.Variable(4.0)]
            self._words = [
                tf.lookup.experimental.DenseHashTable(tf.string, tf.int64, -1, empty_key="", deleted_key="-")
                for _ in range(2)
            ]
        for table in self._words:
            table.insert(tf.constant(["first"]), tf.constant([1], tf.int64))
        self._initial = self.model.content()
        self._iterator = iter(strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensors(X).repeat()))
        self._step = tf.function(self._train)
        self.manager = tf.train.CheckpointManager(tf.train.Checkpoint(model=self.model), str(folder), max_to_keep=3)
        strategy.restore_from(self.manager, step=self.model.step, on_rollback=self._compare)

    def _train(self, iterator: Any) -> None:
        self.traces += 1
        self.model.train(next(iterator))
        for count, table in zip(self._counts, self._words, strict=True):
            count.assign_add(1)
            table.insert(["later"], [tf.cast(count, tf.int64)])

    def _compare(self, rollback: coordinator.Rollback) -> None:
        expected = self._initial
        if rollback.checkpoint is not None:
            tf.train.Checkpoint(model=self._twin).read(rollback.checkpoint).assert_existing_objects_matched()
            expected = self._twin.content()
        self.problems += [
            f"{now}, not {saved}"
            for saved, now in zip(expected, self.model.content(), strict=True)
            if not np.array_equal(saved, now)
        ]
        initial = [int(count.numpy()) for count in self._counts]
        initial += [float(value) for value in self._crossed]
        initial += [table.lookup(tf.constant(["first", "later"])).numpy().tolist() for table in self._words]
        if initial != [5, 6, 16, 4, [1, -1], [1, -1]]:
            self.problems.append(f"not initial: {initial}")
        if rollback.step_after != self.model.step.numpy() or not 0 <= rollback.steps_lost <= 3 * STEPS:
            self.problems.append(str(rollback))
        self.rollbacks.append(rollback)

    def epoch(self) -> None:
        for _ in range(STEPS):
            self.strategy.schedule(self._step, args=(self._iterator,))
        self.strategy.join(TIMEOUT)

    def move(self, address: str) -> None:
        """Moves the second parameter server, and checks that both reach each other."""
        count = len(self.rollbacks)
        self.strategy.cluster.move_parameter_server(1, address)
        wait_until(lambda: len(self.rollbacks) == count + 1, TIMEOUT)
        crossing = tf.function(lambda: [crossed(*self._crossed), crossed(*reversed(self._crossed))])
        there, back = self.strategy.schedule(crossing).result(TIMEOUT)
        assert (there, back) == (5.0, np.sqrt(np.float32(5)) + 1)

    def run(self, stop: threading.Event) -> None:
        """Trains epoch after epoch, as in a user's program."""
        try:
            while not stop.is_set():
                self.epoch()
                self.manager.save()
                while not self.between.empty():
                    self.between.get()()
                self.epochs += 1
        except BaseException as error:
            self.problems.append(repr(error))
            raise


def crossed(source: tf.Variable, target: tf.Variable) -> tf.Tensor:
    """Takes a value from the server of a variable to that of another one."""
    with tf.device(source.device):
        value = tf.sqrt(source.read_value())
    with tf.device(target.device):
        return target.assign(value + 1.0)


def both_servers_and_the_newest_checkpoint_is_damaged(cluster: LocalCluster, program: Program) -> None:
    def lose_and_damage() -> None:
        for index in (0, 1):
            cluster.kill("ps", index)
        newest = pathlib.Path(program.manager.latest_checkpoint)
        for part in newest.parent.glob(f"{newest.name}.data*"):
            part.write_bytes(part.read_bytes()[:10])
        for index in (1, 0):
            cluster.restart("ps", index)

    program.between.put(lose_and_damage)


def one_server_and_a_worker(cluster: LocalCluster, program: Program) -> None:
    cluster.kill("worker", 0)
    cluster.kill("ps", 1)
    cluster.restart("ps", 1)
    cluster.restart("worker", 0)


def one_server_while_a_checkpoint_is_saved(cluster: LocalCluster, program: Program) -> None:
    """Kills the server when the first blocks of the checkpoint have been written."""
    folder, begun = pathlib.Path(program.manager.directory), threading.Event()
    before: set[pathlib.Path] = set()

    def note(write: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not begun.is_set():
            before.update(folder.iterdir())
            begun.set()
        return write(*args, **kwargs)

    with writing_replaced(program.manager.checkpoint, note):
        assert begun.wait(TIMEOUT)
        wait_until(lambda: set(folder.iterdir()) - before)
        cluster.restart("ps", 0)


def another_server_while_one_is_recovered(cluster: LocalCluster, program: Program) -> None:
    restore, is_dead = program.manager.checkpoint.restore, threading.Event()

    def die(path: str) -> Any:
        if not is_dead.is_set():
            cluster.kill("ps", 1)
            is_dead.set()
        return restore(path)

    program.manager.checkpoint.restore = die
    cluster.restart("ps", 0)
    assert is_dead.wait(TIMEOUT)
    cluster.restart("ps", 1)


ONE, OTHER = "/job:ps/task:0", "/job:ps/task:1"
CASES = {
    both_servers_and_the_newest_checkpoint_is_damaged: {ONE, OTHER},
    one_server_and_a_worker: {OTHER},
    one_server_while_a_checkpoint_is_saved: {ONE},
    another_server_while_one_is_recovered: {ONE, OTHER},
}


def frozen_server_while_a_worker_dies(cluster: LocalCluster, program: Program) -> None:
    """Its variables are still there when it thaws, and nothing is rolled back."""
    # A server that freezes while a worker is being connected does lose its variables.
    wait_until(lambda: not unhealthy(program.strategy))
    count, epochs = len(program.rollbacks), program.epochs
    cluster.freeze("ps", 0)
    cluster.kill("worker", 1)
    wait_until(lambda: program.strategy.cluster.workers[1].state.value == "lost")
    wait_until(lambda: not program.strategy.parameter_servers[0].healthy())
    cluster.restart("worker", 1, wait=False)
    cluster.thaw("ps", 0)
    cluster.wait_ready("worker", 1)
    wait_until(lambda: program.epochs >= epochs + 2)
    wait_until(lambda: not unhealthy(program.strategy))
    assert len(program.rollbacks) == count


def a_dead_server_moves_and_a_living_one_moves_back(cluster: LocalCluster, program: Program) -> None:
    first, former = cluster.spec["ps"]
    [address] = free_addresses(1, besides=[*cluster.spec["ps"], *cluster.spec["worker"]])
    folder = pathlib.Path(program.manager.directory).parent
    with contextlib.closing(LocalServers({**cluster.spec, "ps": [first, address]}, folder, os.environ)) as elsewhere:
        elsewhere["ps", 1].start()
        elsewhere["ps", 1].wait_ready(LIMIT)
        cluster.kill("ps", 1)
        program.move(address)
        cluster.restart("ps", 1)
        program.move(former)


def run_cases(cluster: LocalCluster, program: Program) -> None:
    for case, lost in CASES.items():
        epochs, count = program.epochs, len(program.rollbacks)
        wait_until(lambda least=epochs + 2: program.epochs >= least)
        case(cluster, program)
        wait_until(lambda least=count: len(program.rollbacks) > least, TIMEOUT)
        after = program.epochs
        wait_until(lambda least=after + 2: program.epochs >= least)
        assert {name for each in program.rollbacks[count:] for name in each.parameter_servers} == lost, case
        assert all(each.checkpoint for each in program.rollbacks[count:]), case
    frozen_server_while_a_worker_dies(cluster, program)
    a_dead_server_moves_and_a_living_one_moves_back(cluster, program)


def main(cluster: LocalCluster, strategy: coordinator.ParameterServerStrategy, folder: pathlib.Path) -> None:
    program, stop = Program(strategy, folder), threading.Event()
    # Before there is a checkpoint.
    program.epoch()
    cluster.restart("ps", 1)
    program.epoch()
    [rollback] = program.rollbacks
    assert (rollback.checkpoint, rollback.step_before, rollback.step_after) == (None, STEPS, 0)

    loop = threading.Thread(target=program.run, args=(stop,))
    loop.start()
    try:
        run_cases(cluster, program)
    finally:
        stop.set()
        loop.join()
    assert program.problems == []
    assert program.traces == program.model.traces == 1
    assert not [each for each in folder.iterdir() if "temp" in each.name]
    # A thread may end a moment after its call has returned a result.
    wait_until(lambda: not [each for each in threading.enumerate() if each.name.startswith("coordinator-save")])


if __name__ == "__main__":
    options = coordinator.Options(
        heartbeat_interval=0.2, heartbeat_timeout=2.0, parameter_server_timeout=TIMEOUT, checkpoint_memory=2**18
    )
    with (
        tempfile.TemporaryDirectory() as name,
        LocalCluster(workers=2, ps=2) as servers,
        coordinator.ParameterServerStrategy(servers.resolver, options=options) as training,
    ):
        main(servers, training, pathlib.Path(name, "saved"))
