"""Tests of a checkpoint manager's `save` while parameter servers are lost and recovered."""

import contextlib

import pytest
import tensorflow as tf

from coordinator.errors import ParameterServerLost
from coordinator.ps_strategy.recovery.variable_recovery import VariableRecovery
from coordinator.ps_strategy.recovery.variable_store import VariableStore
from coordinator.ps_strategy.tensorflow_internals.handles import TracedFunctions

LOST = ParameterServerLost("/job:ps/task:0", "It does not answer.")
UNAVAILABLE = tf.errors.UnavailableError(None, None, "Connection refused")
UNREACHED = tf.errors.UnavailableError(None, None, "A parameter server did not reach another one.")


class Servers:
    """Servers that a test loses, and that are recovered when a save waits for them."""

    def __init__(self) -> None:
        self.finished = 7
        self.lost = self.is_hopeless = self.is_quiet = False
        self.waits = self.reached = self.quiet_periods = 0
        store = VariableStore(TracedFunctions())
        self.recovery = VariableRecovery(self, store, lambda: self.finished, self.wait_recovered, self.quiet)

    def lost_parameter_server(self):
        return LOST if self.lost else None

    def lost_parameter_servers(self):
        return ("/job:ps/task:0",) if self.lost else ()

    def reconnect_parameter_servers(self):
        self.lost = False
        return True

    def reach_parameter_servers(self):
        self.check_recoverable()
        self.reached += 1

    @contextlib.contextmanager
    def quiet(self):
        self.check_recoverable()
        self.quiet_periods += 1
        self.is_quiet = True
        yield
        self.is_quiet = False

    def wait_recovered(self):
        self.check_recoverable()
        self.waits += 1
        self.lost = self.is_hopeless
        return not self.lost

    def check_recoverable(self):
        assert not self.recovery.variables_in_use.locked(), "a recovery could not begin"


@pytest.fixture
def servers() -> Servers:
    return Servers()


@pytest.fixture
def manager(tmp_path) -> tf.train.CheckpointManager:
    return tf.train.CheckpointManager(tf.train.Checkpoint(step=tf.Variable(1)), str(tmp_path), max_to_keep=2)


def let_fail(manager, servers, *errors):
    """Makes the manager's `save` raise these errors first, and gives the manager to the recovery."""
    save, errors = manager.save, iter(errors)

    def fail_or_save(*args, **kwargs):
        for error in errors:
            servers.lost = error is UNAVAILABLE
            raise error
        return save(*args, **kwargs)

    manager.save = fail_or_save
    servers.recovery.restore_from(manager)


def test_a_manager_saves_while_no_function_runs(manager, servers):
    was_quiet, own = [], manager.save
    save = manager.save = lambda *args, **kwargs: (was_quiet.append(servers.is_quiet), own(*args, **kwargs))[1]
    servers.recovery.restore_from(manager)
    path = manager.save(checkpoint_number=5)
    assert path == manager.latest_checkpoint
    assert path.endswith("ckpt-5")
    assert (was_quiet, servers.quiet_periods, servers.is_quiet, servers.waits) == ([True], 1, False, 0)
    for source in (manager, lambda: None):
        servers.recovery.restore_from(source)
        servers.recovery.release_manager()
        assert manager.save == save


def test_a_save_that_a_lost_server_made_fail_is_repeated(manager, servers):
    let_fail(manager, servers, UNAVAILABLE, UNAVAILABLE)
    assert manager.save() == manager.latest_checkpoint
    assert servers.waits == 2
    servers.lost = True
    assert manager.save() == manager.latest_checkpoint, "nothing is saved while variables are missing"
    assert servers.waits == 3


def test_a_server_that_does_not_return_is_named(manager, servers):
    let_fail(manager, servers, UNAVAILABLE)
    servers.is_hopeless = True
    with pytest.raises(ParameterServerLost) as caught:
        manager.save()
    assert caught.value.original_exception is UNAVAILABLE
    assert manager.latest_checkpoint is None


