"""A client that recovers its parameter servers, in one case after another, with one strategy and one set of variables.

It calls the parts of the recovery itself, one attempt at a time. It prints one JSON object: the outcome of each case of
`CASES`.
"""

import contextlib
import dataclasses
import json
import logging
import pathlib
import tempfile
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
import tf_keras

import coordinator
from coordinator.errors import Rollback
from coordinator.ps_strategy.recovery.variable_recovery import VariableRecovery
from coordinator.testing import LocalCluster
from tests.deadline import wait_until
from tests.ps_strategy.every_worker import scheduler_of

TIMEOUT = 120.0
STEPS = 4
MANY = 100


class Program:
    """Models of both Keras versions, plain variables of every kind, and a step that trains all of them."""

    def __init__(self, strategy: coordinator.ParameterServerStrategy, cluster: LocalCluster, folder: pathlib.Path):
        self.strategy, self.cluster, self._folder = strategy, cluster, folder
        with strategy.scope():
            self.model = keras.Sequential([keras.Input((3,)), keras.layers.Dense(4), keras.layers.Dense(1)])
            self.optimizer = keras.optimizers.Adam(0.01)
            self.optimizer.build(self.model.trainable_variables)
            self.metric = keras.metrics.Mean()
            self.former_model = tf_keras.Sequential(
                [tf_keras.layers.Dense(2, input_shape=(3,)), tf_keras.layers.Dense(1)]
            )
            self.former_optimizer = tf_keras.optimizers.Adam(0.01)
            self.former_optimizer.build(self.former_model.trainable_variables)
            self.module = tf.Module(name="kinds")
            self.module.step = tf.Variable(0, dtype=tf.int64)
            self.module.words = tf.Variable(["", ""])
            self.module.flag = tf.Variable(False)
            with strategy.extended.colocate_vars_with(self.module.step):
                self.module.beside = tf.Variable(0.0)
            self.module.seen = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, default_value=-1)
            # No checkpoint holds these, on both parameter servers.
            self.counts = [tf.Variable(5), tf.Variable(lambda: 6)]
            self.words = [
                tf.lookup.experimental.DenseHashTable(tf.string, tf.int64, -1, empty_key="", deleted_key="-")
                for _ in range(2)
            ]
        for table in self.words:
            table.insert(tf.constant(["first"]), tf.constant([1], tf.int64))
        self.x = np.linspace(-1, 1, 12, dtype=np.float32).reshape(4, 3)
        self.traces: list[str] = []
        self.step = tf.function(self._step)
        self.evaluate = tf.function(self._evaluate)
        self.read = tf.function(lambda: [tf.identity(count) for count in self.counts])
        self.recovery = VariableRecovery(
            scheduler_of(strategy).servers,
            strategy.extended._variables,
            lambda: strategy.cluster.statistics().finished,
            lambda: self.recovery.missing() is None or self.bring_back() is not None,
            scheduler_of(strategy).quiet,
        )
        self.manager = self.new_manager("saved")

    def new_manager(self, name: str) -> tf.train.CheckpointManager:
        checkpoint = tf.train.Checkpoint(
            model=self.model,
            optimizer=self.optimizer,
            former_model=self.former_model,
            former_optimizer=self.former_optimizer,
            module=self.module,
        )
        return tf.train.CheckpointManager(checkpoint, str(self._folder / name), max_to_keep=3)

    def _step(self, x: tf.Tensor) -> None:
        self.traces.append("step")
        for model, optimizer in ((self.model, self.optimizer), (self.former_model, self.former_optimizer)):
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean(model(x) ** 2)
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables, strict=True))
        self.metric.update_state(loss)
        step = self.module.step.assign_add(1)
        self.module.words.assign(tf.fill([2], tf.strings.as_string(step)))
        self.module.flag.assign(step % 2 == 1)
        self.module.beside.assign_add(1.0)
        self.module.seen.insert([step], [step])
        for count in self.counts:
            count.assign_add(1)
        for table in self.words:
            table.insert(["later"], [step])

    def _evaluate(self, x: tf.Tensor) -> tf.Tensor:
        self.traces.append("evaluate")
        return tf.function(lambda y: self.model(y) + self.former_model(y))(x)

    def train(self, steps: int = STEPS) -> None:
        for _ in range(steps):
            # One after the other, so that no two workers update a counter of Keras at once.
            self.strategy.schedule(self.step, args=(self.x,)).result(TIMEOUT)

    def reach_servers(self) -> None:
        """Returns when every worker has reached all servers: a step that cannot is run twice, in part."""
        for worker in self.strategy.cluster.workers:
            self.strategy.schedule(self.read, worker=worker.index).result(TIMEOUT)

    def saved_values(self) -> list[Any]:
        """Returns the present values of the variables that are in the checkpoint."""
        former = self.former_optimizer.variables
        variables = [
            *self.model.variables,
            *self.optimizer.variables,
            *self.former_model.variables,
            *(former() if callable(former) else former),
            *self.module.variables,
        ]
        return [*(variable.numpy() for variable in variables), np.sort(self.module.seen.export()[0])]

    def outputs(self) -> list[Any]:
        """Returns the results of functions that are called on the client."""
        return [self.evaluate(self.x).numpy(), self.model(self.x).numpy(), self.former_model(self.x).numpy()]

    def lose(self, *servers: int) -> None:
        for index in servers:
            self.cluster.kill("ps", index)
        # The loss may be noticed without the step, which is cancelled then; `join` raises it in any case.
        with contextlib.suppress(coordinator.ParameterServerLost, coordinator.ClosureCancelledError):
            self.strategy.schedule(self.step, args=(self.x,)).result(TIMEOUT)
        with contextlib.suppress(coordinator.ParameterServerLost):
            self.strategy.join(TIMEOUT)

    def bring_back(self) -> Rollback:
        """Starts the dead servers, and retries until they are recovered."""
        dead = [index for index in (0, 1) if not self.cluster.is_alive("ps", index)]
        for index in dead:
            self.cluster.restart("ps", index, wait=False)
        for index in dead:
            self.cluster.wait_ready("ps", index)
        found: list[Rollback] = []
        wait_until(lambda: found or found.extend(filter(None, [self.recovery.recover()])))
        return found[0]


