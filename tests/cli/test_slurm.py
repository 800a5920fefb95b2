"""`coordinator slurm` on a real Slurm: a controller and three nodes on this machine."""

import contextlib
import getpass
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator

import pytest

from coordinator.cli.command_line import main
from coordinator.launch.server_process import free_addresses
from tests import ROOT
from tests.deadline import wait_until

TIMEOUT = 300.0
_CONFIG = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SlurmdParameters=config_overrides
JobAcctGatherType=jobacct_gather/none
ReturnToService=2
MailProg=/bin/true
KillWait=60
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
"""


class SlurmCluster:
    """The running cluster."""

    def __init__(self, folder: pathlib.Path) -> None:
        self._folder = folder
        self._log = folder / "daemons.log"
        package = f"{ROOT}:{os.environ.get('PYTHONPATH', '')}"
        path = f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}:/usr/sbin"
        config = {"SLURM_CONF": str(folder / "slurm.conf"), "PATH": path, "PYTHONPATH": package}
        self._environment = {**os.environ, **config}
        # As users have it: the command leaves out what TensorFlow logs.
        self._environment.pop("TF_CPP_MIN_LOG_LEVEL", None)

    def submit(self, step: str, *options: str) -> str:
        """Submits a job of six tasks on three nodes; returns its number."""
        command = ["sbatch", "--parsable", "--nodes=3", "--ntasks=6", f"--output={self._folder}/%j.out", *options]
        return self.call(*command, "--wrap", f"exec srun {step}")

    def output(self, job: str) -> str:
        """Returns what a job has printed so far."""
        with contextlib.suppress(FileNotFoundError):
            return (self._folder / f"{job}.out").read_text()
        return ""

    def wait_output(self, job: str, text: str) -> None:
        """Waits until a job has printed a text."""
        wait_until(lambda: text in self.output(job), TIMEOUT)

    def exit_code(self, job: str) -> int:
        """Waits until no process of a job is left; returns its exit code."""
        wait_until(lambda: job not in self.call("squeue", "--noheader", "--format=%i").split(), TIMEOUT)
        found = dict(each.split("=", 1) for each in self.call("scontrol", "show", "job", job).split() if "=" in each)
        return int(found["ExitCode"].partition(":")[0])

    def call(self, *command: str) -> str:
        """Runs a command of Slurm; returns what it prints."""
        return subprocess.check_output(
            command, env=self._environment, cwd=self._folder, text=True, timeout=TIMEOUT
        ).strip()

    @contextlib.contextmanager
    def running(self) -> Iterator["SlurmCluster"]:
        """A scope in which the cluster runs; afterwards no daemon is left."""
        self._write_config()
        munge = ["--foreground", "--force", f"--socket={self._folder}/munge.socket"]
        munge += [f"--{name}-file={self._folder}/munge.{name}" for name in ("key", "pid", "seed")]
        with contextlib.ExitStack() as daemons:
            daemons.enter_context(self._daemon("munged", *munge))
            wait_until((self._folder / "munge.socket").exists)
            daemons.enter_context(self._daemon("slurmctld", "-D"))
            for node in (1, 2, 3):
                daemons.enter_context(self._daemon("slurmd", "-D", "-N", f"node{node}"))
            wait_until(lambda: self._idle_nodes() == 3, TIMEOUT)
            try:
                yield self
            finally:
                self.call("scancel", f"--user={getpass.getuser()}")
                # Processes of jobs outlive the daemons.
                wait_until(lambda: not self.call("squeue", "--noheader"), TIMEOUT)

    def _idle_nodes(self) -> int:
        try:
            return len(self.call("sinfo", "--noheader", "--Node", "--states=idle").splitlines())
        except subprocess.CalledProcessError:
            # The controller does not answer yet.
            return 0

    def _write_config(self) -> None:
        ports = [address.partition(":")[2] for address in free_addresses(4)]
        host = socket.gethostname()
        fields = {"host": host, "port": ports[0], "user": getpass.getuser(), "folder": self._folder}
        nodes = [
            f"NodeName=node{number} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs=4 State=UNKNOWN"
            for number, port in enumerate(ports[1:], start=1)
        ]
        partition = "PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP"
        (self._folder / "slurm.conf").write_text("\n".join([_CONFIG.format(**fields), *nodes, partition, ""]))
        (self._folder / "state").mkdir()
        key = self._folder / "munge.key"
        key.write_bytes(os.urandom(128))
        key.chmod(0o600)

    @contextlib.contextmanager
    def _daemon(self, *command: str) -> Iterator[None]:
        with self._log.open("ab") as log:
            process = subprocess.Popen(
                command, env=self._environment, cwd=self._folder, stdout=log, stderr=log, start_new_session=True
            )
        try:
            yield
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


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
    assert shutil.which("slurmctld", path=f"{os.environ['PATH']}:/usr/sbin"), "apt-get install slurm-wlm munge"
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
