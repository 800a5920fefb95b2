"""Tests of saving by policies, on variables of this process: what is listed, kept, deleted and logged."""

import contextlib
import os
import pathlib
import threading

import pytest
import tensorflow as tf

from coordinator import Checkpoints, evaluation
from coordinator.checkpoints import Best, EverySteps, Latest
from coordinator.checkpoints.checkpoints import SerialThread
from coordinator.errors import CheckpointsTakenOver
from coordinator.evaluation.checkpoint_watch import CheckpointFile
from coordinator.events.event_stream import EventStream
from coordinator.ps_strategy.recovery.checkpoint_owner import CheckpointOwner
from coordinator.ps_strategy.recovery.snapshots import Snapshot, saved_in_blocks
from coordinator.ps_strategy.recovery.variable_recovery import CheckpointRestore, SaveServices

DEADLINE = 60


class Training:
    """Steps on a variable of this process, with checkpoints in a directory."""

    def __init__(self, directory, **settings) -> None:
        self.directory, self.settings = str(directory), settings
        self.variable = tf.Variable([0.0, 0.0])
        self.steps = 0
        self.started()

    def started(self) -> Checkpoints:
        """Starts the program again: it continues from the latest checkpoint."""
        checkpoint = tf.train.Checkpoint(variable=self.variable)
        self.checkpoints = Checkpoints(checkpoint, self.directory, **{"save": [EverySteps(10)], **self.settings})
        checkpoint.restore(self.checkpoints.latest)
        self.steps, self.owner = 0, CheckpointOwner()
        self.owner.take(self.directory, self.checkpoints.to_restore())
        self.checkpoints.begin(SaveServices(self.save, lambda: self.steps, True, 2**26, EventStream(), self.owner))
        return self.checkpoints

    def save(self, save, _) -> str:
        """Saves as the strategy does."""
        self.owner.require()
        return save()

    def train(self, steps) -> list[str]:
        """Returns the names of what was saved."""
        paths = []
        for _ in range(steps):
            self.steps += 1
            self.variable.assign_add([1.0, 2.0])
            paths.append(self.checkpoints.save())
            with contextlib.suppress(tf.errors.OpError):
                self.checkpoints.wait(DEADLINE)
        return [os.path.basename(path) for path in paths if path is not None]

    def recover(self) -> str | None:
        """Restores as the strategy does after the loss of a parameter server."""
        self.variable.assign([-1.0, -1.0])
        return CheckpointRestore(self.checkpoints, self.owner).restore(lambda: None)


@pytest.fixture(autouse=True)
def captured():
    with saved_in_blocks(2**26):
        yield


@pytest.fixture
def training(tmp_path) -> Training:
    return Training(tmp_path)


@pytest.fixture
def gate(monkeypatch) -> threading.Event:
    """Writing waits until it is set."""
    gate, write = threading.Event(), Snapshot.write

    def write_after(self, hurry):
        assert gate.wait(DEADLINE)
        write(self, hurry)

    monkeypatch.setattr(Snapshot, "write", write_after)
    return gate


def content(directory) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file()}


def names(checkpoints) -> list[str]:
    return [os.path.basename(each.path) for each in checkpoints.history]


def value_in(path) -> list[float]:
    variable = tf.Variable([0.0, 0.0])
    tf.train.Checkpoint(variable=variable).restore(path).expect_partial()
    return variable.numpy().tolist()


def test_it_saves_at_the_steps_and_keeps_the_latest(training):
    assert training.train(45) == ["ckpt-1", "ckpt-2", "ckpt-3", "ckpt-4"]
    checkpoints = training.checkpoints
    assert names(checkpoints) == ["ckpt-2", "ckpt-3", "ckpt-4"]
    assert [each.step for each in checkpoints.history] == [20, 30, 40]
    assert checkpoints.latest == tf.train.latest_checkpoint(training.directory)
    assert value_in(checkpoints.latest) == [40.0, 80.0]
    assert not list(pathlib.Path(training.directory).glob("ckpt-1*"))
    statistics = checkpoints.statistics()
    assert (statistics.saved, statistics.failed, statistics.error) == (4, 0, None)
    assert statistics.bytes == sum(file.stat().st_size for file in pathlib.Path(training.directory).glob("ckpt-4.*"))
    assert 0 < statistics.pause <= statistics.longest_pause


