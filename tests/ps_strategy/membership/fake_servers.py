"""Three servers that are entries of a dictionary, and the server definitions that TensorFlow was given."""

import contextlib
import time
from collections.abc import Collection, Iterator
from types import SimpleNamespace

import tensorflow as tf

from coordinator.heartbeat.heartbeat_process import Liveness, ServerState
from coordinator.heartbeat.probes import Link, Obstacle, TaskStatus
from coordinator.ps_strategy.membership.cluster_definition import Task

PS, FIRST, SECOND = Task("ps", 0), Task("worker", 0), Task("worker", 1)
ADDRESSES = {PS: "ps:1", FIRST: "first:1", SECOND: "second:1"}
UNAVAILABLE = tf.errors.UnavailableError(None, None, "Connection refused")


class FakeServers:
    """Servers that answer with an incarnation, or do not; and the server definitions that TensorFlow was given.

    Attributes:
      incarnations: of the servers that answer.
      server_defs: the tasks in each server definition.
      before_update: called with the tasks before such an update is made.
      silences: when each address was last found silent.
      silent: the addresses that are silent now.
      with_gpu: the tasks that have a GPU.
      cut: the links that are broken.
    """

    def __init__(self) -> None:
        self.incarnations = dict.fromkeys(ADDRESSES, 1)
        self.server_defs: list[set[Task]] = []
        self.before_update = lambda tasks: None
        self.silences: dict[str, float] = {}
        self.silent: set[str] = set()
        self.with_gpu: set[Task] = set()
        self.cut: set[Link] = set()

    def broken(self, links: Collection[Link]) -> dict[Link, str]:
        """Does what `ServerLinks.broken` does."""
        return dict.fromkeys(self.cut & set(links), "no answer for 5 s")

    # What the heartbeat does.

    def close(self) -> None: ...

    def watch(self, address: str) -> None: ...

    def forget(self, address: str) -> None: ...

    def state(self, address: str) -> ServerState:
        [task] = (task for task in ADDRESSES if ADDRESSES[task] == address)
        last_silence = self.silences.get(address, 0.0)
        if address in self.silent:
            return ServerState(Liveness.SILENT, obstacle=Obstacle.SILENT, last_silence=last_silence)
        if task not in self.incarnations:
            return ServerState(Liveness.GONE, obstacle=Obstacle.REFUSED, last_silence=last_silence)
        return ServerState(Liveness.ANSWERING, self.incarnations[task], last_silence=last_silence)

    # What happens to the servers.

    def fall_silent(self, task: Task) -> None:
        self.silent.add(ADDRESSES[task])
        self.silences[ADDRESSES[task]] = time.monotonic()

    def kill(self, task: Task) -> None:
        del self.incarnations[task]

    def restart(self, task: Task) -> None:
        self.incarnations[task] = self.incarnations.get(task, 1) + 1

    @contextlib.contextmanager
    def dying_during_update(self, task: Task) -> Iterator[None]:
        """In this scope a server dies as soon as TensorFlow updates its server definition."""
        self.before_update = lambda tasks: self.incarnations.pop(task, None)
        yield
        self.before_update = lambda tasks: None

    def update_server_def(self, definition, client_timeout) -> None:
        tasks = {Task(job.name, index) for job in definition.cluster.job for index in job.tasks if job.name != "chief"}
        self.before_update(tasks)
        self.server_defs.append(tasks)
        if not tasks <= set(self.incarnations):
            raise UNAVAILABLE

    def probe(self, address: str) -> SimpleNamespace:
        [task] = (task for task in ADDRESSES if ADDRESSES[task] == address)

        def status() -> TaskStatus | None:
            devices = "CPU:0", *(["GPU:0"] if task in self.with_gpu else [])
            return TaskStatus(self.incarnations[task], devices) if task in self.incarnations else None

        return SimpleNamespace(begin_status=lambda timeout: status, close=lambda: None)
