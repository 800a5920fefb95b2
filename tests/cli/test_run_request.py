import json
import re
import shlex
import sys
from pathlib import Path

import pytest
import yaml

from coordinator.cli.command_line import main
from coordinator.launch.run_request import RunRequest


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[RunRequest]:
    """Records what would have been run."""
    requests: list[RunRequest] = []
    monkeypatch.setattr("coordinator.cli.run.run_request", lambda request, environment: requests.append(request) or 0)
    return requests


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.touch()
    return path


def test_every_option_can_be_given(requests: list[RunRequest], program: Path, tmp_path: Path) -> None:
    options = ["--workers", "3", "--ps", "2", "--evaluator", "--evaluator-timeout", "4.5", "--start-timeout=6"]
    options += ["--evaluator-workers", "2", "--restarts", "4", "--server-restarts=0", "--gpus-per-worker=1"]
    options += ["--env", "A=b=c", "--env=D=", "--log-dir", str(tmp_path)]
    main(["run", *options, str(program), "--workers", "8"])
    main(["run", str(program)])
    assert requests == [
        RunRequest(
            program=str(program),
            arguments=("--workers", "8"),
            workers=3,
            ps=2,
            restarts=4,
            server_restarts=0,
            env=(("A", "b=c"), ("D", "")),
            gpus_per_worker=1,
            evaluator=True,
            evaluator_workers=2,
            evaluator_timeout=4.5,
            start_timeout=6.0,
            log_dir=tmp_path,
        ),
        RunRequest(program=str(program)),
    ]


def test_a_module_is_found_without_being_imported(
    requests: list[RunRequest], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package" / "inner"
    package.mkdir(parents=True)
    for path in (package.parent / "__init__.py", package / "__init__.py", package / "__main__.py"):
        path.write_text("raise AssertionError")
    (package / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    for module in ("package.inner.train", "package.inner"):
        assert main(["run", "-m", module, "-m", "--epochs"]) == 0
        assert requests[-1].command == ("-m", module, "-m", "--epochs")
    monkeypatch.chdir("/")
    assert main(["run", "--env", f"PYTHONPATH={tmp_path}", "-m", "package.inner.train"]) == 0
    for module in ("package", "package.outer", "package.inner.train.step"):
        assert main(["run", "-m", module]) == 2


# As absl's programs take them, and as options of the command are written.
FLAGS = ["--epochs=3", "--noaugment", "-v", "1", "--workers=9", "--dashboard", "-m", "--help", "--", "-", "", "--x=a b"]


def test_flags_after_the_program_reach_it_under_every_launcher(
    requests: list[RunRequest], program: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    task = {"JOB_ID": 1, "STEP_ID": 0, "STEP_NUM_TASKS": 3, "STEP_NUM_NODES": 1, "PROCID": 0, "STEP_NODELIST": "here"}
    for name, value in task.items():
        monkeypatch.setenv(f"SLURM_{name}", str(value))

    class Task:
        def __init__(self, step: object, request: RunRequest, *_: object) -> None:
            requests.append(request)

        def run(self) -> int:
            return 0

    monkeypatch.setattr("coordinator.cli.servers.SlurmTask", Task)
    for launcher in (["run"], ["run", "--hosts", "a:2,b"], ["slurm"]):
        assert main([*launcher, str(program), *FLAGS]) == 0
        assert requests.pop().command == (str(program), *FLAGS), launcher
    assert main(["manifest", "kubernetes", "--name=a", "--image=b", "python", "train.py", *FLAGS]) == 0
    *_, job = yaml.safe_load_all(capsys.readouterr().out)
    assert job["spec"]["template"]["spec"]["containers"][0]["command"] == ["python", "train.py", *FLAGS]


def test_a_token_of_ones_own_is_in_the_address_and_in_no_other_variable(
    program: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str | None, bool]] = []
    monkeypatch.setattr(
        "coordinator.cli.run.run_request",
        lambda request, environment: seen.append((request.dashboard, "my-secret" in environment.values())) or 0,
    )
    path = tmp_path / "token"
    path.write_text("my-secret")
    path.chmod(0o600)
    assert main(["run", "--dashboard=127.0.0.1:0", "--token-file", str(path), str(program)]) == 0
    monkeypatch.setenv("COORDINATOR_DASHBOARD_TOKEN", "my-secret")
    assert main(["run", "--dashboard=127.0.0.1:0", str(program)]) == 0
    assert seen == [("127.0.0.1:0/my-secret", False)] * 2
    monkeypatch.delenv("COORDINATOR_DASHBOARD_TOKEN")
    for given, address in {("--dashboard",): "127.0.0.1:0", ("--dashboard", "[::1]:80/a"): "[::1]:80/a"}.items():
        assert main(["run", *given, str(program), *given]) == 0
        assert seen[-1][0] == address


def test_a_dry_run_prints_the_command_of_each_process(
    program: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,GPU-5,4")
    path = program.parent / "trace.json"
    options = ["--workers", "2", "--evaluator", "--gpus-per-worker", "1", "--env", "WHERE=over there"]
    options += ["--trace", str(path)]
    assert main(["run", "--dry-run", *options, str(program), "a b"]) == 0
    commands = [shlex.split(line) for line in capsys.readouterr().out.splitlines()]
    environments = [dict(word.split("=", 1) for word in words if re.match(r"[A-Z_]+=", word)) for words in commands]
    tasks = [json.loads(environment["TF_CONFIG"])["task"] for environment in environments]
    assert [task["type"] for task in tasks] == ["worker", "worker", "ps", "chief", "evaluator"]
    assert [environment["CUDA_VISIBLE_DEVICES"] for environment in environments] == ["3", "GPU-5", "", "", "4"]
    assert {environment["WHERE"] for environment in environments} == {"over there"}
    assert [words[-4:] for words in commands[:3]] == [[sys.executable, "-m", "coordinator", "serve"]] * 3
    assert [words[-3:] for words in commands[3:]] == [[sys.executable, str(program), "a b"]] * 2
    assert [each.get("COORDINATOR_TRACE") for each in environments] == [None, None, None, str(path), None]
