"""Tests of what `restore_from` accepts and which checkpoint is restored, on variables of this process."""

import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf
import tf_keras

from coordinator.ps_strategy.recovery.variable_recovery import CheckpointRestore


class Prepared:
    """Counts how often the variables were prepared for a restore."""

    def __init__(self):
        self.count = 0

    def __call__(self):
        self.count += 1


@pytest.fixture
def prepare() -> Prepared:
    return Prepared()


@pytest.fixture
def variable() -> tf.Variable:
    return tf.Variable([0.0, 0.0])


@pytest.fixture
def manager(variable, tmp_path) -> tf.train.CheckpointManager:
    return tf.train.CheckpointManager(tf.train.Checkpoint(variable=variable), str(tmp_path), max_to_keep=3)


def save(manager, variable, *values) -> list[str]:
    paths = []
    for value in values:
        variable.assign([value, value])
        paths.append(manager.save())
    return paths


def test_the_newest_checkpoint_is_restored(manager, variable, prepare):
    source = CheckpointRestore(manager)
    paths = save(manager, variable, 1, 2)
    variable.assign([9, 9])
    assert source.restore(prepare) == paths[-1]
    assert variable.numpy().tolist() == [2, 2]
    assert prepare.count == 1


def test_without_a_checkpoint_nothing_is_restored(manager, variable, prepare):
    source = CheckpointRestore(manager)
    variable.assign([9, 9])
    assert source.restore(prepare) is None
    assert prepare.count == 1


def test_a_checkpoint_of_another_manager_in_the_directory_is_found(manager, variable, prepare):
    save(manager, variable, 1)
    source = CheckpointRestore(manager)
    other = tf.train.CheckpointManager(tf.train.Checkpoint(variable=variable), manager.directory, max_to_keep=3)
    [newest] = save(other, variable, 5)
    variable.assign([9, 9])
    assert source.restore(prepare) == newest
    assert variable.numpy().tolist() == [5, 5]


def cut(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("ending", [".index", ".data-00000-of-00001"])
@pytest.mark.parametrize("damage", [pathlib.Path.unlink, cut, lambda path: path.write_bytes(b"")])
def test_a_damaged_checkpoint_is_skipped(manager, variable, prepare, caplog, ending, damage):
    paths = save(manager, variable, 1, 2, 3)
    damage(pathlib.Path(paths[-1] + ending))
    variable.assign([9, 9])
    assert CheckpointRestore(manager).restore(prepare) == paths[1]
    assert variable.numpy().tolist() == [2, 2]
    assert prepare.count == 2, "no value of the damaged one may stay"
    assert f"{paths[-1]} cannot be restored" in caplog.text


def test_if_no_checkpoint_is_readable_the_newest_ones_error_is_raised(manager, variable, prepare):
    paths = save(manager, variable, 1, 2)
    for path in paths:
        cut(pathlib.Path(path + ".index"))
    with pytest.raises(tf.errors.OpError) as caught:
        CheckpointRestore(manager).restore(prepare)
    assert paths[-1] in str(caught.value.__notes__)


def test_an_error_of_a_lost_server_does_not_skip_the_checkpoint(manager, variable, prepare, monkeypatch):
    save(manager, variable, 1, 2)

    def fail(path):
        raise tf.errors.UnavailableError(None, None, "Connection reset by peer")

    monkeypatch.setattr(manager.checkpoint, "restore", fail)
    with pytest.raises(tf.errors.UnavailableError):
        CheckpointRestore(manager).restore(prepare)
    assert prepare.count == 1


def test_a_manager_that_saves_at_intervals_may_save_right_after(variable, tmp_path, prepare):
    step = tf.Variable(10, dtype=tf.int64)
    checkpoint = tf.train.Checkpoint(variable=variable, step=step)
    manager = tf.train.CheckpointManager(
        checkpoint, str(tmp_path), max_to_keep=3, step_counter=step, checkpoint_interval=5
    )
    assert manager.save()
    step.assign(15)
    assert manager.save()
    CheckpointRestore(manager).restore(prepare)
    assert manager.save(), "its last attempt was at this step, but may have failed"


@pytest.mark.parametrize("returned", [None, "some/where", pathlib.Path("some/where"), object()], ids=type)
def test_a_function_may_do_the_restore(variable, prepare, returned):
    prepared = []

    def restore():
        prepared.append(prepare.count)
        variable.assign([4, 4])
        return returned

    source = CheckpointRestore(restore)
    assert source.restore(prepare) == (str(returned) if isinstance(returned, str | pathlib.Path) else None)
    assert prepared == [1]
    assert variable.numpy().tolist() == [4, 4]


@pytest.mark.parametrize("wrong", [None, "path/to/checkpoint", 3, tf.train.CheckpointManager], ids=repr)
def test_other_sources_are_refused(wrong):
    with pytest.raises(
        TypeError, match=r"takes coordinator.Checkpoints, a tf\.train\.CheckpointManager, or a function"
    ):
        CheckpointRestore(wrong)


def test_a_checkpoint_is_refused_with_advice(variable):
    with pytest.raises(TypeError, match="Pass a manager of it"):
        CheckpointRestore(tf.train.Checkpoint(variable=variable))


def test_a_checkpoint_that_was_saved_asynchronously_is_refused(manager):
    manager.save(options=tf.train.CheckpointOptions(enable_async=True))
    manager.checkpoint.sync()
    with pytest.raises(ValueError, match=r"enable_async=True.*a manager of a new tf.train.Checkpoint"):
        CheckpointRestore(manager)


def test_a_manager_whose_checkpoints_could_not_be_found_is_refused(tmp_path):
    for name in ("back\\slash", "lr=[0.1]"):
        manager = tf.train.CheckpointManager(tf.train.Checkpoint(), str(tmp_path / name), max_to_keep=1)
        with pytest.raises(ValueError, match="for a pattern"):
            CheckpointRestore(manager)


@pytest.mark.parametrize("library", [keras, tf_keras])
def test_a_model_and_its_optimizer_are_restored_without_warnings(library, tmp_path, prepare, capfd, caplog):
    model = library.Sequential([library.layers.Dense(3), library.layers.Dense(1)])
    model.build((None, 2))
    optimizer = library.optimizers.Adam(0.1)
    optimizer.build(model.trainable_variables)
    optimizer.apply_gradients([(tf.ones(v.shape), v) for v in model.trainable_variables])
    checkpoint = tf.train.Checkpoint(model=model, optimizer=optimizer, gone=tf.Variable(1))
    tf.train.CheckpointManager(checkpoint, str(tmp_path), max_to_keep=1).save()
    manager = tf.train.CheckpointManager(
        tf.train.Checkpoint(model=model, optimizer=optimizer), str(tmp_path), max_to_keep=1
    )
    variables = [*model.variables, *(optimizer.variables() if callable(optimizer.variables) else optimizer.variables)]
    saved = [variable.numpy() for variable in variables]
    for variable in variables:
        variable.assign(tf.zeros(variable.shape, variable.dtype))
    capfd.readouterr()
    assert CheckpointRestore(manager).restore(prepare)
    for variable, value in zip(variables, saved, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
    assert capfd.readouterr().err == ""
    assert not caplog.records
