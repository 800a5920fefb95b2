"""Tests of TensorFlow's checkpoint classes with variables on parameter servers."""

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


def test_a_manager_keeps_the_latest_and_functions_read_what_it_restores(strategy, variables, checkpoint, tmp_path):
    weights, step = variables
    assert weights.device != step.device

    @tf.function
    def train():
        step.assign_add(1)
        weights.assign_add([1.0, 1.0])
        return weights.read_value()

    manager = tf.train.CheckpointManager(checkpoint, str(tmp_path), max_to_keep=2, step_counter=step)
    assert manager.restore_or_initialize() is None
    for number in range(1, 4):
        strategy.schedule(train).result(TIMEOUT)
        manager.save(checkpoint_number=number)
    weights.assign([0.0, 0.0])
    step.assign(0)
    assert [path.rsplit("-")[-1] for path in manager.checkpoints] == ["2", "3"]
    assert manager.restore_or_initialize() == manager.latest_checkpoint
    assert (weights.numpy().tolist(), step.numpy()) == ([4.0, 5.0], 6)
    assert strategy.schedule(train).result(TIMEOUT).tolist() == [5.0, 6.0]


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


def test_a_checkpoint_is_restored_into_later_variables_and_on_the_client_and_back(
    strategy, variables, checkpoint, tmp_path
):
    path = checkpoint.write(str(tmp_path / "from_servers"))
    later = tf.train.Checkpoint()
    status = later.read(path)
    with strategy.scope():
        later.weights, later.step = tf.Variable([0.0, 0.0]), tf.Variable(0, dtype=tf.int64)
    status.assert_consumed()
    assert "/job:ps" in later.weights.device
    assert (later.weights.numpy().tolist(), later.step.numpy()) == ([1.0, 2.0], 3)
    local = tf.train.Checkpoint(weights=tf.Variable([0.0, 0.0]), step=tf.Variable(0, dtype=tf.int64))
    local.read(path).assert_consumed()
    assert local.weights.numpy().tolist() == [1.0, 2.0]
    local.weights.assign([8.0, 9.0])
    checkpoint.read(local.write(str(tmp_path / "from_client"))).assert_consumed()
    assert variables[0].numpy().tolist() == [8.0, 9.0]


def test_saving_and_restoring_work_while_a_worker_is_dead(strategy, shared_cluster, variables, checkpoint, tmp_path):
    weights, _ = variables
    train = tf.function(lambda: weights.assign_add([1.0, 1.0]))
    shared_cluster.kill("worker", 1)
    try:
        for _ in range(9):
            strategy.schedule(train)
        strategy.join(TIMEOUT)
        path = checkpoint.save(str(tmp_path / "saved"))
        weights.assign([0.0, 0.0])
        # Its functions are new, so that they are traced and registered on the workers now.
        tf.train.Checkpoint(weights=weights).restore(path).expect_partial()
        assert weights.numpy().tolist() == [10.0, 11.0]
    finally:
        shared_cluster.restart("worker", 1)
    assert len(on_every_worker(strategy, train)) == 2
