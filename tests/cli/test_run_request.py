from collections.abc import Callable
from pathlib import Path

import pytest

from coordinator.cli import command_line
from coordinator.cli.command_line import main
from coordinator.launch.local_job import RunRequest


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[RunRequest]:
    """Records what would have been run."""
    requests: list[RunRequest] = []
    monkeypatch.setattr(command_line, "run", lambda request, environment: requests.append(request) or 0)
    return requests


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.touch()
    return path


def test_every_option_has_a_default(requests: list[RunRequest], program: Path) -> None:
    assert main(["run", str(program)]) == 0
    assert requests == [RunRequest(program=program)]


def test_every_option_can_be_given(requests: list[RunRequest], program: Path, tmp_path: Path) -> None:
    options = ["--workers", "3", "--ps", "2", "--evaluator", "--evaluator-timeout", "4.5", "--start-timeout=6"]
    options += ["--evaluator-workers", "2", "--restarts", "4", "--server-restarts=0", "--log-dir", str(tmp_path)]
    main(["run", *options, str(program), "--workers", "8"])
    assert requests == [
        RunRequest(
            program=program,
            arguments=("--workers", "8"),
            workers=3,
            ps=2,
            restarts=4,
            server_restarts=0,
            evaluator=True,
            evaluator_workers=2,
            evaluator_timeout=4.5,
            start_timeout=6.0,
            log_dir=tmp_path,
        )
    ]


Arguments = Callable[[str], list[str]]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (lambda program: [program + "x"], "There is no program"),
        (lambda program: [str(Path(program).parent)], "is a folder"),
        (lambda program: ["--workers", "0", program], "--workers must be at least 1, got 0"),
        (lambda program: ["--workers", "-1", program], "--workers must be at least 1, got -1"),
        (lambda program: ["--ps", "0", program], "--ps must be at least 1, got 0"),
        (lambda program: ["--restarts", "-1", program], "--restarts must be at least 0, got -1"),
        (lambda program: ["--server-restarts", "-1", program], "--server-restarts must be at least 0, got -1"),
        (lambda program: ["--evaluator-workers", "-1", program], "--evaluator-workers must be at least 0, got -1"),
        (lambda program: ["--evaluator-timeout", "0", program], "--evaluator-timeout must be a number of seconds"),
        (lambda program: ["--start-timeout", "nan", program], "--start-timeout must be a number of seconds"),
    ],
)
def test_wrong_options_are_refused_in_one_line(
    requests: list[RunRequest], program: Path, capsys: pytest.CaptureFixture[str], arguments: Arguments, words: str
) -> None:
    assert main(["run", *arguments(str(program))]) == 2
    error = capsys.readouterr().err
    assert words in error
    assert error.startswith("coordinator run: ")
    assert error.count("\n") == 1
    assert not requests


@pytest.mark.parametrize("arguments", [[], ["run"], ["walk"], ["run", "--workers", "two", "p.py"], ["run", "--work=2"]])
def test_unknown_options_are_refused_with_the_usage(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage: coordinator" in capsys.readouterr().err


def test_a_log_folder_that_cannot_be_created_is_refused(
    program: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["run", "--log-dir", str(program / "logs"), str(program)]) == 2
    assert "Give another --log-dir" in capsys.readouterr().err
