"""Three servers in a dictionary, and a handshake, a lease, a goodbye and sentinel variables that call no server."""

import contextlib
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import SimpleNamespace

import tensorflow as tf

from coordinator.errors import VersionMismatchError
from coordinator.heartbeat.heartbeat_process import Liveness, ServerState
from coordinator.heartbeat.probes import Link, Obstacle, TaskStatus
from coordinator.ps_strategy.membership.cluster_change import Connection
from coordinator.ps_strategy.membership.cluster_definition import Task

PS, FIRST, SECOND = Task("ps", 0), Task("worker", 0), Task("worker", 1)
ADDRESSES = {PS: "ps:1", FIRST: "first:1", SECOND: "second:1"}
TASKS = {address: task for task, address in ADDRESSES.items()}
UNAVAILABLE = tf.errors.UnavailableError(None, None, "Connection refused")


class FakeServers:
    """Servers that answer with an incarnation, or do not; and the server definitions that TensorFlow was given."""

    def __init__(self) -> None:
        # Of the servers that answer.
        self.incarnations = dict.fromkeys(ADDRESSES, 1)
        # The tasks in each server definition, and what is called with them before such an update is made.
        self.server_defs: list[set[Task]] = []
        self.before_update = lambda tasks: None
        # When each address was last found silent, and which are silent now.
        self.silences: dict[str, float] = {}
        self.silent: set[str] = set()
        self.with_gpu: set[Task] = set()
        # The links that are broken.
        self.cut: set[Link] = set()

    def broken(self, links: Collection[Link]) -> dict[Link, str]:
        return dict.fromkeys(self.cut & set(links), "no answer for 5 s")

    # What the heartbeat does.

    def close(self) -> None: ...

    def watch(self, address: str) -> None: ...

    def forget(self, address: str) -> None: ...

    def state(self, address: str) -> ServerState:
        last, incarnation = self.silences.get(address, 0.0), self.incarnations.get(TASKS[address])
        if address in self.silent:
            return ServerState(Liveness.SILENT, obstacle=Obstacle.SILENT, last_silence=last)
        if incarnation is None:
            return ServerState(Liveness.GONE, obstacle=Obstacle.REFUSED, last_silence=last)
        return ServerState(Liveness.ANSWERING, incarnation, last_silence=last)

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
        task = TASKS[address]

        def status() -> TaskStatus | None:
            devices = "CPU:0", *(["GPU:0"] if task in self.with_gpu else [])
            return TaskStatus(self.incarnations[task], devices) if task in self.incarnations else None

        return SimpleNamespace(begin_status=lambda timeout: status, close=lambda: None)


class FakeHandshake:
    """Admits all but those that a test excludes, by their addresses."""

    def __init__(self, *_: object) -> None:
        self.excluded: set[str] = set()
        self.refused: dict[int, VersionMismatchError] = {}

    def check_devices(self, *_: object) -> None: ...

    def admit(self, new: Mapping[Task, Connection], addresses: Mapping[Task, str]) -> dict[Task, Connection]:
        return {task: connection for task, connection in new.items() if addresses[task] not in self.excluded}


class FakeLease:
    """Is renewed on no server."""

    def __init__(self, *_: object) -> None:
        # Addresses of those that freed what the client had created there; a new connection ends that.
        self.freed_on: set[str] = set()
        self.held: set[str] = set()

    def hold(self, addresses: Collection[str]) -> None:
        self.freed_on -= set(addresses)
        self.held = set(addresses)

    def freed(self, addresses: Collection[str]) -> set[str]:
        return self.freed_on & set(addresses)

    def close(self) -> None: ...


class FakeGoodbye:
    """Is not said."""

    def __init__(self, *_: object) -> None:
        self.addresses: set[str] = set()

    def strategy_closes(self) -> None: ...


class FakeSentinels:
    """A test decides which are lost, and which servers do not reach each other."""

    reachable = True
    apart = False
    # At the next change of the cluster, all of them.
    lossy = False

    def __init__(self, longest_call: float) -> None:
        self.placed: set[int] = set()
        # Workers that do not reach the parameter servers.
        self.unreaching: set[Task] = set()

    def place(self, devices: Mapping[int, str]) -> set[int]:
        self.placed = set(devices)
        return set()

    def are_reachable(self, numbers: Collection[int]) -> bool:
        assert set(numbers) <= self.placed
        return self.reachable

    def unreached_from(self, workers: Sequence[Task], numbers: Sequence[int]) -> list[Task]:
        assert set(numbers) <= self.placed
        return [worker for worker in workers if worker in self.unreaching]

    def reach_each_other(self, numbers: Sequence[int]) -> bool:
        assert set(numbers) <= self.placed
        return not self.apart

    def gone(self, numbers: Collection[int]) -> set[int]:
        assert set(numbers) <= self.placed
        return set(numbers) if self.lossy else set()