@pytest.mark.parametrize("background", [True, False])
def test_a_save_is_of_its_moment(tmp_path, background):
    training = Training(tmp_path, background=background, keep=None)
    training.variable.assign([3.0, 4.0])
    path = training.checkpoints.save(now=True)
    training.variable.assign([9.0, 9.0])
    assert training.checkpoints.wait() == path
    assert value_in(path) == [3.0, 4.0]
    assert not list(tmp_path.glob("*_temp"))
    # All are kept without a policy.
    training.train(50)
    assert len(training.checkpoints.history) == 6


def test_what_is_being_written_is_not_the_latest(training, gate):
    checkpoints = training.checkpoints
    training.variable.assign([3.0, 4.0])
    path = checkpoints.save(now=True)
    assert checkpoints.latest is None
    assert tf.train.latest_checkpoint(training.directory) is None
    with pytest.raises(TimeoutError, match="is still being written"):
        checkpoints.wait(timeout=0.01)
    training.variable.assign([9.0, 9.0])
    training.steps = 100
    # Not while one is being written.
    assert checkpoints.save() is None
    gate.set()
    assert checkpoints.wait(DEADLINE) == path
    assert value_in(path) == [3.0, 4.0]
    assert checkpoints.save() is not None
    checkpoints.end()


def test_training_continues_where_it_was_when_it_starts_again(training):
    training.train(25)
    left = pathlib.Path(training.directory) / "ckpt-3_temp"
    left.mkdir()
    (left / "part-client0-00000.index").write_text("")
    checkpoints = training.started()
    assert training.variable.numpy().tolist() == [20.0, 40.0]
    # What a killed program left is deleted, and its number not used again.
    assert not left.exists()
    assert training.train(9) == []
    assert training.train(1) == ["ckpt-4"]
    assert [each.step for each in checkpoints.history] == [10, 20, 30]


def test_steps_go_back_with_a_recovery_and_a_damaged_checkpoint_is_forgotten(training):
    training.train(35)
    assert training.recover() == training.checkpoints.latest
    assert training.variable.numpy().tolist() == [30.0, 60.0]
    training.steps = 30
    pathlib.Path(f"{training.checkpoints.latest}.index").write_bytes(b"")
    assert training.recover().endswith("ckpt-2")
    training.steps = 20
    assert training.train(10) == ["ckpt-4"]
    assert names(training.checkpoints) == ["ckpt-1", "ckpt-2", "ckpt-4"]
    assert [each.step for each in training.checkpoints.history] == [10, 20, 30]


def test_what_a_recovery_has_undone_is_not_listed(training, gate):
    gate.set()
    first = training.checkpoints.save(now=True)
    training.checkpoints.wait()
    gate.clear()
    training.checkpoints.save(now=True)
    assert training.recover() == first
    gate.set()
    with pytest.raises(RuntimeError, match="undone"):
        training.checkpoints.wait(DEADLINE)
    assert training.checkpoints.latest == first
    assert not list(pathlib.Path(training.directory).glob("ckpt-2*"))


def test_what_is_written_when_another_client_begins_changes_nothing_there(tmp_path, gate):
    first = Training(tmp_path)
    gate.set()
    first.train(30)
    gate.clear()
    path = first.checkpoints.save(now=True)
    second = Training(tmp_path, background=False)
    assert second.train(10) == [os.path.basename(path)] == ["ckpt-4"]
    before = content(tmp_path)
    gate.set()
    with pytest.raises(CheckpointsTakenOver):
        first.checkpoints.wait(DEADLINE)
    for now in (False, True, False):
        first.steps += 10
        with pytest.raises(CheckpointsTakenOver, match=r"End this program\. Or, if the other one has ended"):
            first.checkpoints.save(now)
    first.checkpoints.report("ckpt-3", loss=0.5)
    first.checkpoints.end()
    assert {name: data for name, data in content(tmp_path).items() if name in before} == before
    assert (second.recover(), second.variable.numpy().tolist()) == (path, [40.0, 80.0])


@pytest.mark.parametrize("background", [True, False])
def test_a_failed_save_is_told_counted_and_tried_again(tmp_path, caplog, background):
    directory = tmp_path / "checkpoints"
    training = Training(directory, background=background)
    training.train(20)
    kept = tmp_path / "kept"
    directory.rename(kept)
    directory.write_text("a file")
    assert training.train(10) == []
    assert "ckpt-3 could not be saved; older ones are kept" in caplog.text
    statistics = training.checkpoints.statistics()
    assert (statistics.saved, statistics.failed) == (2, 1)
    with pytest.raises(type(statistics.error)):
        training.checkpoints.wait()
    directory.unlink()
    kept.rename(directory)
    # Not at every step.
    assert training.train(9) == []
    assert training.train(1) != []
    assert names(training.checkpoints) == ["ckpt-1", "ckpt-2", "ckpt-4"]
    assert [each.step for each in training.checkpoints.history] == [10, 20, 40]


