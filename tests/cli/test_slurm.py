"""`coordinator slurm` on a real Slurm: a controller and three nodes on this machine."""

import os
import pathlib
import tempfile
import textwrap
from collections.abc import Iterator

import pytest

from coordinator.cli.command_line import main
from tests.cli.slurm_cluster import SlurmCluster, install

PROGRAM = """
    import json, os, sys, time

    import psutil

    task = json.loads(os.environ["TF_CONFIG"])
    if task["task"]["type"] == "evaluator":
        print("evaluates", flush=True)
        sys.exit(0)

    import tensorflow as tf

    import coordinator

    def kill_worker():
        for process in psutil.process_iter(["environ"]):
            found = process.info["environ"] or {}
            if found.get("SLURM_JOB_ID") == os.environ["SLURM_JOB_ID"] and found.get("TF_CONFIG"):
                if json.loads(found["TF_CONFIG"])["task"] == {"type": "worker", "index": 1}:
                    process.kill()
                    return

    folder, what = sys.argv[1:]
    strategy = coordinator.ParameterServerStrategy(tf.distribute.cluster_resolver.TFConfigClusterResolver())
    with strategy.scope():
        count = tf.Variable(0)
    checkpoints = coordinator.Checkpoints(tf.train.Checkpoint(count=count), folder)
    checkpoints.checkpoint.restore(checkpoints.latest)
    strategy.restore_from(checkpoints)

    @tf.function
    def step():
        return count.assign_add(1)

    with strategy, coordinator.checkpoints.save_at_signals(lambda: checkpoints.save(now=True)):
        for _ in range(100):
            strategy.schedule(step)
        strategy.join()
        if what == "kill":
            kill_worker()
            assert strategy.schedule(step, worker=1).result(240) > 100
            print("worker 1 is back", flush=True)
        if what == "wait":
            print("waits", flush=True)
            time.sleep(600)
        print("count", count.numpy(), flush=True)
    sys.exit(int(what) if what.isdecimal() else 0)
"""


@pytest.fixture(scope="module")
def slurm() -> Iterator[SlurmCluster]:
    install()
    # A short path, for sockets.
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        # Munge asks for that of the folder of its socket.
        os.chmod(folder, 0o755)  # noqa: S103 - nothing in it is secret but one file
        with SlurmCluster(pathlib.Path(folder)).running() as cluster:
            yield cluster


@pytest.fixture
def step(tmp_path: pathlib.Path) -> str:
    """What follows `srun`, but for the last argument of the program."""
    program = tmp_path / "program.py"
    program.write_text(textwrap.dedent(PROGRAM))
    outputs = f"--dashboard 127.0.0.1:0 --trace {tmp_path}/trace.json"
    return f"coordinator slurm --ps 2 --evaluator {outputs} {program} {tmp_path}/checkpoints"


@pytest.mark.release
@pytest.mark.timeout(900)
def test_a_killed_worker_comes_back_and_the_job_ends_with_code_0(
    slurm: SlurmCluster, step: str, tmp_path: pathlib.Path
) -> None:
    job = slurm.submit(f"{step} kill")
    assert slurm.exit_code(job) == 0, slurm.output(job)
    output = slurm.output(job)
    for words in ("[chief] worker 1 is back", "[chief] count 101", "[evaluator] evaluates", "[ps 1] coordinator: "):
        assert words in output
    assert (
        "/job:worker/task:1 ended unexpectedly, by SIGKILL (by the kernel, if memory ran out): starting it again"
        in output
    )
    assert '"lost"' in (tmp_path / "trace.json").read_text()
    assert "coordinator: the dashboard is at http://127.0.0.1:" in output
    assert slurm.call("squeue", "--noheader") == ""


@pytest.mark.release
@pytest.mark.timeout(900)
def test_a_job_that_is_ended_saves_first_and_continues_when_it_is_started_again(slurm: SlurmCluster, step: str) -> None:
    job = slurm.submit(f"{step} wait")
    slurm.wait_output(job, "waits")
    slurm.call("scancel", "--signal=TERM", f"{job}.0")
    assert slurm.exit_code(job) == 143, slurm.output(job)
    # The signal of `--signal` comes up to a minute early.
    job = slurm.submit(f"{step} wait", "--time=2", "--signal=USR1@30")
    assert slurm.exit_code(job) == 138, slurm.output(job)
    # The exit code of the job is that of the program.
    job = slurm.submit(f"{step} 7")
    assert slurm.exit_code(job) == 7, slurm.output(job)
    assert "[chief] count 300" in slurm.output(job)
    assert slurm.call("squeue", "--noheader") == ""


@pytest.mark.parametrize("arguments", [["--trace", "/none/trace.json", __file__], ["/none/program.py"]])
def test_a_server_needs_no_files_of_the_program_on_its_node(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    step = {"PROCID": "1", "STEP_NUM_TASKS": "3", "STEP_NUM_NODES": "1", "STEP_NODELIST": "node1"}
    for name, value in step.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    assert main(["slurm", "--start-timeout", "0.1", *arguments]) == 1
    assert "The first task, on 127.0.0.1, did not answer within 0.1 s." in capsys.readouterr().err
