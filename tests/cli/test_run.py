"""The command `run` on a terminal, with servers that start in a moment and programs of a few lines."""

import json
import os
import signal
import termios
from pathlib import Path

import psutil
import pytest

from tests.cli.conftest import Environment, Writer
from tests.deadline import wait_until
from tests.launch.command_process import CommandProcess

# A program that counts its signals, and ends at the first one, or on request at none. It reads a pipe without writers.
OBEDIENT = """
    import os, select, signal, sys
    def obey(number, frame):
        print("chief got", signal.Signals(number).name, flush=True)
        if "stubborn" not in sys.argv:
            sys.exit(0)
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, obey)
    print("chief", os.getpid(), "waits", flush=True)
    while True:
        # Not signal.pause: Python handles no signal that comes just before it begins.
        select.select([], [], [], 0.1)
"""
# The chief ends on a request from its terminal; the evaluator never ends.
EVALUATED = """
    import json, os, signal
    if json.loads(os.environ["TF_CONFIG"])["task"]["type"] == "chief":
        raise SystemExit(int(input("chief asks: ")))
    print("evaluator waits")
    while True:
        signal.pause()
"""


def test_the_program_finds_a_cluster_that_answers_on_this_machine_alone(
    program: Writer, environment: Environment
) -> None:
    path = program("""
        import json, os, sys
        from coordinator.heartbeat.probes import TaskProbe
        from tests.heartbeat.reach import MOMENT, answers, own_addresses
        config = json.loads(os.environ["TF_CONFIG"])
        for address in config["cluster"]["worker"] + config["cluster"]["ps"]:
            port = int(address.rpartition(":")[2])
            assert not any(answers(own, port, MOMENT) for own in own_addresses())
            print(TaskProbe(address).status(timeout=5).devices)
        counts = {job: len(addresses) for job, addresses in config["cluster"].items()}
        print("seen", json.dumps([config["task"], counts, sys.argv[1:], os.environ["CUDA_VISIBLE_DEVICES"]]))
        sys.exit(7)
    """)
    given = ["--workers", "9", "--", "--epochs=3", "-x", ""]
    environment["CUDA_VISIBLE_DEVICES"] = "5"
    with CommandProcess("run", "--workers", 2, path, *given, environment=environment) as command:
        assert command.wait_ended() == 7, command.output
        assert not command.left()
    for name in ("worker/replica:0/task:0", "worker/replica:0/task:1", "ps/replica:0/task:0"):
        assert f"/job:{name}/device:CPU:0" in command.output
    [task, counts, arguments, devices] = json.loads(command.wait_output(r"seen (.*)\r\n")[1])
    assert task == {"type": "chief", "index": 0}
    assert counts == {"chief": 1, "worker": 2, "ps": 1}
    assert arguments == given
    assert devices == "5"
    # What the servers print: parameter servers alone are kept from the GPU.
    for name, seen in {"worker 1": "5", "ps 0": ""}.items():
        assert f"[{name}] {{'CUDA_VISIBLE_DEVICES': '{seen}', 'TF_CPP_MIN_LOG_LEVEL': '2'}}" in command.output


@pytest.mark.parametrize(
    ("chief", "exit_code", "words"),
    [
        (0, 143, "the evaluator has not ended within 0.5 s of the chief: terminating it"),
        (4, 4, "the chief ended with code 4: ending the evaluator"),
    ],
)
def test_the_evaluator_ends_after_the_chief_whose_failure_counts_first(
    program: Writer, environment: Environment, chief: int, exit_code: int, words: str
) -> None:
    options = ["--evaluator", "--evaluator-timeout", "0.5"]
    with CommandProcess("run", *options, program(EVALUATED), environment=environment) as command:
        command.wait_output(r"\[evaluator\] evaluator waits")
        command.wait_output("chief asks: ")
        command.type(f"{chief}\n")
        assert command.wait_ended() == exit_code
        assert words in command.output
        assert not command.left()


