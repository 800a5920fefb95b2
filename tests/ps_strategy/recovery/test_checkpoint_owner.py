"""Tests of two clients on one directory of checkpoints, the former of which wakes up after the other has begun."""

import contextlib
import os
import shutil

import pytest
import tensorflow as tf

from coordinator.errors import CheckpointsTakenOver
from coordinator.ps_strategy.recovery.checkpoint_owner import OWNER_FILE, CheckpointOwner
from coordinator.ps_strategy.recovery.snapshots import saved_in_blocks
from coordinator.ps_strategy.recovery.variable_recovery import VariableRecovery
from coordinator.ps_strategy.recovery.variable_store import VariableStore
from coordinator.ps_strategy.tensorflow_internals.handles import TracedFunctions


class Client:
    """A client with one variable, whose parameter server is lost when a test says so."""

    def __init__(self, directory, number=0.0) -> None:
        self.lost = False
        self.parameter_server_connections = (0,)
        self.variable = tf.Variable(number)
        checkpoint = tf.train.Checkpoint(variable=self.variable)
        self.manager = tf.train.CheckpointManager(checkpoint, str(directory), max_to_keep=2)
        checkpoint.restore(self.manager.latest_checkpoint)
        self.owner = CheckpointOwner()
        self.recovery = VariableRecovery(
            self, VariableStore(TracedFunctions()), lambda: 0, lambda: True, contextlib.nullcontext, owner=self.owner
        )
        self.recovery.restore_from(self.manager)

    def lost_parameter_server(self):
        return RuntimeError("lost") if self.lost else None

    def lost_parameter_servers(self):
        return ("/job:ps/task:0",) if self.lost else ()

    def reconnect_parameter_servers(self):
        self.lost, self.parameter_server_connections = False, (self.parameter_server_connections[0] + 1,)
        return True

    def save(self, value):
        self.variable.assign(value)
        return os.path.basename(self.manager.save())

    def recover(self):
        """Returns the name of the checkpoint that is restored after a loss, and the value then."""
        self.lost = True
        self.variable.assign(-1.0)
        path = self.recovery.recover().checkpoint
        return path and os.path.basename(path), float(self.variable.numpy())


def content(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_a_client_that_was_taken_for_dead_neither_saves_nor_restores(tmp_path):
    first = Client(tmp_path)
    first.save(1.0)
    second = Client(tmp_path)
    assert second.save(2.0) == "ckpt-2"
    before = content(tmp_path)
    for use in (lambda: first.save(9.0), first.recover):
        with pytest.raises(
            CheckpointsTakenOver, match=r"belong to another client since .*: process \d+ .* on the host"
        ):
            use()
    assert content(tmp_path) == before
    assert (first.manager.checkpoint.save_counter.numpy(), second.recover()) == (1, ("ckpt-2", 2.0))


def test_the_newest_client_goes_on_where_the_former_one_vanished(tmp_path):
    first = Client(tmp_path)
    for value in (1.0, 2.0, 3.0):
        first.save(value)
    third = Client(tmp_path), Client(tmp_path)
    assert third[1].recover() == ("ckpt-3", 3.0), "what it started from"
    assert third[1].save(4.0) == "ckpt-4"
    with pytest.raises(CheckpointsTakenOver):
        third[0].save(9.0)
    third[0].recovery.restore_from(third[0].manager)
    third[0].save(9.0)
    with pytest.raises(CheckpointsTakenOver):
        third[1].save(5.0)


def test_a_save_during_which_another_client_begins_is_neither_listed_nor_deletes(tmp_path):
    first, second = Client(tmp_path), []
    for value in (1.0, 2.0):
        first.save(value)
    with (
        saved_in_blocks(2**26, lambda path: second or second.append(Client(tmp_path))),
        pytest.raises(CheckpointsTakenOver),
    ):
        first.save(9.0)
    listed = tf.train.get_checkpoint_state(tmp_path).all_model_checkpoint_paths
    assert [os.path.basename(path) for path in listed] == ["ckpt-1", "ckpt-2"]
    assert (tmp_path / "ckpt-1.index").exists()
    assert second[0].save(5.0) == "ckpt-3"
    assert second[0].recover() == ("ckpt-3", 5.0)

    def deleted(path):
        Client(tmp_path)
        raise tf.errors.NotFoundError(None, None, "ckpt-4_temp is gone.")

    with saved_in_blocks(2**26, deleted), pytest.raises(CheckpointsTakenOver):
        second[0].save(6.0)


def test_a_checkpoint_that_another_client_has_written_over_is_not_restored(tmp_path):
    client = Client(tmp_path)
    for value in (1.0, 2.0):
        client.save(value)
    tf.train.Checkpoint(variable=tf.Variable(9.0)).write(str(tmp_path / "ckpt-2"))
    assert client.recover() == ("ckpt-1", 1.0)


def test_what_another_client_listed_since_is_not_restored(tmp_path, caplog):
    client = Client(tmp_path)
    client.save(1.0)
    other = tf.train.Checkpoint(variable=tf.Variable(7.0))
    tf.train.CheckpointManager(other, str(tmp_path), max_to_keep=3, checkpoint_name="other").save()
    assert client.recover() == ("ckpt-1", 1.0)
    assert "other-1 is not restored: another client has written it" in caplog.text


@pytest.mark.parametrize("spelled", ["{}/../{}", "file://localhost{}"])
def test_what_the_same_program_saves_otherwise_is_restored(tmp_path, spelled):
    client = Client(spelled.format(tmp_path, tmp_path.name))
    with saved_in_blocks(2**26, client.owner.record_any):
        client.save(1.0)
        manager = tf.train.CheckpointManager(client.manager.checkpoint, client.manager.directory + "/", max_to_keep=3)
        client.variable.assign(2.0)
        manager.save()
        assert client.recover() == ("ckpt-2", 2.0)
        client.manager.checkpoint.write(str(tmp_path / "elsewhere" / "ckpt-2"))
        assert client.recover() == ("ckpt-2", 2.0)
        client.save(3.0)
        assert client.recover() == ("ckpt-3", 3.0)


def test_copying_the_directory_changes_no_owner(tmp_path):
    client = Client(tmp_path / "here")
    client.save(1.0)
    shutil.copytree(tmp_path / "here", tmp_path / "backup")
    shutil.rmtree(tmp_path / "here")
    assert client.owner.require() is None, "whoever emptied the directory is no other client"
    shutil.copytree(tmp_path / "backup", tmp_path / "here")
    for path in (tmp_path / "here").iterdir():
        os.utime(path, ns=(0, 0))
    assert client.recover() == ("ckpt-1", 1.0)


def test_a_damaged_record_is_nobodys(tmp_path):
    client = Client(tmp_path)
    for text in ("", "{", "3", '{"number": 3}', "\x00" * 100):
        (tmp_path / OWNER_FILE).write_text(text)
        client.save(1.0)
        assert client.recover()[1] == 1.0, text
    Client(tmp_path)
    with pytest.raises(CheckpointsTakenOver):
        client.save(2.0)


def test_a_directory_that_cannot_be_written_is_only_read(tmp_path, caplog):
    owner = CheckpointOwner()
    (tmp_path / "file").write_text("")
    owner.take(str(tmp_path / "file" / "below"), [])
    owner.require()
    assert owner.has(str(tmp_path / "file" / "below" / "ckpt-1"))
    assert "cannot be written, so it is not noticed" in caplog.text
