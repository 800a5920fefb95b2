"""Attempts to recover, saves of a manager meanwhile, and which checkpoint is restored, without servers."""

import contextlib
import pathlib
from unittest import mock

import pytest
import tensorflow as tf

from coordinator.errors import ParameterServerLost
from coordinator.ps_strategy.recovery.variable_recovery import CheckpointRestore, VariableRecovery
from coordinator.ps_strategy.recovery.variable_store import VariableStore
from coordinator.ps_strategy.tensorflow_internals.handles import TracedFunctions

LOST = ParameterServerLost("/job:ps/task:0", "It does not answer.")
UNAVAILABLE = tf.errors.UnavailableError(None, None, "Connection refused")
UNREACHED = tf.errors.UnavailableError(None, None, "A parameter server did not reach another one.")


class Servers:
    """Servers that a test loses, and that are recovered when a save waits for them, or reconnected if they answer."""

    def __init__(self) -> None:
        self.finished = 7
        self.lost = self.is_hopeless = self.is_quiet = False
        self.answer = True
        self.waits = self.reached = self.quiet_periods = 0
        self.restored: list[int] = []
        self.parameter_server_connections = (0,)
        store = VariableStore(TracedFunctions())
        self.recovery = VariableRecovery(self, store, lambda: self.finished, self.wait_recovered, self.quiet)

    def restore(self):
        self.restored.append(1)

    def lost_parameter_server(self):
        return LOST if self.lost else None

    def lost_parameter_servers(self):
        return ("/job:ps/task:0",) if self.lost else ()

    def reconnect_parameter_servers(self):
        if self.lost and self.answer:
            self.lost, self.parameter_server_connections = False, (self.parameter_server_connections[0] + 1,)
        return self.answer

    def reach_parameter_servers(self):
        assert not self.lost
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


def test_without_a_source_nothing_can_be_recovered_and_a_wrong_step_is_refused(servers):
    with pytest.raises(RuntimeError, match="call restore_from first"):
        servers.recovery.recover()
    for step in ("10", 10, tf.constant(1.0), object()):
        with pytest.raises(TypeError, match="step must be an integer variable"):
            servers.recovery.restore_from(servers.restore, step=step)


def test_a_server_that_was_only_slow_to_answer_is_not_recovered(servers):
    servers.recovery.restore_from(servers.restore)
    servers.lost, servers.answer = True, False
    assert servers.recovery.recover() is None
    servers.lost = False
    assert servers.recovery.recover() is None
    assert servers.recovery.missing() is None
    assert not servers.restored


def test_a_server_that_answers_again_within_an_attempt_keeps_its_variables(servers, monkeypatch):
    servers.recovery.restore_from(servers.restore)
    servers.lost, lose = True, servers.lost_parameter_servers

    def thaw():
        lost, servers.lost = lose(), False
        return lost

    with monkeypatch.context() as patch:
        patch.setattr(servers, "lost_parameter_servers", thaw)
        assert servers.recovery.try_once() is True
    assert not servers.restored
    servers.lost = True
    assert servers.recovery.try_once()
    assert servers.restored


def test_workers_reach_recovered_servers_before_work_continues(servers):
    servers.recovery.restore_from(servers.restore)
    servers.lost, servers.answer = True, False
    assert not servers.recovery.try_once()
    assert not servers.reached
    servers.answer = True
    assert servers.recovery.try_once()
    assert (servers.restored, servers.reached) == ([1], 1)
    # Servers that did not answer for a while may have been unreachable for a worker too.
    assert servers.recovery.try_once()
    assert servers.reached == 2


def test_no_attempt_is_made_while_a_checkpoint_is_saved(servers):
    servers.recovery.restore_from(servers.restore)
    servers.lost = True
    with servers.recovery.variables_in_use:
        assert servers.recovery.recover() is None
    assert not servers.restored
    assert servers.recovery.recover().parameter_servers == ("/job:ps/task:0",)
    assert servers.restored


def test_variables_are_missing_until_an_attempt_succeeds(servers):
    errors = iter([tf.errors.UnavailableError(None, None, "Connection refused"), ValueError("the user's own")])

    def restore():
        for error in errors:
            raise error

    servers.recovery.restore_from(restore)
    servers.lost = True
    assert servers.recovery.recover() is None
    assert not servers.lost
    assert "its variables are being restored" in str(servers.recovery.missing())
    with pytest.raises(ValueError, match="the user's own"):
        servers.recovery.recover()
    assert servers.recovery.recover() is not None
    assert servers.recovery.missing() is None


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
    checkpoint = manager.checkpoint
    written = checkpoint.write(f"{manager.directory}/written")
    for use in (
        lambda options: manager.save(None, True, options),
        lambda options: checkpoint.save(f"{manager.directory}/other", options=options),
        lambda options: checkpoint.read(written, options),
        lambda options: checkpoint.restore(written, options),
    ):
        for refused in (asynchronous, tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True)):
            with pytest.raises(ValueError, match=r"enable_async=True.*Leave enable_async out"):
                use(refused)
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


