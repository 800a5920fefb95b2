"""The command `run` on a terminal, with servers that start in a moment and programs of a few lines."""

import json
import os
import re
import signal
import termios
from pathlib import Path

import psutil
import pytest

from tests.cli.conftest import WATCHING, Environment, Run
from tests.deadline import wait_until

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
# The chief ends on a request from its terminal; the evaluator prints some lines, and never ends.
EVALUATED = """
    import json, os, select, sys
    config = json.loads(os.environ["TF_CONFIG"])
    print("sees", json.dumps(config["cluster"]), flush=True)
    if config["task"]["type"] == "chief":
        print("are terminals:", [stream.isatty() for stream in (sys.stdin, sys.stdout, sys.stderr)])
        raise SystemExit(int(input("chief asks: ")))
    print("loss 1", "\\r" + "loss 2")
    print("a warning", file=sys.stderr)
    print("caf\\N{LATIN SMALL LETTER E WITH ACUTE}, no end of line", end="")
    while True:
        select.select([], [], [], 0.1)
"""


def test_the_program_finds_a_cluster_that_answers_on_this_machine_alone(run: Run) -> None:
    source = """
        import json, os, signal, sys, tty
        from coordinator.heartbeat.probes import TaskProbe
        from tests.heartbeat.reach import MOMENT, answers, own_addresses
        config = json.loads(os.environ["TF_CONFIG"])
        for address in config["cluster"]["worker"] + config["cluster"]["ps"]:
            port = int(address.rpartition(":")[2])
            assert not any(answers(own, port, MOMENT) for own in own_addresses())
            print(TaskProbe(address).status(timeout=5).devices)
        counts = {job: len(addresses) for job, addresses in config["cluster"].items()}
        print("seen", json.dumps([config["task"], counts, sys.argv[1:], os.environ["CUDA_VISIBLE_DEVICES"]]))
        tty.setraw(0)
        print("\\x1b[?25l" + "hidden", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    given = ["--workers", "9", "--", "--epochs=3", "-x", ""]
    with run(source, *given, options=["--workers", 2], CUDA_VISIBLE_DEVICES="5") as command:
        assert command.wait_ended() == 137, command.output
        # The terminal is as it was.
        before, _, after = command.output.rpartition("\x1b[?25h")
        assert ("\x1b[?25l" in before, "\x1b[?25l" in after) == (True, False)
        assert termios.tcgetattr(command.terminal) == command.settings
    for name in ("worker/replica:0/task:0", "worker/replica:0/task:1", "ps/replica:0/task:0"):
        assert f"/job:{name}/device:CPU:0" in command.output
    seen = json.loads(command.wait_output(r"seen (.*)\r\n")[1])
    assert seen == [{"type": "chief", "index": 0}, {"chief": 1, "worker": 2, "ps": 1}, given, "5"]
    # What the servers print: parameter servers alone are kept from the GPU.
    for name, seen in {"worker 1": "5", "ps 0": ""}.items():
        assert f"[{name}] {{'CUDA_VISIBLE_DEVICES': '{seen}', 'TF_CPP_MIN_LOG_LEVEL': '2'}}" in command.output


def test_the_evaluators_lines_have_a_prefix_and_it_ends_after_the_chief(run: Run) -> None:
    options = ["--evaluator", "--evaluator-timeout", "0.5"]
    with run(EVALUATED, options=options, PYTHONUTF8="1") as command:
        command.wait_output(r"\[evaluator\] a warning")
        command.wait_output("chief asks: ")
        command.type("0\n")
        assert command.wait_ended() == 143
    assert "the evaluator has not ended within 0.5 s of the chief: terminating it" in command.output
    assert "are terminals: [True, True, True]" in command.output
    # They keep a progress bar of the chief intact.
    for line in ("loss 2", "a warning", "caf\N{LATIN SMALL LETTER E WITH ACUTE}, no end of line"):
        assert f"\r\x1b[K[evaluator] {line}\r\n" in command.output
    assert "loss 1" not in command.output


@pytest.mark.long
def test_the_evaluator_may_have_a_cluster_of_its_own(run: Run) -> None:
    with run(EVALUATED, options=["--evaluator-workers", 2]) as command:
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


def test_ctrl_c_reaches_the_program_once_and_a_second_one_kills_it(run: Run) -> None:
    with run(OBEDIENT, "stubborn", options=["--workers", 2]) as command:
        command.wait_output("waits")
        # The program, three servers, and the process that they are forked from.
        assert len(command.record()) == 5
        command.type("\x03")
        command.wait_output("chief got SIGINT")
        command.type("\x03")
        assert command.wait_ended() == 130
        assert command.output.count("chief got SIGINT") == 1


def test_ctrl_z_suspends_the_program_and_a_signal_to_the_group_reaches_it_once(run: Run) -> None:
    with run(OBEDIENT) as command:
        chief = psutil.Process(int(command.wait_output(r"chief (\d+) waits")[1]))
        command.send(signal.SIGTSTP)
        os.waitid(os.P_PID, command.pid, os.WSTOPPED | os.WNOWAIT)
        wait_until(lambda: chief.status() == psutil.STATUS_STOPPED)
        command.send(signal.SIGCONT)
        os.killpg(command.pid, signal.SIGTERM)
        assert command.wait_ended() == 143
        assert command.output.count("chief got") == 1


def test_ctrl_c_while_the_servers_start_ends_them(run: Run, environment: Environment) -> None:
    with run(OBEDIENT) as command:
        command.wait_output("starting 1 worker and 1 parameter server")
        wait_until(command.record)
        command.type("\x03")
        assert command.wait_ended() == 130
        assert "chief got" not in command.output
    assert not list(Path(environment["TMPDIR"]).iterdir())


def test_nothing_is_left_when_the_command_itself_is_killed(run: Run) -> None:
    with run(EVALUATED, options=["--evaluator"]) as command:
        command.wait_output(r"\[evaluator\] a warning")
        command.wait_output("chief asks: ")
        # Two programs, two servers, and the process that these are forked from.
        assert len(command.record()) == 5
        command.send(signal.SIGKILL)
        assert command.wait_ended() == -signal.SIGKILL


def test_a_server_that_does_not_start_ends_the_run_and_shows_why(run: Run) -> None:
    with run(OBEDIENT, options=["--ps", 2], FAKE_BROKEN="ps-1") as command:
        assert command.wait_ended() == 1
    for words in ("/job:ps/task:1 at", "ended with code 1 before it served", "the fake server fails as requested"):
        assert words in command.output
    assert "waits" not in command.output


# The chief ends with the code of its next argument, or waits for a signal, as the evaluator does.
RESTARTED = """
    import json, os, select, sys
    wait = lambda: [select.select([], [], [], 0.1) for _ in iter(int, 1)]
    if json.loads(os.environ["TF_CONFIG"])["task"]["type"] == "evaluator":
        print("evaluator", os.getpid(), "waits")
        wait()
    number = int(os.environ["COORDINATOR_RESTART_COUNT"])
    print(f"start {number} {os.getpid()} {os.environ['COORDINATOR_DASHBOARD']} {os.environ['TF_CONFIG']}", flush=True)
    wait() if sys.argv[1 + number] == "wait" else sys.exit(int(sys.argv[1 + number]))
