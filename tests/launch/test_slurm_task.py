"""The tasks of a step, started as `srun` starts them, with servers that start in a moment."""

import os
import secrets
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.launch.fake_tensorflow import write_fake_tensorflow

TIMEOUT = 120.0

PROGRAM = """
    import json, os, sys, time

    import psutil

    from coordinator.heartbeat.probes import TaskProbe

    config, what = json.loads(os.environ["TF_CONFIG"]), sys.argv[1]
    if what == "kill":
        probe = TaskProbe(config["cluster"]["worker"][0])
        before = probe.status(60).incarnation
        for process in psutil.process_iter(["environ"]):
            found = process.info["environ"] or {}
            if found.get("SLURM_JOB_ID") == os.environ["SLURM_JOB_ID"] and "TF_CONFIG" in found:
                if json.loads(found["TF_CONFIG"])["task"] == {"type": "worker", "index": 0}:
                    process.kill()
        while (status := probe.status(1)) is None or status.incarnation == before:
            time.sleep(0.01)
    assert "COORDINATOR_SLURM_KEY" not in os.environ
    print("chief", sorted(config["cluster"]), flush=True)
"""


class Step:
    """The tasks of a step with as many tasks as roles."""

    def __init__(self, folder: Path, count: int, *arguments: str, nodes: int = 1, key: str = "secret") -> None:
        program = folder / "program.py"
        program.write_text(textwrap.dedent(PROGRAM))
        fake = write_fake_tensorflow(folder / "fake")
        self.job = secrets.token_hex()
        numbers = {"STEP_ID": 0, "STEP_NUM_TASKS": count, "STEP_NUM_NODES": nodes}
        environment = {f"SLURM_{name}": str(number) for name, number in numbers.items()}
        environment |= {"SLURM_JOB_ID": self.job, "SLURM_STEP_NODELIST": "here"}
        environment |= {"COORDINATOR_SLURM_KEY": key} if key else {}
        environment["PYTHONPATH"] = os.pathsep.join([fake, os.environ["PYTHONPATH"]])
        # What Slurm would say of the nodes.
        (folder / "scontrol").write_text("#!/bin/sh\necho 127.0.0.1\n")
        (folder / "scontrol").chmod(0o700)
        environment["PATH"] = os.pathsep.join([str(folder), os.environ["PATH"]])
        *options, what = arguments
        self.tasks = [
            subprocess.Popen(
                [sys.executable, "-m", "coordinator", "slurm", *options, program, what],
                env={**os.environ, **environment, "SLURM_PROCID": str(rank)},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(count)
        ]

    def outputs(self) -> list[str]:
        """Waits until all tasks have ended; returns what each has printed."""
        return [task.communicate(timeout=TIMEOUT)[0] for task in self.tasks]

    def codes(self) -> list[int]:
        """Returns their exit codes."""
        return [task.returncode for task in self.tasks]


@pytest.mark.parametrize("key", ["", pytest.param("secret", marks=pytest.mark.long)])
def test_a_killed_server_comes_back_and_all_end_with_the_program(tmp_path: Path, key: str) -> None:
    step = Step(tmp_path, 3, "kill", nodes=3 if key else 1, key=key)
    chief, ps, worker = step.outputs()
    assert step.codes() == [0, 0, 0]
    assert chief.endswith("[chief] chief ['chief', 'ps', 'worker']\n")
    warning = "coordinator: COORDINATOR_SLURM_KEY is not set: until all tasks have started"
    assert [warning in each for each in (chief, ps, worker)] == [not key, False, False]
    assert "[ps 0] coordinator: /job:ps/task:0 serves on 127.0.0.1:" in ps
    # The chief ended because the restarted server answered it; then the step may end before that server says so.
    assert "[worker 0] coordinator: /job:worker/task:0 serves on 127.0.0.1:" in worker
    ending = "ended unexpectedly, by SIGKILL (by the kernel, if memory ran out)"
    assert f"coordinator: /job:worker/task:0 {ending}: starting it again, restart 1 of 3.\n" in worker


@pytest.mark.long
def test_what_ends_a_step_before_it_begins_is_said_by_its_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step(tmp_path, 3, "--trace", "/none/trace.json", "0")
    chief, *others = step.outputs()
    assert (step.codes(), others) == ([2, 2, 2], ["", ""])
    assert chief.endswith(" coordinator: --trace must be a file in a folder that exists, got /none/trace.json.\n")
    monkeypatch.setenv("FAKE_BROKEN", "worker-0")
    (tmp_path / "other").mkdir()
    chief, _, worker = (step := Step(tmp_path / "other", 3, "0")).outputs()
    assert step.codes()[0] == step.codes()[2] == 1
    assert "/job:worker/task:0 (task 2 of the step) ended before it served" in chief
    assert "coordinator: /job:worker/task:0 ended with code 1 before it served.\n" in worker
