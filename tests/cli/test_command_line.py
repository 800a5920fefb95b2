"""What the command does with arguments and environments that cannot work: one line, and never a traceback."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from coordinator.cli.command_line import main

TIMEOUT = 120.0
NESTED = "[" * 100_000
JOB = "manifest kubernetes --name a --image b"


def task(address: str) -> str:
    return '{"cluster": {"chief": ["a:1"], "ps": ["' + address + '"]}, "task": {"type": "chief", "index": 0}}'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "p.py").touch()
    (tmp_path / "nested.json").write_text(NESTED)
    (tmp_path / "other.json").write_text('{"traceEvents": {"a": 1}}')
    (tmp_path / "huge.json").write_text(
        '{"traceEvents": [{"name": "thread_name", "tid": 1, "args": {"name": "worker 0"}},'
        '{"ph": "X", "tid": 1, "ts": 0, "dur": 0, "args": {"outcome": "finished", "closures": 1}}]}'
    )
    monkeypatch.delenv("TF_CONFIG", raising=False)


@pytest.mark.parametrize(
    ("arguments", "config", "words"),
    [
        (
            "run --hosts h --ssh '\"ssh' p.py",
            "",
            "--ssh must be a command as a shell takes it, got '\"ssh': No closing",
        ),
        ("run --hosts h --ssh '' p.py", "", "--ssh must be a command, got nothing."),
        ("run --hosts h:99999999999999999999 p.py", "", "--hosts must name hosts as in 'a:2,b:4', with 1 to 9999"),
        ("run \udcff.py", "", "There is no program \\udcff.py"),
        ("serve", NESTED, "TF_CONFIG is not JSON: maximum recursion depth"),
        ("serve", '{"task": ' + 5000 * "9" + "}", "TF_CONFIG is not JSON: Exceeds the limit"),
        ("serve --job ps --index 99999999999 --address a:1", "", "must be an integer below 2147483648"),
        ("serve --job ps --index 0 --address a:99999999999", "", "must be a 'host:port'"),
        ("doctor", task("\\ud800:1"), "must be a 'host:port'"),
        ("doctor", '{"cluster": {"ps": {"99999999999": "a:1"}}, "task": {"type": "ps", "index": 0}}', "of at least 0"),
        ("profile --logdir out a..b:1", "", "No server answers"),
        (f"profile --logdir out {300 * 'x'}:1", "", "No server answers"),
        ("profile --logdir out --pid -1", "", "--pid must be the number of a process, got -1."),
        ("profile --logdir out --pid 99999999999999999999", "", "cannot be read"),
        (f"{JOB} --workers 99999999999", "", "--workers must be an integer from 1 to 100000"),
        ("simulate --from-trace nested.json", "", "--from-trace cannot read the trace nested.json: RecursionError"),
        ("simulate --from-trace other.json", "", "--from-trace cannot read the trace other.json: AttributeError"),
        ("simulate --from-trace huge.json", "", "--from-trace cannot read the trace huge.json: ZeroDivisionError"),
        ("simulate --workers 99999999999999999999", "", "--workers must be at most 1000000, got 9999"),
        ("slurm p.py", "", "This is no task of a Slurm step"),
    ],
)
def test_what_cannot_work_is_one_line(
    arguments: str, config: str, words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if config:
        monkeypatch.setenv("TF_CONFIG", config)
    given = [os.fsdecode(word.encode("utf-8", "surrogateescape")) for word in shlex.split(arguments)]
    assert main(given) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"coordinator {given[0]}: ")
    assert words in line


def test_a_host_name_that_cannot_be_one_is_a_finding(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TF_CONFIG", task("worker-0..svc:2222"))
    assert main(["doctor", "--timeout", "0.1"]) == 1
    assert "worker-0..svc:2222" in capsys.readouterr().out


@pytest.mark.parametrize("arguments", [JOB, "run --dry-run p.py"])
def test_a_closed_output_is_no_traceback(arguments: str) -> None:
    done = command(f'exec "$0" -m coordinator {arguments} >&-')
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_full_disk_is_one_line() -> None:
    done = command(f'exec "$0" -m coordinator {JOB} > /dev/full')
    words = b"coordinator manifest: its output cannot be written: No space left on device.\n"
    assert (done.returncode, done.stderr) == (1, words)
    assert command(f'exec "$0" -m coordinator {JOB} > /dev/full 2> /dev/full').returncode == 1


def test_a_folder_that_is_gone_is_one_line() -> None:
    done = command('mkdir gone && cd gone && rmdir ../gone && exec "$0" -m coordinator run -m none')
    words = b"coordinator run: The folder that this command runs in does not exist any more: change to another one.\n"
    assert (done.returncode, done.stderr.endswith(words), b"Traceback" in done.stderr) == (2, True, False)


def command(script: str) -> "subprocess.CompletedProcess[bytes]":
    """Runs a script of a shell; `$0` in it is Python."""
    return subprocess.run(["sh", "-c", script, sys.executable], stderr=subprocess.PIPE, timeout=TIMEOUT, check=False)