"""


def test_a_program_that_fails_is_started_again_in_its_role_beside_the_same_servers(run: Run) -> None:
    options = ["--evaluator", "--evaluator-timeout", "0.5", "--restarts", 3, "--dashboard"]
    with run(RESTARTED, "wait", 7, "wait", options=options) as command:
        evaluator = int(command.wait_output(r"evaluator (\d+) waits")[1])
        first, address, config = command.wait_output(r"start 0 (\d+) (\S+) (.*)\r\n").groups()
        before = {process.pid for process in command.record()}
        os.kill(int(first), signal.SIGKILL)
        third, address_again, config_again = command.wait_output(r"start 2 (\d+) (\S+) (.*)\r\n").groups()
        assert {int(third), evaluator} <= {process.pid for process in command.record()}
        assert all(psutil.pid_exists(pid) for pid in before - {int(first)})
        # The token of the dashboard stands in no command line, and no server has it.
        token = address.rpartition("/")[2]
        for each in filter(psutil.Process.is_running, [psutil.Process(command.pid), *command.record()]):
            assert token not in " ".join(each.cmdline())
            assert each.name() not in ("worker-0", "ps-0") or token not in str(each.environ())
        command.type("\x03")
        assert command.wait_ended() == 130
    assert (address, config) == (address_again, config_again)
    told = re.search(r"the dashboard is at http://(127\.0\.0\.1:\d+/[\w-]{20,})/ once the program", command.output)
    assert told
    assert told[1] == address
    assert json.loads(config)["task"] == {"type": "chief", "index": 0}
    assert "coordinator: the chief was ended by SIGKILL: starting it again, restart 1 of 3." in command.output
    assert "coordinator: the chief ended with code 7: starting it again, restart 2 of 3." in command.output
    assert "restart 3 of 3" not in command.output, "it was interrupted"


def test_a_server_that_dies_is_started_again_on_its_port_up_to_its_limit(run: Run, tmp_path: Path) -> None:
    prints = "E0000 00:00:1.2 3 x.cc:4] logged\nin a step\n"
    options = ["--server-restarts", 1, "--log-dir", tmp_path]
    with run(WATCHING, options=options, FAKE_PRINTS=prints) as command:
        for number in (1, 2):
            command.wait_output(rf"(?s)(ps 0 answers anew.*){{{number}}}")
            [server] = [each for each in command.record() if each.is_running() and each.name() == "ps-0"]
            server.kill()
        again = r"/job:ps/task:0 ended unexpectedly, by SIGKILL .*: starting it again, restart 1 of 1. Its log: (\S+)"
        log = Path(command.wait_output(again)[1])
        command.wait_output("/job:ps/task:0 ended .*; its variables are lost with it, and it is not started again")
        # What steps print is shown with the name of the server.
        command.wait_output(r"\r\x1b\[K\[worker 0\] in a step\r\n")
        command.wait_output(r"(?s)starting it again.*\[ps 0\] in a step\r\n")
        command.type("\n")
        assert command.wait_ended() == 0
    assert "logged" not in command.output
    assert "serves on" not in command.output
    for path in (log, tmp_path / "latest" / "ps-0.restart-1.log"):
        assert "/job:ps/task:0 serves on" in path.read_text()
    assert (tmp_path / "latest" / "chief-0.log").read_text() == ""