@pytest.mark.long
def test_the_evaluator_may_have_a_cluster_of_its_own(program: Writer, environment: Environment) -> None:
    report = """
    import json, os
    print("sees", json.dumps(json.loads(os.environ["TF_CONFIG"])["cluster"]), flush=True)
"""
    with CommandProcess(
        "run", "--evaluator-workers", 2, program(report + EVALUATED), environment=environment
    ) as command:
        own = json.loads(command.wait_output(r"\[evaluator\] sees (.*)\r\n")[1])
        others = json.loads(command.wait_output(r"(?<!\[evaluator\] )sees (.*)\r\n")[1])
        assert [sorted(each) for each in (own, others)] == [["evaluator", "ps", "worker"], ["chief", "ps", "worker"]]
        assert (len(own["worker"]), len(others["worker"])) == (2, 1)
        assert not {*own["worker"], *own["ps"]} & {*others["worker"], *others["ps"]}
        command.wait_output("chief asks: ")
        [server] = [process for process in command.record() if process.name() == "worker-1"]
        server.kill()
        command.wait_output("the evaluator's /job:worker/task:1 ended unexpectedly, .*: starting it again")
        command.type("4\n")
        assert command.wait_ended() == 4
        assert not command.left()


def test_ctrl_c_reaches_the_program_once_and_a_second_one_kills_it(program: Writer, environment: Environment) -> None:
    with CommandProcess("run", "--workers", 2, program(OBEDIENT), "stubborn", environment=environment) as command:
        command.wait_output("waits")
        # The program, three servers, and the process that they are forked from.
        assert len(command.record()) == 5
        command.type("\x03")
        command.wait_output("chief got SIGINT")
        command.type("\x03")
        assert command.wait_ended() == 130
        assert command.output.count("chief got SIGINT") == 1
        assert not command.left()


def test_a_signal_to_the_process_group_reaches_the_program_once(program: Writer, environment: Environment) -> None:
    with CommandProcess("run", program(OBEDIENT), environment=environment) as command:
        command.wait_output("waits")
        os.killpg(command.pid, signal.SIGTERM)
        assert command.wait_ended() == 143
        assert command.output.count("chief got") == 1
        assert not command.left()


def test_ctrl_c_while_the_servers_start_ends_them(program: Writer, environment: Environment) -> None:
    with CommandProcess("run", program(OBEDIENT), environment=environment) as command:
        command.wait_output("starting 1 worker and 1 parameter server")
        wait_until(command.record)
        command.type("\x03")
        assert command.wait_ended() == 130
        assert "chief got" not in command.output
        assert not command.left()
    assert not list(Path(environment["TMPDIR"]).iterdir())


def test_nothing_is_left_when_the_command_itself_is_killed(program: Writer, environment: Environment) -> None:
    with CommandProcess("run", "--evaluator", program(EVALUATED), environment=environment) as command:
        command.wait_output(r"\[evaluator\] evaluator waits")
        command.wait_output("chief asks: ")
        # Two programs, two servers, and the process that these are forked from.
        assert len(command.record()) == 5
        command.send(signal.SIGKILL)
        assert command.wait_ended() == -signal.SIGKILL
        assert not command.left()


def test_the_terminal_settings_are_restored_after_the_program(program: Writer, environment: Environment) -> None:
    path = program("""
        import os, signal, sys, termios, tty
        tty.setraw(0)
        print("\\x1b[?25l" + "hidden", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """)
    with CommandProcess("run", path, environment=environment) as command:
        assert command.wait_ended() == 137
        shown = command.output.rpartition("\x1b[?25h")
        assert "\x1b[?25l" in shown[0]
        assert "\x1b[?25l" not in shown[2]
        assert termios.tcgetattr(command.terminal) == command.settings


def test_ctrl_z_suspends_the_program_and_fg_continues_it(program: Writer, environment: Environment) -> None:
    with CommandProcess("run", program(OBEDIENT), environment=environment) as command:
        chief = psutil.Process(int(command.wait_output(r"chief (\d+) waits")[1]))
        command.send(signal.SIGTSTP)
        os.waitid(os.P_PID, command.pid, os.WSTOPPED | os.WNOWAIT)
        wait_until(lambda: chief.status() == psutil.STATUS_STOPPED)
        command.send(signal.SIGCONT)
        command.send(signal.SIGINT)
        command.wait_output("chief got SIGINT")
        assert command.wait_ended() == 130


def test_a_server_that_does_not_start_ends_the_run_and_shows_why(program: Writer, environment: Environment) -> None:
    broken = {**environment, "FAKE_BROKEN": "ps-1"}
    with CommandProcess("run", "--ps", 2, program(OBEDIENT), environment=broken) as command:
        assert command.wait_ended() == 1
        assert "/job:ps/task:1 at" in command.output
        assert "ended with code 1 before it served" in command.output
        assert "the fake server fails as requested" in command.output
        assert "waits" not in command.output
        assert not command.left()