@pytest.fixture
def prepare() -> mock.Mock:
    """Prepares the variables for a restore, and counts that."""
    return mock.Mock()


@pytest.fixture
def variable() -> tf.Variable:
    return tf.Variable([0.0, 0.0])


@pytest.fixture
def kept(variable, tmp_path) -> tf.train.CheckpointManager:
    return tf.train.CheckpointManager(tf.train.Checkpoint(variable=variable), str(tmp_path), max_to_keep=3)


def save(kept, variable, *values) -> list[str]:
    paths = []
    for value in values:
        variable.assign([value, value])
        paths.append(kept.save())
    variable.assign([9, 9])
    return paths


def test_the_newest_checkpoint_is_restored_also_if_another_manager_saved_it(kept, variable, prepare):
    source = CheckpointRestore(kept)
    assert source.restore(prepare) is None
    assert source.restore(prepare) is None
    paths = save(kept, variable, 1, 2)
    assert source.restore(prepare) == paths[-1]
    assert variable.numpy().tolist() == [2, 2]
    other = tf.train.CheckpointManager(tf.train.Checkpoint(variable=variable), kept.directory, max_to_keep=3)
    [newest] = save(other, variable, 5)
    assert source.restore(prepare) == newest
    assert variable.numpy().tolist() == [5, 5]
    assert prepare.call_count == 4


def cut(path: pathlib.Path) -> None:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


@pytest.mark.parametrize(
    ("ending", "damage"), [(".index", pathlib.Path.unlink), (".index", cut), (".data-00000-of-00001", cut)]
)
def test_a_damaged_checkpoint_is_skipped(kept, variable, prepare, caplog, ending, damage):
    paths = save(kept, variable, 1, 2, 3)
    damage(pathlib.Path(paths[-1] + ending))
    assert CheckpointRestore(kept).restore(prepare) == paths[1]
    assert variable.numpy().tolist() == [2, 2]
    assert prepare.call_count == 2, "no value of the damaged one may stay"
    assert f"{paths[-1]} cannot be restored" in caplog.text


def test_if_no_checkpoint_is_readable_the_newest_ones_error_is_raised(kept, variable, prepare):
    paths = save(kept, variable, 1, 2)
    for path in paths:
        cut(pathlib.Path(path + ".index"))
    with pytest.raises(tf.errors.OpError) as caught:
        CheckpointRestore(kept).restore(prepare)
    assert paths[-1] in str(caught.value.__notes__)


def test_an_error_of_a_lost_server_does_not_skip_the_checkpoint(kept, variable, prepare, monkeypatch):
    save(kept, variable, 1, 2)

    def fail(path):
        raise tf.errors.UnavailableError(None, None, "Connection reset by peer")

    monkeypatch.setattr(kept.checkpoint, "restore", fail)
    with pytest.raises(tf.errors.UnavailableError):
        CheckpointRestore(kept).restore(prepare)
    assert prepare.call_count == 1


def test_a_manager_that_saves_at_intervals_may_save_right_after(variable, tmp_path, prepare):
    step = tf.Variable(10, dtype=tf.int64)
    checkpoint = tf.train.Checkpoint(variable=variable, step=step)
    kept = tf.train.CheckpointManager(
        checkpoint, str(tmp_path), max_to_keep=3, step_counter=step, checkpoint_interval=5
    )
    assert kept.save()
    step.assign(15)
    assert kept.save()
    CheckpointRestore(kept).restore(prepare)
    assert kept.save(), "its last attempt was at this step, but may have failed"


def test_a_function_may_do_the_restore(variable, prepare):
    for count, returned in enumerate([None, "some/where", pathlib.Path("some/where"), object()]):

        def restore(count=count, returned=returned):
            assert prepare.call_count == count + 1
            variable.assign([4, 4])
            return returned

        expected = str(returned) if isinstance(returned, str | pathlib.Path) else None
        assert CheckpointRestore(restore).restore(prepare) == expected
        assert variable.numpy().tolist() == [4, 4]


def test_other_sources_are_refused_with_advice(kept, variable, tmp_path):
    for wrong in (None, "path/to/checkpoint", tf.train.CheckpointManager):
        with pytest.raises(TypeError, match=r"takes coordinator.Checkpoints, a tf\.train\.CheckpointManager, or a fun"):
            CheckpointRestore(wrong)
    with pytest.raises(TypeError, match="Pass a manager of it"):
        CheckpointRestore(tf.train.Checkpoint(variable=variable))
    for name in ("back\\slash", "lr=[0.1]"):
        with pytest.raises(ValueError, match="for a pattern"):
            CheckpointRestore(tf.train.CheckpointManager(tf.train.Checkpoint(), str(tmp_path / name), max_to_keep=1))
    kept.save(options=tf.train.CheckpointOptions(enable_async=True))
    kept.checkpoint.sync()
    with pytest.raises(ValueError, match=r"enable_async=True.*a manager of a new tf.train.Checkpoint"):
        CheckpointRestore(kept)
