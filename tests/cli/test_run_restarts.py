"""`coordinator run --restarts --server-restarts`: what dies is started again."""

import json
import os
import signal
import textwrap
from pathlib import Path

import psutil
import pytest

from tests.launch.command_process import CommandProcess

# The chief ends as its next argument says: by a signal (negative) or with a code; the evaluator waits for a signal.
PROGRAM = """
    import json, os, pathlib, select, signal, sys
    if json.loads(os.environ["TF_CONFIG"])["task"]["type"] == "evaluator":
        print("evaluator", os.getpid(), "waits")
        while True:
            signal.pause()
    starts = pathlib.Path(sys.argv[1])
    with starts.open("a") as file:
        file.write(os.environ["TF_CONFIG"] + "\\n")
    number = len(starts.read_text().splitlines())
    code = int(sys.argv[1 + number])
    assert os.environ["COORDINATOR_RESTART_COUNT"] == str(number - 1)
    print(f"start {number} {os.getpid()}", flush=True)
    while code == 99:
        # Not signal.pause: Python handles no signal that comes just before it begins.
        select.select([], [], [], 0.1)
    os.kill(os.getpid(), -code) if code < 0 else sys.exit(code)
"""
WAITS = 99


@pytest.fixture
def program(tmp_path: Path) -> Path:
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(PROGRAM))
    return path


def test_a_program_that_fails_is_started_again_in_its_role_on_the_same_servers(
    program: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    starts = tmp_path / "starts"
    command = CommandProcess("run", "--restarts", 3, program, starts, -9, 7, 0, environment=environment)
    with command:
        assert command.wait_ended() == 0
        assert not command.left()
    assert "coordinator: the chief was ended by SIGKILL: starting it again, restart 1 of 3." in command.output
    assert "coordinator: the chief ended with code 7: starting it again, restart 2 of 3." in command.output
    configs = starts.read_text().splitlines()
    assert len(configs) == 3
    assert len(set(configs)) == 1
    assert json.loads(configs[0])["task"] == {"type": "chief", "index": 0}


def test_servers_and_evaluator_keep_running_while_the_program_is_started_again(
    program: Path, environment: dict[str, str], tmp_path: Path
) -> None:
    options = ["--evaluator", "--evaluator-timeout", "0.5", "--restarts", 1]
    arguments = [program, tmp_path / "starts", WAITS, WAITS]
    with CommandProcess("run", *options, *arguments, environment=environment) as command:
        evaluator = int(command.wait_output(r"evaluator (\d+) waits")[1])
        first = int(command.wait_output(r"start 1 (\d+)")[1])
        before = {process.pid for process in command.record()}
        os.kill(first, signal.SIGKILL)
        second = int(command.wait_output(r"start 2 (\d+)")[1])
        assert {second, evaluator} <= {process.pid for process in command.record()}
        assert all(psutil.pid_exists(pid) for pid in before - {first})
        command.type("\x03")
        assert command.wait_ended() == 130
        assert not command.left()


# Prints the id of each process that serves as the first parameter server, until it is typed a line.
WATCHING = """
    import json, os, pathlib, select, sys
    from coordinator.heartbeat.probes import TaskProbe
    address = json.loads(os.environ["TF_CONFIG"])["cluster"]["ps"][0]
    seen = set()
    while not select.select([0], [], [], 0.05)[0]:
        with TaskProbe(address) as probe:
            status = probe.status(timeout=5)
        if status is not None and status.incarnation not in seen:
            seen.add(status.incarnation)
            print(f"server {len(seen)} answers", flush=True)
"""


def parameter_server(command: CommandProcess) -> psutil.Process:
    [server] = [each for each in command.record() if each.is_running() and each.name() == "ps-0"]
    return server


def test_a_server_that_dies_is_started_again_on_its_port_up_to_its_limit(
    environment: dict[str, str], tmp_path: Path
) -> None:
    path = tmp_path / "program.py"
    path.write_text(textwrap.dedent(WATCHING))
    with CommandProcess("run", "--server-restarts", 1, path, environment=environment) as command:
        command.wait_output("server 1 answers")
        parameter_server(command).kill()
        again = r"/job:ps/task:0 ended unexpectedly, by SIGKILL .*: starting it again, restart 1 of 1. Its log: (\S+)"
        log = Path(command.wait_output(again)[1])
        command.wait_output("server 2 answers")
        parameter_server(command).kill()
        command.wait_output("/job:ps/task:0 ended .*; its variables are lost with it, and it is not started again")
        command.type("\n")
        assert command.wait_ended() == 0
        assert not command.left()
    assert "/job:ps/task:0 serves on" in log.read_text()


def server(command: CommandProcess, name: str, start: int) -> psutil.Process:
    """Returns the process of a task when its log says that it serves, after some starts."""
    job, index = name.split("-")
    command.wait_output(rf"(?s)(\[{job} {index}\] coordinator: /job:{job}/task:{index} serves on.*){{{start}}}")
    [found] = [each for each in command.record() if each.is_running() and each.name() == name]
    return found


# Fails unless every server answers when it begins.
CALLING = """
    import json, os
    from coordinator.heartbeat.probes import TaskProbe
    cluster = json.loads(os.environ["TF_CONFIG"])["cluster"]
    for address in [*cluster["worker"], *cluster["ps"]]:
        with TaskProbe(address) as probe:
            assert probe.status(timeout=5) is not None
    print("all answer", flush=True)
"""


def test_a_server_that_dies_while_others_start_is_back_before_the_program_begins(
    environment: dict[str, str], tmp_path: Path
) -> None:
    path, go = tmp_path / "program.py", tmp_path / "go"
    path.write_text(textwrap.dedent(CALLING))
    environment |= {"FAKE_SLOW": "worker-1", "FAKE_GO": str(go)}
    options = ["--workers", 2, "--tee", "--log-dir", tmp_path / "logs"]
    with CommandProcess("run", *options, path, environment=environment) as command:
        server(command, "ps-0", start=1).kill()
        command.wait_output(r"by SIGKILL .*: starting it again, restart 1 of 3\.")
        server(command, "ps-0", start=2).kill()
        # It waits for its second restart, and nothing else is awaited.
        command.wait_output(r"by SIGKILL .*: starting it again in 1 s, restart 2 of 3\.")
        go.touch()
        command.wait_output("all answer")
        assert command.wait_ended() == 0
        assert not command.left()
