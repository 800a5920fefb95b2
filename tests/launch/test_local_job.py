"""Tests of a run of `coordinator run` on this machine, of the signals that it gets, and of lists of hosts."""

import os
import pathlib
import queue
import signal
import sys
import threading

import pytest

from coordinator.errors import SettingError
from coordinator.launch.local_job import LocalJob
from coordinator.launch.program_process import Console
from coordinator.launch.run_request import Host, RunRequest, fill, parse_hosts, read_hostfile, slots_of, spread
from coordinator.launch.serve import SignalReader
from coordinator.launch.server_process import LocalServers


@pytest.fixture
def job(tmp_path: pathlib.Path) -> LocalJob:
    program = tmp_path / "program.py"
    program.touch()
    return LocalJob(RunRequest(program=str(program)), tmp_path, os.environ, Console(sys.stdout, sys.stderr))


def test_an_unexpected_error_of_a_thread_ends_the_run(job: LocalJob, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError("too many open files")

    monkeypatch.setattr(LocalServers, "start", lambda _: None)
    monkeypatch.setattr(LocalServers, "__iter__", lambda _: iter(()))
    monkeypatch.setattr(LocalServers, "wait_ready", fail)
    with pytest.raises(OSError, match="too many open files"):
        job.run()


SIGNALS = (signal.SIGUSR1, signal.SIGUSR2)


def test_each_signal_is_reported_while_the_main_thread_waits() -> None:
    received: queue.SimpleQueue[signal.Signals] = queue.SimpleQueue()
    threads = []
    with SignalReader(SIGNALS, lambda number: (received.put(number), threads.append(threading.current_thread().name))):
        for number in SIGNALS:
            os.kill(os.getpid(), number)
            assert received.get(timeout=10) is number
    assert threads == ["coordinator-signals"] * 2


def test_afterwards_signals_do_what_they_did_before_and_ignored_ones_stay_so() -> None:
    found = signal.signal(signal.SIGUSR1, handler := lambda *_: None)
    with SignalReader(SIGNALS, lambda number: None):
        assert signal.getsignal(signal.SIGUSR1) is not handler
    assert signal.getsignal(signal.SIGUSR1) is handler
    assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
    assert signal.set_wakeup_fd(-1) == -1
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    received: queue.SimpleQueue[signal.Signals] = queue.SimpleQueue()
    with SignalReader(SIGNALS, received.put):
        for number in SIGNALS:
            os.kill(os.getpid(), number)
        assert received.get(timeout=10) is signal.SIGUSR2
    signal.signal(signal.SIGUSR1, found)


def test_hosts_have_a_name_as_ssh_takes_it_and_a_number_of_slots(tmp_path: pathlib.Path) -> None:
    hosts = parse_hosts("hosts", "a:2, user@b.example.org:4,10.0.0.5,[fe80::1]:3")
    assert hosts == (Host("a", 2), Host("user@b.example.org", 4), Host("10.0.0.5", 1), Host("fe80::1", 3))
    assert slots_of(hosts) == 10
    assert parse_hosts("hosts", "me@[fe80::1]") == (Host("me@fe80::1", 1),)
    wrong = {"": "got ''", "a:0": "got 'a:0'", "a:two": "got 'a:two'", "a:2,,b": "got ''", "a b": "got 'a b'"}
    for text, words in {**wrong, "-oProxyCommand=x": "must name hosts", "a:1,b:1,a:2": "names a twice"}.items():
        with pytest.raises(SettingError, match="hosts") as raised:
            parse_hosts("hosts", text)
        assert words in raised.value.reason
    path = tmp_path / "hosts"
    for content, words in ((None, "cannot be read"), ("\n# none\n", "names no host")):
        if content is not None:
            path.write_text(content)
        with pytest.raises(SettingError, match=words):
            read_hostfile(path)
    path.write_text("# ours\na slots=2\n\nb:3  # the new one\nc\n")
    assert read_hostfile(path) == (Host("a", 2), Host("b", 3), Host("c", 1))


def test_workers_fill_one_host_after_the_other_and_parameter_servers_take_turns() -> None:
    hosts = parse_hosts("hosts", "a:2,b:1")
    assert fill(hosts, 3) == ["a", "a", "b"]
    assert fill(hosts, 2) == ["a", "a"]
    assert spread(hosts, 3) == ["a", "b", "a"]