def test_a_checkpoint_whose_list_cannot_be_written_is_not_the_latest(training, monkeypatch):
    training.train(10)
    full = tf.errors.ResourceExhaustedError(None, None, "No space left on device")
    monkeypatch.setattr(tf.io.gfile, "rename", lambda *_, **__: (_ for _ in ()).throw(full))
    training.train(10)
    assert training.checkpoints.statistics().error is full
    monkeypatch.undo()
    assert names(training.started()) == ["ckpt-1"]
    assert not list(pathlib.Path(training.directory).glob("ckpt-2*"))


def test_the_best_is_kept_by_what_is_reported_or_an_evaluator_has_found(tmp_path, caplog):
    training = Training(tmp_path / "reported", keep=[Latest(1), Best("loss", mode="min")])
    for loss in (0.5, 0.1, 0.3, 0.7):
        [name] = training.train(10)
        assert training.checkpoints.report(str(tmp_path / "reported" / name), loss=loss)
    assert names(training.checkpoints) == ["ckpt-2", "ckpt-4"]
    assert training.checkpoints.best.endswith("ckpt-2")
    assert training.checkpoints.report(40, loss=0.05)
    assert not training.checkpoints.report(30, loss=0.0)
    training.checkpoints.wait()
    assert training.started().best.endswith("ckpt-4")
    training = Training(tmp_path / "found", keep=[Latest(1), Best("accuracy", mode="max")])
    for accuracy in (0.9, 0.2, 0.4):
        training.train(10)
        found = CheckpointFile.of_file(f"{training.checkpoints.latest}.index")
        metrics = {"accuracy": accuracy}
        result = evaluation.EvaluationResult(found.path, found.number, 10, metrics, 0.0, found.written_ns)
        evaluation.status_files.append_result(tmp_path / "found", result)
    assert names(training.checkpoints) == ["ckpt-1", "ckpt-3"]
    assert training.checkpoints.best.endswith("ckpt-1")
    # Nothing is deleted while it is unknown which are best.
    (tmp_path / "found" / "evaluations.jsonl").write_text("no result\n{}\n")
    training.train(30)
    assert len(list((tmp_path / "found").glob("ckpt-*.index"))) == 5
    assert "All checkpoints" in caplog.text


def test_the_checkpoints_of_a_manager_are_taken_over(tmp_path):
    variable = tf.Variable([0.0, 0.0])
    manager = tf.train.CheckpointManager(tf.train.Checkpoint(variable=variable), str(tmp_path), max_to_keep=2)
    for value in (1.0, 2.0, 3.0):
        variable.assign([value, value])
        manager.save()
    training = Training(tmp_path)
    assert training.variable.numpy().tolist() == [3.0, 3.0]
    assert training.train(10) == ["ckpt-4"]
    assert names(training.checkpoints) == ["ckpt-2", "ckpt-3", "ckpt-4"]


def test_nothing_is_saved_without_a_strategy(tmp_path):
    checkpoints = Checkpoints(tf.train.Checkpoint(), tmp_path)
    with pytest.raises(RuntimeError, match="call restore_from first"):
        checkpoints.save()
    with pytest.raises(TypeError, match=r"takes a tf\.train\.Checkpoint"):
        Checkpoints(tf.Variable(1), tmp_path)
    with pytest.raises(ValueError, match=r"layers=\[64, 32\].*for a pattern"):
        Checkpoints(tf.train.Checkpoint(), tmp_path / "layers=[64, 32]")
    with pytest.raises(ValueError, match="pathlib"):
        Checkpoints(tf.train.Checkpoint(), pathlib.Path("gs://bucket/run"))


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, ValueError])
def test_calls_of_the_writing_thread_are_made_after_one_that_raised_anything(error):
    thread, made = SerialThread("coordinator-test", "A test"), threading.Event()

    def fail() -> None:
        raise error

    thread.submit(fail)
    thread.submit(made.set)
    assert thread.wait(DEADLINE)
    assert made.is_set()
