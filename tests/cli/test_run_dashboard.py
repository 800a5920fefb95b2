"""`coordinator run --dashboard`: where the page is, on the terminal and in the program's environment."""

import re

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


@pytest.mark.parametrize("address", ["8080", "127.0.0.1:80/a/b"])
def test_what_is_no_address_is_refused_before_anything_starts(
    program: Writer, environment: Environment, address: str
) -> None:
    with CommandProcess("run", f"--dashboard={address}", program(PRINTING), environment=environment) as command:
        assert command.wait_ended() == 2
    assert "--dashboard must be 'host:port', such as '127.0.0.1:0', or 'host:port/token'" in command.output
