"""`coordinator run --restarts --server-restarts`: what dies is started again."""

import json
import os
import signal
from pathlib import Path

import psutil

from tests.cli.conftest import WATCHING, Environment, Writer
from tests.launch.command_process import CommandProcess

# The chief ends with the code of its next argument, or waits for a signal, as the evaluator does.
PROGRAM = """
    import json, os, pathlib, select, sys
    wait = lambda: [select.select([], [], [], 0.1) for _ in iter(int, 1)]
    if json.loads(os.environ["TF_CONFIG"])["task"]["type"] == "evaluator":
        print("evaluator", os.getpid(), "waits")
        wait()
    number = int(os.environ["COORDINATOR_RESTART_COUNT"])
    print(f"start {number} {os.getpid()} {os.environ['TF_CONFIG']}", flush=True)
    wait() if sys.argv[1 + number] == "wait" else sys.exit(int(sys.argv[1 + number]))
"""


def test_a_program_that_fails_is_started_again_in_its_role_beside_the_same_servers(
    program: Writer, environment: Environment
) -> None:
    options = ["--evaluator", "--evaluator-timeout", "0.5", "--restarts", 3]
    with CommandProcess("run", *options, program(PROGRAM), "wait", 7, "wait", environment=environment) as command:
        evaluator = int(command.wait_output(r"evaluator (\d+) waits")[1])
        first, config = command.wait_output(r"start 0 (\d+) (.*)\r\n").groups()
        before = {process.pid for process in command.record()}
        os.kill(int(first), signal.SIGKILL)
        third, config_again = command.wait_output(r"start 2 (\d+) (.*)\r\n").groups()
        assert {int(third), evaluator} <= {process.pid for process in command.record()}
        assert all(psutil.pid_exists(pid) for pid in before - {int(first)})
        command.type("\x03")
        assert command.wait_ended() == 130
        assert not command.left()
    assert config == config_again
    assert json.loads(config)["task"] == {"type": "chief", "index": 0}
    assert "coordinator: the chief was ended by SIGKILL: starting it again, restart 1 of 3." in command.output
    assert "coordinator: the chief ended with code 7: starting it again, restart 2 of 3." in command.output
    assert "restart 3 of 3" not in command.output, "it was interrupted"


def test_a_server_that_dies_is_started_again_on_its_port_up_to_its_limit(
    program: Writer, environment: Environment
) -> None:
    with CommandProcess("run", "--server-restarts", 1, program(WATCHING), environment=environment) as command:
        for number in (1, 2):
            command.wait_output(rf"(?s)(ps 0 answers anew.*){{{number}}}")
            [server] = [each for each in command.record() if each.is_running() and each.name() == "ps-0"]
            server.kill()
        again = r"/job:ps/task:0 ended unexpectedly, by SIGKILL .*: starting it again, restart 1 of 1. Its log: (\S+)"
        log = Path(command.wait_output(again)[1])
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
    program: Writer, environment: Environment, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    environment |= {"FAKE_SLOW": "worker-1", "FAKE_GO": str(go)}
    options = ["--workers", 2, "--tee", "--log-dir", tmp_path / "logs"]
    with CommandProcess("run", *options, program(CALLING), environment=environment) as command:
        server(command, "ps-0", start=1).kill()
        command.wait_output(r"by SIGKILL .*: starting it again, restart 1 of 3\.")
        server(command, "ps-0", start=2).kill()
        # It waits for its second restart, and nothing else is awaited.
        command.wait_output(r"by SIGKILL .*: starting it again in 1 s, restart 2 of 3\.")
        go.touch()
        command.wait_output("all answer")
        assert command.wait_ended() == 0
        assert not command.left()
