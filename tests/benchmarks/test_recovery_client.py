"""The client of the recovery benchmark carries out commands and reports events, on either side."""

import contextlib
import io
import json
import queue

import pytest
import tensorflow as tf

from benchmarks import recovery_client
from benchmarks.recovery_client import EventWriter, RecoveryClient, new_hold

TIMEOUT = 60.0


class LocalSide:
    """Runs every function in this process and at once, as worker 2."""

    def __init__(self):
        self.scheduled = 0

    def worker_index(self):
        return tf.constant(2)

    def scope(self):
        return contextlib.nullcontext()

    def schedule(self, function):
        self.scheduled += 1
        result = function()
        return lambda: result

    def join(self):
        pass

    def restore_from(self, manager):
        self.restored_from = manager


class FailingSide(LocalSide):
    """A side whose `join` fails."""

    def join(self):
        raise tf.errors.UnavailableError(None, None, "gone")


@pytest.fixture
def reported():
    return queue.Queue()


@pytest.fixture
def new_client(reported, tmp_path):
    def new(side):
        folder, mark = str(tmp_path / "checkpoints"), str(tmp_path / "mark")
        return RecoveryClient(side, folder, mark, lambda kind, **fields: reported.put((kind, fields)))

    return new


def test_a_held_function_writes_its_workers_index_and_is_held_only_once(tmp_path, monkeypatch):
    monkeypatch.setattr(recovery_client, "HELD", 0.0)
    mark = tmp_path / "mark"
    hold = tf.function(new_hold(LocalSide(), str(mark)))
    hold()
    assert mark.read_text() == "2"
    monkeypatch.setattr(recovery_client, "HELD", 600.0)
    began, worker = tf.function(new_hold(LocalSide(), str(mark)))()
    assert float(began) > 0
    assert int(worker) == 2


def test_a_held_function_is_reported_with_its_worker(new_client, reported, tmp_path):
    (tmp_path / "mark").write_text("0")
    new_client(LocalSide()).follow("hold")
    kind, fields = reported.get(timeout=TIMEOUT)
    assert kind == "held"
    assert fields["worker"] == 2


def test_a_join_follows_some_steps(new_client, reported):
    side = LocalSide()
    new_client(side).follow("join")
    assert reported.get(timeout=TIMEOUT) == ("joined", {})
    assert side.scheduled == recovery_client.STEPS_BEFORE_JOIN


def test_an_error_is_reported_by_its_name(new_client, reported):
    new_client(FailingSide()).follow("join")
    assert reported.get(timeout=TIMEOUT) == ("raised", {"error": "UnavailableError"})


def test_a_second_client_continues_from_the_checkpoint_of_the_first(new_client):
    side = LocalSide()
    new_client(side)
    saved = side.restored_from.latest_checkpoint
    second = LocalSide()
    new_client(second)
    assert second.restored_from.latest_checkpoint == saved


def test_an_unknown_command_is_refused(new_client):
    with pytest.raises(ValueError, match="no command 'dance'"):
        new_client(LocalSide()).follow("dance")


def test_each_event_is_a_line_with_its_time():
    stream = io.StringIO()
    write = EventWriter(stream)
    write("ready")
    write("step", began=1.0, worker=0)
    ready, step = map(json.loads, stream.getvalue().splitlines())
    assert ready["kind"] == "ready"
    assert ready["at"] <= step["at"]
    assert step["worker"] == 0