def lose_and_recover(program: Program, servers: Sequence[int], meanwhile: Callable[[], Any] = lambda: None) -> dict:
    """Trains, saves, continues training, loses servers, recovers; returns the figures that tests check."""
    program.train()
    path = program.manager.save()
    values, outputs, traces = program.saved_values(), program.outputs(), len(program.traces)
    program.train()
    program.lose(*servers)
    while_away = program.recovery.recover()
    meanwhile()
    rolled_back = program.bring_back()
    same = [np.array_equal(a, b) for a, b in zip(values, program.saved_values(), strict=True)]
    seen = {
        "while away": while_away,
        "rolled back": dataclasses.asdict(rolled_back),
        "saved": path,
        "values are those of the checkpoint": all(same),
        "outputs are those of the checkpoint": all(map(np.array_equal, outputs, program.outputs())),
        "rest": [int(count.numpy()) for count in program.counts] + [float(program.metric.result())],
        "found in the tables": [
            table.lookup(tf.constant(["first", "later"])).numpy().tolist() for table in program.words
        ],
    }
    program.reach_servers()
    retried = program.strategy.cluster.statistics().retried
    program.train()
    step, words = program.module.step, program.module.words
    return {
        **seen,
        "retried": program.strategy.cluster.statistics().retried - retried,
        "step after training on": [int(program.optimizer.iterations), int(step.numpy()), *words.numpy().tolist()],
        "traced again": len(program.traces) - traces,
    }


