"""Tests of arguments that are paths, of the local file system or URLs."""

import pytest

from coordinator.cli.command_line import main

URL = "gs://bucket/there"
RUN = ["--workers", "1", "--ps", "1", "program.py"]


@pytest.mark.parametrize(
    "arguments",
    [
        *(["run", option, URL, *RUN] for option in ("--log-dir", "--trace", "--hostfile")),
        *(["simulate", option, URL] for option in ("--from-trace", "--plot", "--trace", "--json")),
        *(["testbed", option, URL] for option in ("--output", "--folder")),
        ["profile", "--logdir", "gs:/bucket/there", "localhost:1"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_a_url_is_no_local_folder(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    last = capsys.readouterr().err.splitlines()[-1]
    assert ended.value.code == 2
    assert "must be on a local file system" in last or "after pathlib has changed it" in last