def test_a_save_is_repeated_three_times_when_the_servers_reach_each_other_again(manager, servers):
    let_fail(manager, servers, UNREACHED, UNREACHED)
    assert manager.save() == manager.latest_checkpoint
    assert (servers.reached, servers.waits) == (2, 2)
    let_fail(manager, servers, *[UNREACHED] * 10)
    with pytest.raises(tf.errors.UnavailableError, match="did not reach another one"):
        manager.save()
    assert (servers.reached, servers.waits) == (2 + 3, 2 + 3)


def test_other_errors_are_raised_unchanged(manager, servers):
    let_fail(manager, servers, tf.errors.ResourceExhaustedError(None, None, "No space left on device"))
    with pytest.raises(tf.errors.ResourceExhaustedError):
        manager.save()
    assert servers.waits == 0


def test_a_save_that_was_not_due_records_nothing_and_one_after_a_recovery_is_due(servers, tmp_path):
    step = tf.Variable(1)
    manager = tf.train.CheckpointManager(
        tf.train.Checkpoint(step=step), str(tmp_path), max_to_keep=1, step_counter=step, checkpoint_interval=10
    )
    servers.recovery.restore_from(manager)
    assert manager.save()
    assert manager.save() is None
    assert steps_of_a_recovery(servers, 8) == (8, 7)
    assert manager.save()


def test_a_checkpoint_is_not_saved_or_restored_asynchronously(manager, servers):
    asynchronous = tf.train.CheckpointOptions(enable_async=True)
    servers.recovery.restore_from(manager)
    with pytest.raises(ValueError, match="enable_async"):
        manager.save(options=asynchronous)
    assert manager.save().endswith("ckpt-1"), "a refused save is not counted"
    checkpoint, prefix = manager.checkpoint, f"{manager.directory}/other"
    other = tf.train.CheckpointManager(checkpoint, f"{manager.directory}/others", max_to_keep=1)
    written = checkpoint.write(f"{manager.directory}/written")
    for use in (
        lambda options: manager.save(options=options),
        lambda options: manager.save(None, True, options),
        lambda options: other.save(options=options),
        lambda options: checkpoint.save(prefix, options=options),
        lambda options: checkpoint.write(prefix, options),
        lambda options: checkpoint.read(written, options),
        lambda options: checkpoint.restore(written, options),
    ):
        with pytest.raises(ValueError, match=r"enable_async=True.*Leave enable_async out"):
            use(asynchronous)
        with pytest.raises(ValueError, match="enable_async"):
            use(tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True))
        use(tf.train.CheckpointOptions())
    # The checkpoint is restored as it was saved, not asynchronously.
    checkpoint.step.assign(8)
    checkpoint.restore(manager.save())
    assert checkpoint.step.numpy() == 8
    servers.recovery.release_manager()
    assert manager.save(options=asynchronous)
    checkpoint.sync()


def steps_of_a_recovery(servers, finished) -> tuple[int, int]:
    servers.finished, servers.lost = finished, True
    rollback = servers.recovery.recover()
    return rollback.step_before, rollback.step_after


def test_progress_undone_by_a_recovery_does_not_count(manager, servers, tmp_path):
    # A checkpoint from before this program has no progress of it.
    assert manager.save()
    servers.recovery.restore_from(manager)
    assert steps_of_a_recovery(servers, 5) == (5, 0)
    servers.finished = 15
    manager.save()
    assert steps_of_a_recovery(servers, 30) == (25, 10)
    servers.finished = 35
    second = manager.save()
    assert steps_of_a_recovery(servers, 37) == (17, 15)
    tf.io.gfile.remove(f"{second}.index")
    assert steps_of_a_recovery(servers, 37) == (15, 10)
    servers.recovery.restore_from(tf.train.CheckpointManager(manager.checkpoint, str(tmp_path / "empty"), 1))
    assert steps_of_a_recovery(servers, 41) == (14, 0)
