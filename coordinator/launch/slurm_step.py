"""The step of a Slurm job in which this process is a task: which role it has, and where the others are.

task 0                  chief: runs the program
1 .. ps                 parameter servers
the rest                workers
the last, if wanted     evaluator
"""

import dataclasses
import os
import re
import socket
import subprocess
from collections.abc import Mapping

from coordinator.errors import LaunchError

# A secret, the same for all tasks, that only the user's own processes can read.
KEY = "COORDINATOR_SLURM_KEY"


@dataclasses.dataclass(frozen=True)
class SlurmStep:
    """A task of a step, as Slurm's environment describes it.

    Attributes:
      name: of the step, which no other one of the cluster has.
      rank: the number of this task.
      tasks: how many tasks the step has.
      nodes: on how many nodes.
      node_list: these, as Slurm abbreviates them.
      key: by which its tasks know each other; empty if the user has set none.
    """

    name: str
    rank: int
    tasks: int
    nodes: int
    node_list: str
    key: bytes = dataclasses.field(default=b"", repr=False)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> "SlurmStep":
        """Reads the variables that `srun` sets, and the key.

        Raises:
          LaunchError: this process is no task of a step.
        """
        try:
            names = ("SLURM_CLUSTER_NAME", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT")
            return cls(
                name=".".join(environment.get(name, "") for name in names),
                rank=int(environment["SLURM_PROCID"]),
                tasks=int(environment["SLURM_STEP_NUM_TASKS"]),
                nodes=int(environment["SLURM_STEP_NUM_NODES"]),
                node_list=environment["SLURM_STEP_NODELIST"],
                key=os.fsencode(environment.get(KEY, "")),
            )
        except (KeyError, ValueError) as error:
            raise LaunchError(
                f"This is no task of a Slurm step ({error} is not set as srun does it). Start it by srun: "
                "srun --ntasks 6 coordinator slurm --ps 2 program.py"
            ) from None

    def workers(self, ps: int, *, evaluator: bool) -> int:
        """Returns how many tasks are workers.

        Raises:
          LaunchError: there are too few tasks for one.
        """
        others = 1 + ps + evaluator
        if self.tasks <= others:
            roles = f"a chief, {ps} parameter servers and {'an evaluator' if evaluator else 'no evaluator'}"
            raise LaunchError(
                f"The step has {self.tasks} tasks. {roles.capitalize()} leave none for a worker: give srun --ntasks "
                f"{others + 1} or more."
            )
        return self.tasks - others

    def first_host(self) -> str:
        """Returns the host of task 0: a name that resolves, or an IP address.

        Raises:
          LaunchError: Slurm's own command does not say it.
        """
        if self.nodes == 1:
            return "127.0.0.1"
        node = _scontrol("hostnames", self.node_list).split()[0]
        try:
            socket.getaddrinfo(node, None)
        except OSError:
            # The name of a node is Slurm's own, and need not be that of its host.
            found = re.search(r"NodeAddr=(\S+)", _scontrol("node", node))
            return found[1] if found else node
        return node


def role_of(rank: int, workers: int, ps: int) -> tuple[str, int]:
    """Returns the job and the index of a task."""
    if rank == 0:
        return "chief", 0
    if rank <= ps:
        return "ps", rank - 1
    return ("worker", rank - 1 - ps) if rank <= ps + workers else ("evaluator", 0)


def _scontrol(*what: str) -> str:
    command = ["scontrol", "show", *what]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise LaunchError(f"`{' '.join(command)}` failed: {error}. It is part of Slurm's client commands.") from None
    return done.stdout
