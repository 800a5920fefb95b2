"""The faults: what each does to a cluster whose client is training, and what is waited for afterwards.

Each ends with its clients gone and no server frozen; one that is dead is started again for the next (`mend`).
"""

import dataclasses
import pathlib
import time
from collections.abc import Callable, Sequence

from benchmarks.recovery_outcome import Event, Outcome
from benchmarks.recovery_process import ClientProcess
from coordinator.testing import LocalCluster

WORKERS = 3
_ALL = tuple(range(WORKERS))
FROZEN_SECONDS = 8.0


@dataclasses.dataclass
class Trial:
    """One side on a cluster, and a limit to what it is waited for.

    Attributes:
      side: `ours` or `peer`.
      cluster: of `WORKERS` workers and one parameter server; all of them answer.
      client_address: `host:port` of the client, free for it; a second client takes it over.
      folder: an empty folder.
      limit: how long to wait for each thing, in seconds.
    """

    side: str
    cluster: LocalCluster
    client_address: str
    folder: pathlib.Path
    limit: float

    def new_client(self) -> ClientProcess:
        """Starts a client; a second one goes on from the first one's checkpoint."""
        return ClientProcess(self.side, {**self.cluster.spec, "chief": [self.client_address]}, self.folder)

    def wait_step(
        self, client: ClientProcess, *, hurt_at: float, since: float | None = None, workers: Sequence[int] = _ALL
    ) -> Outcome:
        """Waits for a step that began after the fault and has a result.

        Args:
          client: trains.
          hurt_at: when the fault began, in seconds since the epoch.
          since: what the seconds count from; None for the fault.
          workers: the step is one of theirs.
        """
        return client.wait_outcome(
            lambda event: is_step_of(event, workers, after=hurt_at),
            hurt_at=hurt_at,
            since=hurt_at if since is None else since,
            limit=self.limit,
        )


@dataclasses.dataclass(frozen=True)
class Fault:
    """A kind of fault.

    Attributes:
      name: what `--only` takes.
      waits: what is waited for, a row of the table for each.
      inject: makes it happen once, and says what came of it, an outcome for each of `waits`.
    """

    name: str
    waits: tuple[str, ...]
    inject: Callable[[Trial], tuple[Outcome, ...]]


def is_step_of(event: Event, workers: Sequence[int], *, after: float) -> bool:
    """Whether a step of one of these workers, which began after a time, has a result."""
    return event.kind == "step" and event.worker in workers and event.began is not None and event.began > after


def mend(cluster: LocalCluster) -> None:
    """Starts every dead server again, and returns when all answer.

    Raises:
      LaunchError: one did not come up.
    """
    dead = [server for server in cluster.processes if not cluster.is_alive(*server)]
    for job, index in dead:
        cluster.restart(job, index, wait=False)
    for job, index in dead:
        cluster.wait_ready(job, index)


def kill_busy_worker(trial: Trial) -> tuple[Outcome, ...]:
    """A worker is killed while it runs a function."""
    with trial.new_client() as client:
        client.wait_warm(WORKERS)
        busy = client.wait_held()
        hurt_at = time.time()
        trial.cluster.kill("worker", busy)
        others = trial.wait_step(client, hurt_at=hurt_at, workers=[index for index in _ALL if index != busy])
        own = client.wait_outcome(lambda event: event.kind == "held", hurt_at=hurt_at, since=hurt_at, limit=trial.limit)
        return others, own


def restart_worker(trial: Trial) -> tuple[Outcome, ...]:
    """A worker is killed and started again."""
    with trial.new_client() as client:
        client.wait_warm(WORKERS)
        hurt_at = time.time()
        trial.cluster.restart("worker", 0)
        return (trial.wait_step(client, hurt_at=hurt_at, since=time.time(), workers=[0]),)


def restart_one_of_two_workers(trial: Trial) -> tuple[Outcome, ...]:
    """Two workers are killed, and one of them is started again."""
    with trial.new_client() as client:
        client.wait_warm(WORKERS)
        hurt_at = time.time()
        for index in (0, 1):
            trial.cluster.kill("worker", index)
        trial.cluster.restart("worker", 0)
        return (trial.wait_step(client, hurt_at=hurt_at, since=time.time(), workers=[0]),)


def freeze_busy_worker(trial: Trial) -> tuple[Outcome, ...]:
    """A worker stands still while it runs a function, and the program joins."""
    with trial.new_client() as client:
        client.wait_warm(WORKERS)
        client.send("pause")
        busy = client.wait_held()
        hurt_at = time.time()
        trial.cluster.freeze("worker", busy)
        client.send("join")
        joined = client.wait_outcome(
            lambda event: event.kind == "joined", hurt_at=hurt_at, since=hurt_at, limit=trial.limit
        )
        # Thawed, it would go on with the function that held it up.
        trial.cluster.kill("worker", busy)
        return (joined,)


def restart_parameter_server(trial: Trial) -> tuple[Outcome, ...]:
    """The parameter server is killed and started again, without its variables."""
    with trial.new_client() as client:
        client.wait_warm(WORKERS)
        hurt_at = time.time()
        trial.cluster.restart("ps", 0)
        return (trial.wait_step(client, hurt_at=hurt_at, since=time.time()),)


def freeze_parameter_server(trial: Trial) -> tuple[Outcome, ...]:
    """The parameter server stands still for `FROZEN_SECONDS` and goes on."""
    with trial.new_client() as client:
        client.wait_warm(WORKERS)
        hurt_at = time.time()
        trial.cluster.freeze("ps", 0)
        # The fault itself; nothing is waited for.
        time.sleep(FROZEN_SECONDS)
        thawed_at = time.time()
        trial.cluster.thaw("ps", 0)
        # Steps that were under way when it froze have results now, and so has one that began just after.
        return (trial.wait_step(client, hurt_at=hurt_at, since=thawed_at),)


def restart_client(trial: Trial) -> tuple[Outcome, ...]:
    """The client is killed and started again, and goes on from its checkpoint."""
    with trial.new_client() as client:
        client.wait_warm(WORKERS)
    with trial.new_client() as client:
        client.send("feed")
        return (trial.wait_step(client, hurt_at=client.started_at),)


FAULTS = (
    Fault(
        "worker-killed",
        (
            "a worker is killed in a function: until another worker's next result",
            "a worker is killed in a function: until that function's own result",
        ),
        kill_busy_worker,
    ),
    Fault(
        "worker-restarted",
        ("a worker is killed and restarted: from its server's answer to a result of it",),
        restart_worker,
    ),
    Fault(
        "two-workers-killed",
        ("two are killed, one is restarted: from its server's answer to a result of it",),
        restart_one_of_two_workers,
    ),
    Fault(
        "worker-frozen",
        ("a worker freezes in a function, and stays so: until join returns",),
        freeze_busy_worker,
    ),
    Fault(
        "ps-restarted",
        ("the parameter server is killed and restarted: from its answer to a result",),
        restart_parameter_server,
    ),
    Fault(
        "ps-frozen",
        (f"the parameter server freezes for {FROZEN_SECONDS:g} s: from its thaw to a result",),
        freeze_parameter_server,
    ),
    Fault(
        "client-restarted",
        ("the client is killed and restarted: from its exec to a result",),
        restart_client,
    ),
)
