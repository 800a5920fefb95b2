"""Tests of a checkpoint manager's `save` while parameter servers are lost and recovered."""

import threading

import pytest
import tensorflow as tf

from coordinator.errors import ParameterServerLost
from coordinator.ps_strategy.recovery.checkpoint_save import CheckpointSave, SavedProgress

LOST = ParameterServerLost("/job:ps/task:0", "It does not answer.")
UNAVAILABLE = tf.errors.UnavailableError(None, None, "Connection refused")


class Recovery:
    """Servers that a test loses, and that are recovered when a save waits for them."""

    def __init__(self) -> None:
        self.lost = False
        self.is_hopeless = False
        self.waits = 0
        self.lock = threading.Lock()

    def missing(self):
        return LOST if self.lost else None

    def wait_recovered(self, timeout):
        assert not self.lock.locked(), "a recovery could not begin"
        self.waits += 1
        self.lost = self.is_hopeless
        return not self.lost


@pytest.fixture
def recovery() -> Recovery:
    return Recovery()


@pytest.fixture
def progress() -> SavedProgress:
    return SavedProgress(lambda: 7)


@pytest.fixture
def manager(tmp_path) -> tf.train.CheckpointManager:
    return tf.train.CheckpointManager(tf.train.Checkpoint(step=tf.Variable(1)), str(tmp_path), max_to_keep=2)


def guard(manager, progress, recovery) -> CheckpointSave:
    return CheckpointSave(manager, progress, recovery.lock, recovery.missing, recovery.wait_recovered)


def failing(save, recovery, *errors):
    """Makes `save` raise these errors first."""
    errors = iter(errors)

    def fail_or_save(*args, **kwargs):
        for error in errors:
            recovery.lost = error is UNAVAILABLE
            raise error
        return save(*args, **kwargs)

    return fail_or_save


def test_a_save_records_the_progress_of_training(manager, progress, recovery):
    guard(manager, progress, recovery)
    path = manager.save(checkpoint_number=5)
    assert path == manager.latest_checkpoint
    assert path.endswith("ckpt-5")
    assert progress.roll_back(path) == (7, 7)
    assert recovery.waits == 0


def test_a_save_that_a_lost_server_made_fail_is_repeated(manager, progress, recovery):
    manager.save = failing(manager.save, recovery, UNAVAILABLE, UNAVAILABLE)
    guard(manager, progress, recovery)
    assert manager.save() == manager.latest_checkpoint
    assert recovery.waits == 2


def test_nothing_is_saved_while_variables_are_missing(manager, progress, recovery):
    guard(manager, progress, recovery)
    recovery.lost = True
    assert manager.save() == manager.latest_checkpoint
    assert recovery.waits == 1


def test_a_server_that_does_not_return_is_named(manager, progress, recovery):
    manager.save = failing(manager.save, recovery, UNAVAILABLE)
    guard(manager, progress, recovery)
    recovery.is_hopeless = True
    with pytest.raises(ParameterServerLost) as caught:
        manager.save()
    assert caught.value.__cause__ is UNAVAILABLE
    assert manager.latest_checkpoint is None


def test_other_errors_are_raised_unchanged(manager, progress, recovery):
    full = tf.errors.ResourceExhaustedError(None, None, "No space left on device")
    manager.save = failing(manager.save, recovery, full)
    guard(manager, progress, recovery)
    with pytest.raises(tf.errors.ResourceExhaustedError):
        manager.save()
    assert recovery.waits == 0


def test_a_save_that_was_not_due_records_nothing(progress, recovery, tmp_path):
    step = tf.Variable(1)
    manager = tf.train.CheckpointManager(
        tf.train.Checkpoint(step=step), str(tmp_path), max_to_keep=1, step_counter=step, checkpoint_interval=10
    )
    guard(manager, progress, recovery)
    assert manager.save()
    assert manager.save() is None


def test_releasing_restores_the_managers_original_save(manager, progress, recovery):
    own = manager.save
    guarded = guard(manager, progress, recovery)
    assert manager.save is guarded
    guarded.release()
    assert manager.save == own
    guarded = guard(manager, progress, recovery)
    manager.save = own
    guarded.release()
    assert manager.save == own


@pytest.fixture
def asynchronous() -> tf.train.CheckpointOptions:
    return tf.train.CheckpointOptions(enable_async=True)


def ways_to_save(manager):
    """Each saves or restores the manager's checkpoint with the options that it is given."""
    checkpoint, prefix = manager.checkpoint, f"{manager.directory}/other"
    other = tf.train.CheckpointManager(checkpoint, f"{manager.directory}/others", max_to_keep=1)
    written = checkpoint.write(f"{manager.directory}/written")
    return {
        "manager.save": lambda options: manager.save(options=options),
        "manager.save, by position": lambda options: manager.save(None, True, options),
        "save of another manager of it": lambda options: other.save(options=options),
        "checkpoint.save": lambda options: checkpoint.save(prefix, options=options),
        "checkpoint.write": lambda options: checkpoint.write(prefix, options),
        "checkpoint.read": lambda options: checkpoint.read(written, options),
        "checkpoint.restore": lambda options: checkpoint.restore(written, options),
    }


def test_a_checkpoint_is_not_saved_or_restored_asynchronously(manager, progress, recovery, asynchronous):
    guarded = guard(manager, progress, recovery)
    for use in ways_to_save(manager).values():
        with pytest.raises(ValueError, match=r"enable_async=True.*Leave enable_async out"):
            use(asynchronous)
        use(tf.train.CheckpointOptions())
    # The checkpoint is restored as it was saved, not asynchronously.
    manager.checkpoint.step.assign(8)
    manager.checkpoint.restore(manager.save())
    assert manager.checkpoint.step.numpy() == 8
    guarded.release()
    assert manager.save(options=asynchronous)
    manager.checkpoint.sync()


def test_the_former_name_of_the_option_is_refused_as_well(manager, progress, recovery):
    guard(manager, progress, recovery)
    with pytest.raises(ValueError, match="enable_async"):
        manager.save(options=tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True))


def test_a_refused_save_is_not_counted(manager, progress, recovery, asynchronous):
    guard(manager, progress, recovery)
    with pytest.raises(ValueError, match="enable_async"):
        manager.save(options=asynchronous)
    assert manager.save().endswith("ckpt-1")


class Finished:
    """How many functions have finished."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> int:
        return self.count


def test_progress_undone_by_a_recovery_does_not_count():
    finished = Finished()
    progress = SavedProgress(finished)
    finished.count = 10
    progress.record("ckpt-1", progress.count())
    finished.count = 25
    assert progress.roll_back("ckpt-1") == (25, 10)
    assert progress.count() == 10
    finished.count = 30
    assert progress.count() == 15
    progress.record("ckpt-2", progress.count())
    finished.count = 32
    assert progress.roll_back("ckpt-2") == (17, 15)
    assert progress.roll_back("ckpt-1") == (15, 10)


def test_a_checkpoint_from_before_this_program_has_no_progress_of_it():
    finished = Finished()
    progress = SavedProgress(finished)
    finished.count = 5
    assert progress.roll_back("of-an-earlier-run") == (5, 0)
    finished.count = 9
    assert progress.roll_back(None) == (4, 0)
