"""Tests of the output and the logs of programs that `coordinator run` starts."""

import os
import re
import textwrap
from pathlib import Path

from tests.cli.conftest import Environment, Run

# Writes as TensorFlow's C++ code, Python and the library do; then it fails.
OUTPUTS = """
    import json, logging, os, sys
    role = json.loads(os.environ["TF_CONFIG"])["task"]["type"]
    os.write(2, b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\\n")
    os.write(2, b"E0000 00:00:1795427232.196302    3986 cuda_platform.cc:52] failed call to cuInit\\n")
    print("drawn", file=sys.stderr, end="\\r", flush=True)
    logging.getLogger("coordinator").info("a detail")
    logging.getLogger("coordinator").warning("a worker was lost")
    logging.getLogger("another").warning("a warning")
    assert "COORDINATOR_STARTUP" not in os.environ and "launch/startup" not in "".join(sys.path)
    raise ValueError(f"of the {role}:\\nI0000 00:00:1.2 3 x.cc:4] two lines")
"""
LOGGED = "failed call to cuInit"
# A line of a server. It is read from the server's log, and may come at any time between two writes of the program.
OF_SERVER = r"\r\x1b\[K\[(worker|ps) 0\] .*?\r\n"


def test_the_terminal_shows_the_programs_own_output_and_a_folder_has_the_logs(
    run: Run, environment: Environment, tmp_path: Path
) -> None:
    environment.pop("TF_CPP_MIN_LOG_LEVEL", None)
    folder = tmp_path / "some" / "logs"
    with run(OUTPUTS, options=["--log-dir", folder]) as command:
        assert command.wait_ended() == 1
    assert LOGGED not in command.output
    assert "absl::InitializeLog" not in command.output
    event = r"drawn\r\r\x1b\[K\d{4}-\d\d-\d\d [0-9:]{8} coordinator: a worker was lost\r\na warning\r\nTraceback"
    shown = re.sub(OF_SERVER, "", command.output)
    assert re.search(event, shown), command.output
    assert "\r\nValueError: of the chief:\r\nI0000 00:00:1.2 3 x.cc:4] two lines\r\n" in shown, command.output
    [logs] = [found for found in folder.iterdir() if not found.is_symlink()]
    assert (folder / "latest").resolve() == logs
    assert {log.name for log in logs.iterdir()} == {"worker-0.log", "ps-0.log", "fork-server.log", "chief-0.log"}
    assert LOGGED in (logs / "chief-0.log").read_text()


def test_logs_of_tensorflow_are_shown_on_request_and_none_is_kept_without_a_folder(
    run: Run, environment: Environment
) -> None:
    environment.pop("TF_CPP_MIN_LOG_LEVEL", None)
    source = f"import subprocess; subprocess.run('echo from a child >&2', shell=True)\n{textwrap.dedent(OUTPUTS)}"
    with run(source, options=["--verbose"]) as command:
        assert command.wait_ended() == 1
    assert "from a child\r\n" in command.output
    assert LOGGED in command.output
    assert not list(Path(environment["TMPDIR"]).iterdir())


# How a program or its libraries may configure logging, and what stands in a line before the message.
LOGGING = {
    "logging.warning('of a library')": "coordinator: ",
    "logging.basicConfig(format='mine %(message)s')": "mine ",
    "logging.getLogger('coordinator').addHandler(logging.StreamHandler())": r"\r\n",
    "import absl.logging; logging.basicConfig(); absl.logging.use_absl_handler()": r"W\d{4} [\d:.]+ .*py:\d+\] ",
}


def test_an_event_is_one_line_however_logging_is_configured_and_a_sitecustomize_runs(
    run: Run, environment: Environment, tmp_path: Path
) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "sitecustomize.py").write_text("print('customized')")
    environment["PYTHONPATH"] += f"{os.pathsep}{tmp_path / 'site'}"
    source = f"""
        import logging, os
        for configure in {[*LOGGING]}:
            if os.fork() == 0:
                exec(configure)
                for name in ("coordinator", "coordinator.events"):
                    logging.getLogger(name).warning("lost %s", configure[:30])
                os._exit(0)
            os.wait()
    """
    with run(source) as command:
        assert command.wait_ended() == 0
    assert command.output.partition("starting 1 worker")[2].count("customized") == 1
    for configure, before in LOGGING.items():
        line = rf"(?={before}lost {re.escape(configure[:30])}\r\n)"
        assert len(re.findall(line, command.output)) == 2, command.output
    assert command.output.count("lost") == 2 * len(LOGGING)


def test_tee_writes_output_to_the_logs_and_shows_the_logs_of_servers(run: Run, tmp_path: Path) -> None:
    source = """
        import json, os, sys
        role = json.loads(os.environ["TF_CONFIG"])["task"]["type"]
        # In one piece each, unbuffered too: a server's line may come between two pieces.
        sys.stdout.write(f"printed by {role} {[stream.isatty() for stream in (sys.stdout, sys.stderr)]}\\n")
        sys.stderr.write(f"warned by {role}\\n")
        if role == "chief":
            sys.exit(3) if os.environ["COORDINATOR_RESTART_COUNT"] == "0" else input("Enter: ")
    """
    options = ["--tee", "--log-dir", tmp_path, "--evaluator", "--restarts", 1]
    with run(source, options=options) as command:
        command.wait_output(r"\[worker 0\] coordinator: /job:worker/task:0 serves on")
        command.type("\n")
        assert command.wait_ended() == 0
    logs = {log.name: log.read_text() for log in (tmp_path / "latest").iterdir()}
    for name, prompt in (("chief-0.log", ""), ("chief-0.restart-1.log", "Enter: ")):
        assert logs[name] == f"printed by chief [True, True]\nwarned by chief\n{prompt}"
    assert logs["evaluator-0.log"] == "printed by evaluator [False, False]\nwarned by evaluator\n"
    # Lines of servers may be between the two.
    for line in ("printed by chief [True, True]\r\n", "warned by chief\r\n"):
        assert command.output.count(line) == 2
    assert "[evaluator] warned by evaluator\r\n" in command.output
