"""Three servers that are a dictionary, and what TensorFlow is told of them."""

import contextlib
import time
from collections.abc import Iterator
from types import SimpleNamespace

import tensorflow as tf

from coordinator.heartbeat.pulse import Pulse, PulseState
from coordinator.heartbeat.task_probe import TaskStatus
from coordinator.ps_strategy.membership.cluster_definition import Task

PS, FIRST, SECOND = Task("ps", 0), Task("worker", 0), Task("worker", 1)
ADDRESSES = {PS: "ps:1", FIRST: "first:1", SECOND: "second:1"}
UNAVAILABLE = tf.errors.UnavailableError(None, None, "Connection refused")


class FakeServers:
    """Servers that answer with an incarnation, or do not; and what TensorFlow was told of them.

    Attributes:
      incarnations: of the servers that answer.
      named: the tasks that each change of the membership named.
      before_naming: called with the named tasks before such a change is made.
      silences: when each address was last hung up on.
      silent: the addresses that are silent now.
    """

    def __init__(self) -> None:
        self.incarnations = dict.fromkeys(ADDRESSES, 1)
        self.named: list[set[Task]] = []
        self.before_naming = lambda tasks: None
        self.silences: dict[str, float] = {}
        self.silent: set[str] = set()

    # What the heartbeat does.

    def start(self) -> None: ...

    def close(self) -> None: ...

    def watch(self, address: str) -> None: ...

    def forget(self, address: str) -> None: ...

    def is_silent(self, address: str) -> bool:
        return address in self.silent

    def last_silence(self, address: str) -> float:
        return self.silences.get(address, 0.0)

    def state(self, address: str) -> Pulse:
        [task] = (task for task in ADDRESSES if ADDRESSES[task] == address)
        if task not in self.incarnations:
            return Pulse(PulseState.GONE)
        return Pulse(PulseState.ANSWERING, self.incarnations[task])

    # What befalls the servers.

    def fall_silent(self, task: Task) -> None:
        self.silent.add(ADDRESSES[task])
        self.silences[ADDRESSES[task]] = time.monotonic()

    def kill(self, task: Task) -> None:
        del self.incarnations[task]

    def restart(self, task: Task) -> None:
        self.incarnations[task] = self.incarnations.get(task, 1) + 1

    @contextlib.contextmanager
    def dying_when_named(self, task: Task) -> Iterator[None]:
        """In this scope a server dies as soon as TensorFlow is told of a change."""
        self.before_naming = lambda tasks: self.incarnations.pop(task, None)
        yield
        self.before_naming = lambda tasks: None

    def update_server_def(self, definition, client_timeout) -> None:
        tasks = {Task(job.name, index) for job in definition.cluster.job for index in job.tasks if job.name != "chief"}
        self.before_naming(tasks)
        self.named.append(tasks)
        if not tasks <= set(self.incarnations):
            raise UNAVAILABLE

    def probe(self, address: str) -> SimpleNamespace:
        [task] = (task for task in ADDRESSES if ADDRESSES[task] == address)

        def status(timeout: float) -> TaskStatus | None:
            return TaskStatus(self.incarnations[task], ("CPU:0",)) if task in self.incarnations else None

        return SimpleNamespace(status=status, close=lambda: None)
