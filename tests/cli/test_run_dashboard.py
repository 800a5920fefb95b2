"""`coordinator run --dashboard`: where the page is, on the terminal and in the program's environment."""

import re
from pathlib import Path

import pytest

from tests.cli.conftest import Environment, Writer
from tests.launch.command_process import CommandProcess

# Fails once, so that it is started again.
PRINTING = """
    import os, sys
    print("chief has", os.environ.get("COORDINATOR_DASHBOARD"), sys.argv[1:], flush=True)
    sys.exit(os.environ["COORDINATOR_RESTART_COUNT"] == "0")
"""


def test_the_address_is_told_and_stays_when_the_program_is_started_again(
    program: Writer, environment: Environment
) -> None:
    options = ["--dashboard", "--restarts", 1]
    with CommandProcess("run", *options, program(PRINTING), "--dashboard", environment=environment) as command:
        assert command.wait_ended() == 0, command.output
    told = re.search(r"the dashboard is at http://(127\.0\.0\.1:\d+/[\w-]{20,})/ once the program", command.output)
    assert told
    assert re.findall(r"chief has (\S+) \['(.*)'\]", command.output) == 2 * [(told[1], "--dashboard")]


# Fails if the token stands in a command line, or in the environment of a server.
LOOKING = """
    import os, json
    import psutil
    print("chief has", os.environ["COORDINATOR_DASHBOARD"], "COORDINATOR_DASHBOARD_TOKEN" in os.environ, flush=True)
    command = psutil.Process().parent()
    for each in [command, *command.children(recursive=True)]:
        assert "my-secret" not in " ".join(each.cmdline()), each
        if each.name() in ("worker-0", "ps-0"):
            assert not any("my-secret" in value for value in each.environ().values()), each
"""


@pytest.mark.parametrize("source", ["environment", pytest.param("file", marks=pytest.mark.long)])
def test_a_token_of_ones_own_stands_in_no_command_line(
    program: Writer, environment: Environment, source: str, tmp_path: Path
) -> None:
    options = ["--dashboard=127.0.0.1:0"]
    if source == "environment":
        environment["COORDINATOR_DASHBOARD_TOKEN"] = "my-secret"  # noqa: S105 - not a secret
    else:
        path = tmp_path / "token"
        path.write_text("my-secret")
        path.chmod(0o600)
        options += ["--token-file", str(path)]
    with CommandProcess("run", *options, program(LOOKING), environment=environment) as command:
        assert command.wait_ended() == 0, command.output
    assert re.search(r"chief has 127\.0\.0\.1:\d+/my-secret False", command.output)