def lost_again(program: Program) -> dict:
    restore = program.manager.checkpoint.restore
    killed: list[int] = []

    def restore_on_a_dying_server(path: str) -> Any:
        if not killed:
            killed.append(1)
            program.cluster.kill("ps", 1)
        return restore(path)

    attempts: list[Any] = []

    def failing_attempt() -> None:
        program.manager.checkpoint.restore = restore_on_a_dying_server
        program.cluster.restart("ps", 0)
        wait_until(lambda: killed or attempts.append(program.recovery.recover()))
        del program.manager.checkpoint.restore

    seen = lose_and_recover(program, [0], failing_attempt)
    return {**seen, "failed attempts": attempts}


def damaged(program: Program) -> dict:
    newest: list[pathlib.Path] = []
    save = program.manager.save

    def save_twice() -> str | None:
        path = save()
        program.train()
        newest.append(pathlib.Path(str(save())))
        program.manager.checkpoint.restore(path).expect_partial()
        return path

    def damage_the_newest() -> None:
        for part in newest[0].parent.glob(f"{newest[0].name}.data*"):
            part.write_bytes(part.read_bytes()[:10])

    program.manager.save = save_twice
    try:
        return lose_and_recover(program, [1], damage_the_newest)
    finally:
        program.manager.save = save


def lost_while_saving(program: Program) -> dict:
    program.train()
    program.cluster.kill("ps", 0)
    path = program.manager.save()
    saved = program.saved_values()
    program.train()
    program.manager.checkpoint.restore(path).expect_partial()
    return {
        "saved": path,
        "latest": tf.train.latest_checkpoint(program.manager.directory),
        "is complete": all(map(np.array_equal, saved, program.saved_values())),
    }


def restored_by_a_function(program: Program) -> dict:
    seen: list[int] = []

    def restore() -> str:
        seen.extend(int(count.numpy()) for count in program.counts)
        path = program.manager.latest_checkpoint
        program.manager.checkpoint.restore(path).expect_partial()
        return path

    program.recovery.restore_from(restore, step=lambda: int(program.module.step))
    result = {**lose_and_recover(program, [0]), "seen by the function": seen}
    program.recovery.restore_from(program.manager, step=program.module.step)
    return result


def without_a_checkpoint(program: Program) -> dict:
    program.recovery.restore_from(program.new_manager("empty"))
    program.train()
    program.lose(1)
    rolled_back = program.bring_back()
    step = int(program.module.step.numpy())
    program.recovery.restore_from(program.manager, step=program.module.step)
    return {"rolled back": dataclasses.asdict(rolled_back), "step": step}


def many_variables(program: Program) -> dict:
    with program.strategy.scope():
        variables = [tf.Variable(tf.fill([100], float(number))) for number in range(MANY)]
    manager = tf.train.CheckpointManager(
        tf.train.Checkpoint(variables=variables), f"{program.manager.directory}-many", max_to_keep=1
    )
    program.recovery.restore_from(manager)
    manager.save()
    program.cluster.restart("ps", 0)
    start = time.monotonic()
    program.bring_back()
    return {
        "seconds": time.monotonic() - start,
        "right": all(variable.numpy()[0] == number for number, variable in enumerate(variables)),
    }


CASES: dict[str, Callable[[Program], dict]] = {
    "one": lambda program: lose_and_recover(program, [0]),
    "both": lambda program: lose_and_recover(program, [0, 1]),
    "lost again during the recovery": lost_again,
    "a damaged checkpoint": damaged,
    "while saving": lost_while_saving,
    "by a function": restored_by_a_function,
    "without a checkpoint": without_a_checkpoint,
    "many variables": many_variables,
}


def main() -> None:
    # The reason for running a function again is logged at this level.
    logging.basicConfig(level=logging.INFO)
    seen = {}
    with LocalCluster(workers=2, ps=2) as cluster, tempfile.TemporaryDirectory() as folder:
        strategy = coordinator.ParameterServerStrategy(cluster.resolver)
        program = Program(strategy, cluster, pathlib.Path(folder))
        program.recovery.restore_from(program.manager, step=program.module.step)
        for name, case in CASES.items():
            seen[name] = case(program)
        strategy.close()
    print(json.dumps(seen, default=lambda value: value.decode()))  # noqa: T201 - its answer


if __name__ == "__main__":
    main()
