"""What the command does with arguments and environments that cannot work: one line, and never a traceback."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

import coordinator
from coordinator.cli.command_line import main

TIMEOUT = 120.0
NESTED = "[" * 100_000
JOB = "manifest kubernetes --name a --image b"
SERVE = "serve --job worker --index 0 --address localhost:1"
IN_A_STEP = {"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "3", "SLURM_STEP_NUM_NODES": "1", "SLURM_STEP_NODELIST": "n"}


def task(address: str, job: str = "chief", index: int = 0) -> str:
    cluster = '{"cluster": {"chief": ["a:1"], "worker": ["c:1", "d:2"], "ps": ["' + address + '"]}'
    return f'{cluster}, "task": {{"type": "{job}", "index": {index}}}}}'


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "p.py": "",
        "nested.json": NESTED,
        "other.json": '{"traceEvents": {"a": 1}}',
    }.items():
        (tmp_path / name).write_text(text)
    monkeypatch.delenv("TF_CONFIG", raising=False)


# The command, TF_CONFIG, and words of the line.
REFUSED = [
    ("run --hosts h --ssh '\"ssh' p.py", "", "--ssh must be a command as a shell takes it, got '\"ssh': No closing"),
    ("run --hosts h --ssh '' p.py", "", "--ssh must be a command, got nothing."),
    ("run --hosts h:99999999999999999999 p.py", "", "--hosts must name hosts as in 'a:2,b:4', with 1 to 9999"),
    ("run --ps-hosts two p.py", "", "--ps-hosts needs --hosts or --hostfile"),
    ("run --hosts one --evaluator-workers 1 p.py", "", "--evaluator-workers cannot be used with --hosts"),
    ("run \udcff.py", "", "There is no program \\udcff.py"),
    ("run .", "", "is a folder"),
    ("run -m there.is.none", "", "There is no module there.is.none"),
    ("run --workers 0 p.py", "", "--workers must be at least 1, got 0"),
    ("run --gpus-per-worker -1 p.py", "", "--gpus-per-worker must be an integer of at least 0, got -1"),
    ("run --evaluator-timeout inf p.py", "", "--evaluator-timeout must be a number of seconds"),
    ("run --workers 3 --gpus-per-worker 1 p.py", {"CUDA_VISIBLE_DEVICES": "0,1"}, "3 GPUs for 3 workers"),
    ("run --env TF_CONFIG={} p.py", "", "--env cannot set TF_CONFIG"),
    ("run --log-dir p.py/logs p.py", "", "Give another --log-dir"),
    ("run --trace none/trace.json p.py", "", "--trace must be a file in a folder that exists"),
    ("run --dashboard=127.0.0.1:80/a/b p.py", "", "--dashboard must be 'host:port', such as '127.0.0.1:0', or 'host"),
    ("run --dashboard=127.0.0.1:0/t --token-file p.py p.py", "", "--token-file cannot be given beside a token"),
    ("serve", "", "TF_CONFIG is not set"),
    ("serve", "[]", "TF_CONFIG must be a JSON object"),
    ("serve", '{"task": ' + 5000 * "9" + "}", "TF_CONFIG is not JSON: Exceeds the limit"),
    ("serve", task("b:1", "worker", 3), "no task 3 in job 'worker'"),
    ("serve", task("b:1"), "/job:chief/task:0 is not a server"),
    ("serve --job ps --index 0 --address a:99999999999", "", "must be a 'host:port'"),
    (f"{SERVE} --devices 0", "", "The devices of a server must be an integer of at least 1, got 0."),
    ("doctor", task("\\ud800:1"), "must be a 'host:port'"),
    ("doctor", '{"cluster": {"ps": {"99999999999": "a:1"}}, "task": {"type": "ps", "index": 0}}', "of at least 0"),
    ("profile --logdir out a..b:1", "", "No server answers"),
    ("profile --logdir out", "", "There is no cluster to profile: TF_CONFIG is not set."),
    ("profile --logdir out --seconds 0", "", "--seconds must be a number above 0 and at most 60, got 0.0."),
    ("profile --logdir out --pid 1 a:1", "", "--pid cannot be given beside addresses."),
    ("profile --logdir out --pid 99999999999999999999", "", "cannot be read"),
    (f"{JOB} --workers 99999999999", "", "--workers must be an integer from 1 to 100000"),
    (f"{JOB} python \udcff", "", "'\\udcff' is not UTF-8, as all text of Kubernetes is."),
    ("simulate --from-trace nested.json", "", "--from-trace cannot read the trace nested.json: RecursionError"),
    ("simulate --from-trace other.json", "", "--from-trace cannot read the trace other.json: AttributeError"),
    ("simulate --workers 99999999999999999999", "", "--workers must be at most 1000000, got 9999"),
    ("simulate --rule hogwild", "", "--rule must be of asynchronous, synchronous, stale_synchronous, bounded_delay,"),
    ("simulate --compute weibull(1s,2)", "", "--compute has no distribution 'weibull'; it may be one of constant"),
    ("simulate --pushes 9 --json /none/out.json", "", "--json cannot be written to /none/out.json"),
    ("testbed --delays -0.5,1", "", "--delays must be a number of seconds from 0 to 3600, got -0.5."),
    ("testbed --batch-size 600", "", "--batch-size must be at most 533, a worker's part of the images."),
    ("testbed --output /dev/null/results", "", "--output cannot be created: "),
    ("slurm p.py", "", "This is no task of a Slurm step"),
    ("slurm --ps 2 p.py", IN_A_STEP, "give srun --ntasks 4 or more"),
]


def test_what_cannot_work_is_one_line(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, given, words in REFUSED:
        environment = given if isinstance(given, dict) else {"TF_CONFIG": given} if given else {}
        with monkeypatch.context() as patch:
            for name, value in environment.items():
                patch.setenv(name, value)
            command = [os.fsdecode(word.encode("utf-8", "surrogateescape")) for word in shlex.split(arguments)]
            assert main(command) == 2, arguments
        lines = capsys.readouterr().err.splitlines()
        assert len(lines) == 1, (arguments, lines)
        assert lines[0].startswith(f"coordinator {command[0]}: "), arguments
        assert words in lines[0], (arguments, lines)


URLS = [
    *(f"run {option} gs://bucket/there p.py" for option in ("--log-dir", "--trace", "--hostfile")),
    *(f"simulate {option} gs://bucket/there" for option in ("--from-trace", "--plot", "--trace", "--json")),
    *(f"testbed {option} gs://bucket/there" for option in ("--output", "--folder")),
    "profile --logdir gs:/bucket/there localhost:1",
]


def test_other_arguments_are_refused_with_the_usage_and_urls_for_local_files(
    capsys: pytest.CaptureFixture[str],
) -> None:
    usage = "usage: coordinator"
    wrong = dict.fromkeys(["", "walk", "run --workers two p.py", "run --work=2", "run --env A p.py"], usage)
    wrong |= {"run": "arguments are required: PROGRAM\n", **dict.fromkeys(URLS, "local file system")}
    for arguments, words in wrong.items():
        with pytest.raises(SystemExit) as ended:
            main(arguments.split())
        assert ended.value.code == 2
        assert words in capsys.readouterr().err.replace("after pathlib has changed it", "local file system"), arguments
    with pytest.raises(SystemExit):
        main(["--version"])
    assert capsys.readouterr().out == f"coordinator {coordinator.__version__}\n"


def test_an_output_that_cannot_be_written_is_no_traceback() -> None:
    def command(redirected: str, **options: int) -> "subprocess.CompletedProcess[bytes]":
        script = f'exec "$0" -m coordinator {JOB} {redirected}'
        call = ["sh", "-c", script, sys.executable]
        return subprocess.run(call, stderr=subprocess.PIPE, timeout=TIMEOUT, check=False, **options)

    done = command(">&-")
    assert (done.returncode, done.stderr) == (0, b"")
    done = command("> /dev/full")
    words = b"coordinator manifest: its output cannot be written: No space left on device.\n"
    assert (done.returncode, done.stderr) == (1, words)
    reading, writing = os.pipe()
    os.close(reading)
    done = command("", stdout=writing)
    os.close(writing)
    # 128 + SIGPIPE, as other commands end in a shell.
    assert (done.returncode, done.stderr) == (141, b"")


def test_a_folder_that_is_gone_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(["run", "-m", "none"]) == 2
    words = "coordinator run: The folder that this command runs in does not exist any more: change to another one.\n"
    assert capsys.readouterr().err == words
