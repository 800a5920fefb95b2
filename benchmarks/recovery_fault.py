"""The faults: what each does to a cluster whose client is training, and which event is waited for afterwards.

Each ends with its clients closed and no server frozen; `mend` restarts dead servers for the next.
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
    """One side on a cluster, with a timeout.

    Attributes:
      side: `ours` or `peer`.
      cluster: of `WORKERS` workers and one parameter server; all of them answer.
      client_address: a free `host:port` for the client; a second client reuses it.
      folder: an empty folder.
      limit: the timeout of each wait, in seconds.
    """

    side: str
    cluster: LocalCluster
    client_address: str
    folder: pathlib.Path
    limit: float

    def new_client(self) -> ClientProcess:
        """Starts a client; a second one continues from the first one's checkpoint."""
        return ClientProcess(self.side, {**self.cluster.spec, "chief": [self.client_address]}, self.folder)

    def wait_step(
        self, client: ClientProcess, *, hurt_at: float, since: float | None = None, workers: Sequence[int] = _ALL
    ) -> Outcome:
        """Waits for a step that began after the fault and has a result.

        Args:
          client: a client that is training.
          hurt_at: when the fault began, in seconds since the epoch.
          since: what the seconds count from; None for the fault.
          workers: only steps of these workers count.
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
      waits: descriptions of the events that are waited for, a row of the table for each.
      inject: injects it once, and returns an outcome for each of `waits`.
    """

    name: str
    waits: tuple[str, ...]
    inject: Callable[[Trial], tuple[Outcome, ...]]


def is_step_of(event: Event, workers: Sequence[int], *, after: float) -> bool:
    """Returns True for the result of a step of one of these workers that began after a time."""
    return event.kind == "step" and event.worker in workers and event.began is not None and event.began > after


def mend(cluster: LocalCluster) -> None:
    """Restarts every dead server, and returns when all answer.

    Raises:
      LaunchError: a server did not start.
    """
    dead = [server for server in cluster.processes if not cluster.is_alive(*server)]
    for job, index in dead:
        cluster.restart(job, index, wait=False)
    for job, index in dead:
        cluster.wait_ready(job, index)


def kill_busy_worker(trial: Trial) -> tuple[Outcome, ...]:
    """Kills a worker while it runs a function."""
    with trial.new_client() as client:
        client.wait_warm(WORKERS)
        busy = client.wait_held()
        hurt_at = time.time()
        trial.cluster.kill("worker", busy)
        others = trial.wait_step(client, hurt_at=hurt_at, workers=[index for index in _ALL if index != busy])
        own = client.wait_outcome(lambda event: event.kind == "held", hurt_at=hurt_at, since=hurt_at, limit=trial.limit)
        return others, own


def restart_worker(trial: Trial) -> tuple[Outcome, ...]:
    """Kills and restarts a worker."""
    with trial.new_client() as client:
        client.wait_warm(WORKERS)
        hurt_at = time.time()
        trial.cluster.restart("worker", 0)
        return (trial.wait_step(client, hurt_at=hurt_at, since=time.time(), workers=[0]),)


def restart_one_of_two_workers(trial: Trial) -> tuple[Outcome, ...]:
    """Kills two workers and restarts one of them."""
    with trial.new_client() as client:
        client.wait_warm(WORKERS)
        hurt_at = time.time()
        for index in (0, 1):
            trial.cluster.kill("worker", index)
        trial.cluster.restart("worker", 0)
        return (trial.wait_step(client, hurt_at=hurt_at, since=time.time(), workers=[0]),)


def freeze_busy_worker(trial: Trial) -> tuple[Outcome, ...]:
    """Freezes a worker while it runs a function, and joins."""
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
        # Thawed, it would continue the held function.
        trial.cluster.kill("worker", busy)
        return (joined,)


def restart_parameter_server(trial: Trial) -> tuple[Outcome, ...]:
    """Kills and restarts the parameter server, which loses its variables."""
    with trial.new_client() as client:
        client.wait_warm(WORKERS)
        hurt_at = time.time()
        trial.cluster.restart("ps", 0)
        return (trial.wait_step(client, hurt_at=hurt_at, since=time.time()),)


def freeze_parameter_server(trial: Trial) -> tuple[Outcome, ...]:
    """Freezes the parameter server for `FROZEN_SECONDS`."""
    with trial.new_client() as client:
        client.wait_warm(WORKERS)
        hurt_at = time.time()
        trial.cluster.freeze("ps", 0)
        # The duration of the fault.
        time.sleep(FROZEN_SECONDS)
        thawed_at = time.time()
        trial.cluster.thaw("ps", 0)
        # Steps that ran when it froze get their results now, as does one that began just after.
        return (trial.wait_step(client, hurt_at=hurt_at, since=thawed_at),)


def restart_client(trial: Trial) -> tuple[Outcome, ...]:
    """Kills and restarts the client, which continues from its checkpoint."""
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
