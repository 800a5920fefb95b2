"""Tests of TensorFlow's checkpoint classes with variables on parameter servers."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.ps_strategy.every_worker import on_every_worker

TIMEOUT = 60.0


@pytest.fixture
def variables(strategy):
    """One on each parameter server."""
    with strategy.scope():
        return tf.Variable([1.0, 2.0]), tf.Variable(3, dtype=tf.int64)


@pytest.fixture
def checkpoint(variables):
    weights, step = variables
    return tf.train.Checkpoint(weights=weights, step=step)


def test_variables_of_all_parameter_servers_are_saved_and_restored(strategy, variables, checkpoint, tmp_path):
    weights, step = variables
    assert weights.device != step.device

    @tf.function
    def train():
        weights.assign_add([1.0, 1.0])
        step.assign_add(1)

    for _ in range(5):
        strategy.schedule(train)
    strategy.join(TIMEOUT)
    path = checkpoint.save(str(tmp_path / "saved"))
    weights.assign([0.0, 0.0])
    step.assign(0)
    checkpoint.restore(path).assert_consumed()
    assert weights.numpy().tolist() == [6.0, 7.0]
    assert step.numpy() == 8
    # Functions that were traced before read the restored values.
    strategy.schedule(train).result(TIMEOUT)
    assert weights.numpy().tolist() == [7.0, 8.0]


def test_what_is_saved_in_quiet_is_a_snapshot_and_training_goes_on(strategy, tmp_path, counted):
    with strategy.scope():
        first, second = tf.Variable(0), tf.Variable(0)
    assert first.device != second.device

    @tf.function
    def train():
        first.assign_add(1)
        with tf.control_dependencies([first.read_value()]):
            second.assign_add(1)

    checkpoint = tf.train.Checkpoint(first=first, second=second)
    futures = [strategy.schedule(train) for _ in range(200)]
    saved = []
    for number in range(3):
        futures[50 * number].result(TIMEOUT)
        with strategy.quiet(TIMEOUT):
            path = checkpoint.write(str(tmp_path / f"saved{number}"))
            saved.append((path, counted().finished))
    strategy.join(TIMEOUT)
    assert first.numpy() == second.numpy() == 200
    for path, finished in saved:
        reader = tf.train.load_checkpoint(path)
        values = {name: reader.get_tensor(f"{name}/.ATTRIBUTES/VARIABLE_VALUE") for name in ("first", "second")}
        assert values == {"first": finished, "second": finished}


def test_a_checkpoint_is_restored_into_variables_that_are_created_later(strategy, checkpoint, tmp_path):
    path = checkpoint.write(str(tmp_path / "saved"))
    later = tf.train.Checkpoint()
    status = later.read(path)
    with strategy.scope():
        later.weights = tf.Variable([0.0, 0.0])
        later.step = tf.Variable(0, dtype=tf.int64)
    status.assert_consumed()
    assert "/job:ps" in later.weights.device
    assert later.weights.numpy().tolist() == [1.0, 2.0]
    assert later.step.numpy() == 3


def test_a_checkpoint_of_the_servers_is_restored_on_the_client_and_back(strategy, variables, checkpoint, tmp_path):
    local = tf.train.Checkpoint(weights=tf.Variable([0.0, 0.0]), step=tf.Variable(0, dtype=tf.int64))
    local.read(checkpoint.write(str(tmp_path / "from_servers"))).assert_consumed()
    assert local.weights.numpy().tolist() == [1.0, 2.0]
    local.weights.assign([8.0, 9.0])
    checkpoint.read(local.write(str(tmp_path / "from_client"))).assert_consumed()
    assert variables[0].numpy().tolist() == [8.0, 9.0]


def test_a_checkpoint_manager_keeps_the_latest_and_restores_it(variables, checkpoint, tmp_path):
    weights, step = variables
    manager = tf.train.CheckpointManager(checkpoint, str(tmp_path), max_to_keep=2, step_counter=step)
    assert manager.restore_or_initialize() is None
    for number in range(1, 4):
        step.assign(number)
        weights.assign([number, number])
        manager.save(checkpoint_number=number)
    weights.assign([0.0, 0.0])
    assert [path.rsplit("-")[-1] for path in manager.checkpoints] == ["2", "3"]
    assert manager.restore_or_initialize() == manager.latest_checkpoint
    assert weights.numpy().tolist() == [3.0, 3.0]
    assert step.numpy() == 3


def test_a_keras_model_and_its_optimizer_continue_from_a_checkpoint(strategy, tmp_path):
    def build():
        with strategy.scope():
            model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3), keras.layers.Dense(1)])
            optimizer = keras.optimizers.Adam(0.1)
            optimizer.build(model.trainable_variables)
        return model, optimizer, tf.train.Checkpoint(model=model, optimizer=optimizer)

    model, optimizer, checkpoint = build()

    @tf.function
    def train(x):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(x) ** 2)
        optimizer.apply_gradients(
            zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
        )

    for _ in range(3):
        strategy.schedule(train, args=(tf.ones([4, 2]),)).result(TIMEOUT)
    path = checkpoint.save(str(tmp_path / "saved"))
    again, optimizer_again, checkpoint_again = build()
    checkpoint_again.restore(path).assert_existing_objects_matched()
    assert int(optimizer_again.iterations) == 3
    pairs = zip([*model.variables, *optimizer.variables], [*again.variables, *optimizer_again.variables], strict=True)
    for saved, restored in pairs:
        np.testing.assert_array_equal(saved.numpy(), restored.numpy())


def test_saving_and_restoring_work_while_a_worker_is_dead(strategy, shared_cluster, variables, checkpoint, tmp_path):
    weights, _ = variables

    @tf.function
    def train():
        return weights.assign_add([1.0, 1.0])

    shared_cluster.kill("worker", 2)
    try:
        for _ in range(9):
            strategy.schedule(train)
        strategy.join(TIMEOUT)
        path = checkpoint.save(str(tmp_path / "saved"))
        saved = weights.numpy()
        weights.assign([0.0, 0.0])
        # Its functions are new, so that they are traced and registered on the workers now.
        tf.train.Checkpoint(weights=weights).restore(path).expect_partial()
        assert weights.numpy().tolist() == saved.tolist()
        # A function whose worker died after it had run was run again.
        assert saved[0] >= 10.0
    finally:
        shared_cluster.restart("worker", 2)
    assert len(on_every_worker(strategy, train)) == 3
