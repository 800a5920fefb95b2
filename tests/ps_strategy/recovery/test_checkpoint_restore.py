"""Tests of what `restore_from` accepts and which checkpoint is restored, on variables of this process."""

import pathlib

import pytest
import tensorflow as tf

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
    variable.assign([9, 9])
    return paths


def test_the_newest_checkpoint_is_restored_also_if_another_manager_saved_it(manager, variable, prepare):
    source = CheckpointRestore(manager)
    assert source.restore(prepare) is None
    assert source.restore(prepare) is None
    paths = save(manager, variable, 1, 2)
    assert source.restore(prepare) == paths[-1]
    assert variable.numpy().tolist() == [2, 2]
    other = tf.train.CheckpointManager(tf.train.Checkpoint(variable=variable), manager.directory, max_to_keep=3)
    [newest] = save(other, variable, 5)
    assert source.restore(prepare) == newest
    assert variable.numpy().tolist() == [5, 5]
    assert prepare.count == 4


def cut(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize("ending", [".index", ".data-00000-of-00001"])
@pytest.mark.parametrize("damage", [pathlib.Path.unlink, cut, lambda path: path.write_bytes(b"")])
def test_a_damaged_checkpoint_is_skipped(manager, variable, prepare, caplog, ending, damage):
    paths = save(manager, variable, 1, 2, 3)
    damage(pathlib.Path(paths[-1] + ending))
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


def test_a_function_may_do_the_restore(variable, prepare):
    for count, returned in enumerate([None, "some/where", pathlib.Path("some/where"), object()]):

        def restore(count=count, returned=returned):
            assert prepare.count == count + 1
            variable.assign([4, 4])
            return returned

        expected = str(returned) if isinstance(returned, str | pathlib.Path) else None
        assert CheckpointRestore(restore).restore(prepare) == expected
        assert variable.numpy().tolist() == [4, 4]


def test_other_sources_are_refused_with_advice(manager, variable, tmp_path):
    for wrong in (None, "path/to/checkpoint", tf.train.CheckpointManager):
        with pytest.raises(TypeError, match=r"takes coordinator.Checkpoints, a tf\.train\.CheckpointManager, or a fun"):
            CheckpointRestore(wrong)
    with pytest.raises(TypeError, match="Pass a manager of it"):
        CheckpointRestore(tf.train.Checkpoint(variable=variable))
    for name in ("back\\slash", "lr=[0.1]"):
        with pytest.raises(ValueError, match="for a pattern"):
            CheckpointRestore(tf.train.CheckpointManager(tf.train.Checkpoint(), str(tmp_path / name), max_to_keep=1))
    manager.save(options=tf.train.CheckpointOptions(enable_async=True))
    manager.checkpoint.sync()
    with pytest.raises(ValueError, match=r"enable_async=True.*a manager of a new tf.train.Checkpoint"):
        CheckpointRestore(manager)
