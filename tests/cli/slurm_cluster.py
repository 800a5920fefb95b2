"""A real Slurm on this machine: a controller and three nodes, in a folder, with a munge of its own."""

import contextlib
import getpass
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator

from coordinator.launch.server_process import free_addresses
from tests import ROOT
from tests.deadline import wait_until

TIMEOUT = 300.0
_DAEMONS = ("munged", "slurmctld", "slurmd")
_PACKAGES = ("slurm-wlm", "munge")

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


def install() -> None:
    """Installs Slurm, if it is not there."""
    path = f"{os.environ['PATH']}:/usr/sbin"
    if not all(shutil.which(daemon, path=path) for daemon in _DAEMONS):
        subprocess.run(["apt-get", "update"], check=False, capture_output=True)
        command = ["apt-get", "install", "--yes", "--no-install-recommends", *_PACKAGES]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        assert done.returncode == 0, (
            f"THE TESTS ON A REAL SLURM DID NOT RUN: it is not installed here, and `{' '.join(command)}` failed:\n"
            f"{done.stderr}"
        )


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
