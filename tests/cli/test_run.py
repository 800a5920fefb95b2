"""The command `run` on a terminal, with servers that start in a moment and programs of a few lines."""

import json
import os
import re
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
# The chief ends with the first given code (or, if it is negative, by that signal), the evaluator with the second.
ENDING = """
    import json, os, sys
    role = json.loads(os.environ["TF_CONFIG"])["task"]["type"]
    code = int(sys.argv[1 if role == "chief" else 2])
    print(role, "ends", flush=True)
    os.kill(os.getpid(), -code) if code < 0 else sys.exit(code)
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
# What the program sees of its cluster.
CLUSTER = """
    import json, os
    config = json.loads(os.environ["TF_CONFIG"])
    print(config["task"]["type"], "sees", [address for tasks in config["cluster"].values() for address in tasks])
    print({job: len(tasks) for job, tasks in config["cluster"].items()})
"""


def test_the_program_gets_its_role_its_arguments_and_its_exit_code_through(
    program: Writer, environment: Environment, tmp_path: Path
) -> None:
    path = program("""
        import os, pathlib, sys
        pathlib.Path(sys.argv[1]).write_text("\\0".join([os.environ["TF_CONFIG"], *sys.argv[2:]]))
        sys.exit(7)
    """)
    seen = tmp_path / "seen"
    arguments = ["--workers", "9", "--", "--epochs=3", "-x", ""]
    with CommandProcess("run", "--workers", 2, "--ps", 1, path, seen, *arguments, environment=environment) as command:
        assert command.wait_ended() == 7
    tf_config, *rest = seen.read_text().split("\0")
    assert rest == arguments
    config = json.loads(tf_config)
    assert config["task"] == {"type": "chief", "index": 0}
    assert {job: len(addresses) for job, addresses in config["cluster"].items()} == {"chief": 1, "worker": 2, "ps": 1}
    assert not command.left()


def test_every_server_answers_before_the_program_starts(program: Writer, environment: Environment) -> None:
    path = program("""
        import json, os
        from coordinator.heartbeat.probes import TaskProbe
        cluster = json.loads(os.environ["TF_CONFIG"])["cluster"]
        for address in cluster["worker"] + cluster["ps"]:
            print(TaskProbe(address).status(timeout=5).devices)
    """)
    with CommandProcess("run", "--workers", 2, "--ps", 2, path, environment=environment) as command:
        assert command.wait_ended() == 0
    for task in ("worker/replica:0/task:0", "worker/replica:0/task:1", "ps/replica:0/task:0", "ps/replica:0/task:1"):
        assert f"/job:{task}/device:CPU:0" in command.output


def test_servers_are_reached_on_this_machine_alone(program: Writer, environment: Environment) -> None:
    path = program("""
        import json, os
        from tests.heartbeat.reach import MOMENT, answers, own_addresses
        cluster = json.loads(os.environ["TF_CONFIG"])["cluster"]
        for address in cluster["worker"] + cluster["ps"]:
            port = int(address.rpartition(":")[2])
            print(answers("127.0.0.1", port), any(answers(own, port, MOMENT) for own in own_addresses()))
    """)
    with CommandProcess("run", path, environment=environment) as command:
        assert command.wait_ended() == 0, command.output
    assert command.output.count("True False") == 2


@pytest.mark.parametrize(
    ("chief", "evaluator", "exit_code"),
    [
        (0, 5, 5),
        (-9, 0, 137),
        pytest.param(0, 0, 0, marks=pytest.mark.long),
        pytest.param(3, 0, 3, marks=pytest.mark.long),
        pytest.param(0, -6, 134, marks=pytest.mark.long),
    ],
)
def test_the_exit_code_is_that_of_the_program_that_failed(
    program: Writer, environment: Environment, chief: int, evaluator: int, exit_code: int
) -> None:
    path = program(ENDING)
    with CommandProcess("run", "--evaluator", path, chief, evaluator, environment=environment) as command:
        assert command.wait_ended() == exit_code, command.output
    assert not command.left()


def test_the_chief_reads_the_terminal_and_a_slow_evaluator_is_terminated(
    program: Writer, environment: Environment
) -> None:
    options = ["--evaluator", "--evaluator-timeout", "0.5"]
    with CommandProcess("run", *options, program(EVALUATED), environment=environment) as command:
        command.wait_output(r"\[evaluator\] evaluator waits")
        command.wait_output("chief asks: ")
        command.type("0\n")
        assert command.wait_ended() == 143
        assert "the evaluator has not ended within 0.5 s of the chief: terminating it" in command.output
        assert not command.left()


def test_a_chief_that_fails_ends_the_evaluator(program: Writer, environment: Environment) -> None:
    with CommandProcess("run", "--evaluator", program(EVALUATED), environment=environment) as command:
        command.wait_output(r"\[evaluator\] evaluator waits")
        command.wait_output("chief asks: ")
        command.type("4\n")
        assert command.wait_ended() == 4
        assert "the chief ended with code 4: ending the evaluator" in command.output
        assert not command.left()


@pytest.mark.long
def test_the_evaluator_may_have_a_cluster_of_its_own(program: Writer, environment: Environment) -> None:
    path = program(CLUSTER + EVALUATED)
    with CommandProcess("run", "--evaluator-workers", 2, path, environment=environment) as command:
        own = command.wait_output(r"\[evaluator\] evaluator sees \[(.*)\]")[1]
        command.wait_output(r"\[evaluator\] evaluator waits")
        others = command.wait_output(r"chief sees \[(.*)\]")[1]
        assert not set(own.split(", ")) & set(others.split(", "))
        # Each program prints this on the next line.
        for counts in ("{'worker': 2, 'ps': 1, 'evaluator': 1}", "{'worker': 1, 'ps': 1, 'chief': 1}"):
            command.wait_output(re.escape(counts))
        [server] = [process for process in command.record() if process.name() == "worker-1"]
        server.kill()
        pattern = r"the evaluator's /job:worker/task:1 ended unexpectedly, .*: starting it again, .* log: (\S+)"
        log = Path(command.wait_output(pattern)[1])
        command.wait_output("chief asks: ")
        command.type("4\n")
        assert command.wait_ended() == 4
        assert not command.left()
    assert log.name == "evaluator-worker-1.log"
    assert "/job:worker/task:1 serves on" in log.read_text()


def test_ctrl_c_reaches_the_program_once_and_ends_everything(program: Writer, environment: Environment) -> None:
    with CommandProcess("run", "--workers", 2, program(OBEDIENT), environment=environment) as command:
        command.wait_output("waits")
        # The program, three servers, and the process that they are forked from.
        assert len(command.record()) == 5
        command.type("\x03")
        assert command.wait_ended() == 130
        assert command.output.count("chief got SIGINT") == 1
        assert not command.left()


@pytest.mark.parametrize(
    ("number", "exit_code"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.long), (signal.SIGTERM, 143)]
)
def test_a_signal_to_the_process_group_works_like_ctrl_c(
    program: Writer, environment: Environment, number: signal.Signals, exit_code: int
) -> None:
    with CommandProcess("run", program(OBEDIENT), environment=environment) as command:
        command.wait_output("waits")
        os.killpg(command.pid, number)
        assert command.wait_ended() == exit_code
        assert command.output.count("chief got") == 1
        assert not command.left()


def test_a_second_ctrl_c_kills_a_program_that_does_not_end(program: Writer, environment: Environment) -> None:
    with CommandProcess("run", program(OBEDIENT), "stubborn", environment=environment) as command:
        command.wait_output("waits")
        command.type("\x03")
        command.wait_output("chief got SIGINT")
        command.type("\x03")
        assert command.wait_ended() == 130
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


def test_a_server_that_does_not_answer_in_time_ends_the_run(program: Writer, environment: Environment) -> None:
    with CommandProcess("run", "--start-timeout", "0.01", program(OBEDIENT), environment=environment) as command:
        assert command.wait_ended() == 1
        assert re.search(r"/job:(worker|ps)/task:0 at \S+ does not answer, [0-9.]+ s after its start", command.output)
        assert not command.left()


def test_only_parameter_servers_are_kept_from_the_gpu(
    program: Writer, environment: Environment, tmp_path: Path
) -> None:
    path = program("""
        import os
        print({name: os.environ.get(name) for name in ("CUDA_VISIBLE_DEVICES", "TF_CPP_MIN_LOG_LEVEL")})
    """)
    environment["CUDA_VISIBLE_DEVICES"] = "5"
    with CommandProcess("run", "--log-dir", tmp_path, path, environment=environment) as command:
        assert command.wait_ended() == 0
    texts = {
        "chief": command.output,
        **{job: (tmp_path / "latest" / f"{job}-0.log").read_text() for job in ("worker", "ps")},
    }
    for job, devices in {"chief": "5", "worker": "5", "ps": ""}.items():
        assert f"{{'CUDA_VISIBLE_DEVICES': '{devices}', 'TF_CPP_MIN_LOG_LEVEL': '2'}}" in texts[job]
