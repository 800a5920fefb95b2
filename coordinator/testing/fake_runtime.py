"""A cluster in memory whose workers run Python callables, with faults on request.

    runtime = FakeRuntime(workers=2)
    scheduler = Scheduler(runtime, runtime, Options())    # the same object is the runtime and the servers
    gate = Gate(runtime)
    future = scheduler.schedule(gate, "step")             # calls gate(worker), which waits and returns the index
    gate.wait_arrived()                                   # a worker runs the call now
    runtime.kill(0)                                       # the call on worker 0 ends with WorkerLost
    gate.open()
    runtime.restart(0)

Nothing depends on the passage of time. A call ends when its work returns. A call that waits at a gate ends when the
gate is opened, the worker is killed, a parameter server is lost or the call is cancelled.
"""

import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from coordinator.errors import ClosureCancelledError, ClosureInputError, ParameterServerLost, TaskLost, WorkerLost
from coordinator.runtime import Builds, Cancellation, Failure, FailureKind, FiniteInput


class TransientError(Exception):
    """Raised by work, as if its call was refused although every task is alive."""


class EndOfDataError(Exception):
    """Raised by work when the worker's part of an input has ended."""

    def __init__(self, ended: FiniteInput | None = None) -> None:
        super().__init__("The data has ended.")
        self.ended = ended


class LinkLost(Exception):
    """Raised by a call that ends because a link of its worker is broken."""


class FakeCancellation:
    """Cancels the calls at gates that were started with this cancellation."""

    def __init__(self, changed: threading.Condition) -> None:
        self._changed = changed
        self.is_cancelled = False

    def cancel(self) -> None:
        """Cancels the calls. A repeated call of `cancel` does nothing."""
        with self._changed:
            self.is_cancelled = True
            self._changed.notify_all()


class FakeRuntime:
    """Runs `work(worker)` on the thread of each worker. Implements `Runtime` and `Servers` of `coordinator.runtime`.

    Args:
      workers: the number of workers.

    Attributes:
      is_closed: whether `close` was called.
      builds: the functions that are built in the background.
      prepared: worker -> the sizes that are ready there; None for all sizes.
      requested: the worker and the size of each request to prepare a call.
      fused_calls: the worker and the number of works of each fused call.
    """

    def __init__(self, workers: int = 2) -> None:
        self._addresses = {index: f"worker{index}:2222" for index in range(workers)}
        self.is_closed = False
        self.builds = Builds()
        self.prepared: dict[int, set[int]] | None = None
        self.requested: list[tuple[int, int]] = []
        self.fused_calls: list[tuple[int, int]] = []
        self.changed = threading.Condition()
        self._threads: dict[int, threading.Thread] = {}
        self._calls: dict[int, tuple[FakeCancellation, int]] = {}
        self._incarnations = dict.fromkeys(range(workers), 0)
        self._connected = dict.fromkeys(range(workers), 0)
        self._dead: set[int] = set()
        self._frozen: set[int] = set()
        self._hung_up: set[int] = set()
        self._lost_parameter_server: str | None = None
        self._cut: set[int] = set()
        self._given_up: set[int] = set()
        self._separation = ""

    def cut(self, worker: int) -> None:
        """Breaks the worker's link to the parameter server. Calls at gates on `worker` hang until `give_up`."""
        self._change(lambda: self._cut.add(worker))

    def mend(self, worker: int) -> None:
        """Undoes `cut`. A worker that was given up must be reconnected."""
        self._change(lambda: self._cut.discard(worker))

    def separate(self, words: str) -> None:
        """Breaks links between parameter servers: calls at gates hang until they are cancelled. "" mends the links."""
        self._change(lambda: setattr(self, "_separation", words))

    def kill(self, worker: int) -> None:
        """Makes present and later calls on `worker` raise `WorkerLost` until it is restarted and reconnected."""
        self._change(lambda: self._dead.add(worker))

    def restart(self, worker: int) -> None:
        """Starts another incarnation of `worker`, whether it is dead or not."""

        def start() -> None:
            self._dead.discard(worker)
            self._incarnations[worker] += 1

        self._change(start)

    def freeze(self, worker: int) -> None:
        """Makes calls at gates on `worker` hang until `hang_up`; the worker answers no probe."""
        self._change(lambda: self._frozen.add(worker))

    def hang_up(self, worker: int) -> None:
        """Shuts down the connection to a frozen worker, as the heartbeat does: calls to it end with `WorkerLost`."""
        self._change(lambda: self._hung_up.add(worker))

    def thaw(self, worker: int) -> None:
        """Undoes `freeze` and `hang_up`. After `hang_up` the worker must be reconnected."""

        def thaw() -> None:
            self._frozen.discard(worker)
            if worker in self._hung_up:
                self._hung_up.discard(worker)
                self._incarnations[worker] += 1

        self._change(thaw)

    @property
    def worker_addresses(self) -> Mapping[int, str]:
        """The address of each worker, by index."""
        return dict(self._addresses)

    @property
    def parameter_server_devices(self) -> Sequence[str]:
        """The name of the only parameter server."""
        return ["/job:ps/replica:0/task:0"]

    def worker_device(self, worker: int) -> str:
        """Returns the name of a worker."""
        return f"/job:worker/replica:0/task:{worker}"

    def add_worker(self, worker: int, address: str) -> None:
        """Adds a worker, which answers immediately."""

        def add() -> None:
            if address in self._addresses.values():
                raise ValueError(f"There is a worker at {address} already.")
            self._addresses[worker] = address
            self._incarnations[worker] = self._incarnations.get(worker, 0) + 1

        self._change(add)

    def move_worker(self, worker: int, address: str) -> None:
        """Replaces a worker by another incarnation, which must be reconnected."""
        self._addresses[worker] = address
        self.restart(worker)

    def move_parameter_server(self, index: int, address: str) -> None:  # noqa: ARG002 - there is one
        """Loses the parameter server, as `lose_parameter_server` does."""
        self.lose_parameter_server()

    def remove_worker(self, worker: int) -> None:
        """Removes a worker."""
        self._change(lambda: self._addresses.pop(worker))

    def lose_parameter_server(self, name: str = "/job:ps/replica:0/task:0") -> None:
        """Makes calls on every worker raise `ParameterServerLost` with this name."""
        self._change(lambda: setattr(self, "_lost_parameter_server", name))

    def restore_parameter_server(self) -> None:
        """Undoes `lose_parameter_server`."""
        self._change(lambda: setattr(self, "_lost_parameter_server", None))

    def bind_thread(self, worker: int) -> None:
        """Records the thread of a worker; `run` refuses other threads."""
        self._threads[worker] = threading.current_thread()

    def run(self, worker: int, work: Callable[[int], Any], cancellation: Cancellation) -> Any:
        """Returns `work(worker)`; raises a fault that came before or during the call."""
        return self._call(worker, lambda: work(worker), cancellation)

    def _call(self, worker: int, call: Callable[[], Any], cancellation: Cancellation) -> Any:
        assert self._threads[worker] is threading.current_thread(), "bind_thread comes before run, on the same thread"
        assert isinstance(cancellation, FakeCancellation)
        assert not self.is_closed, "run was called after close"
        with self.changed:
            self._calls[worker] = (cancellation, self._connected[worker])
            self._raise_fault(worker)
        result = call()
        with self.changed:
            self._raise_fault(worker)
        return result

    def most_fused(self, worker: int, work: Callable[[int], Any]) -> int:
        """Returns the result of the work's own `most_fused`, or no limit if the work has no such method."""
        return work.most_fused(worker) if hasattr(work, "most_fused") else sys.maxsize

    def ready(self, worker: int, work: Callable[[int], Any]) -> Mapping[int, float] | None:  # noqa: ARG002
        """Returns the sizes in `prepared`, with a building time of 0."""
        return None if self.prepared is None else dict.fromkeys(self.prepared.get(worker, ()), 0.0)

    def prepare(self, worker: int, work: Callable[[int], Any], like: Callable[[int], Any], count: int) -> None:  # noqa: ARG002
        """Records the request."""
        self.requested.append((worker, count))

    def run_fused(
        self, worker: int, works: Sequence[Callable[[int], Any]], cancellation: Cancellation
    ) -> Sequence[Any]:
        """Runs the works in order, as one call. The call raises the first error of a work."""
        self.fused_calls.append((worker, len(works)))
        return [self.run(worker, work, cancellation) for work in works]

    def run_steps(self, worker: int, work: Callable[[int], Any], count: int, cancellation: Cancellation) -> Any:
        """Returns `work(worker)` of each run. A fault is raised before the first run or after the last run."""
        self.fused_calls += [(worker, count)] * (count > 1)
        return self._call(worker, lambda: [work(worker) for _ in range(count)], cancellation)

    def classify(self, worker: int | None, error: BaseException) -> Failure:  # noqa: ARG002 - the class says all
        """Classifies an error by its class."""
        kinds = {
            ClosureCancelledError: FailureKind.CANCELLED,
            ClosureInputError: FailureKind.INPUT,
            WorkerLost: FailureKind.WORKER_LOST,
            ParameterServerLost: FailureKind.PARAMETER_SERVER_LOST,
            LinkLost: FailureKind.LINK_LOST,
            TransientError: FailureKind.TRANSIENT,
        }
        if isinstance(error, EndOfDataError):
            return Failure(FailureKind.END_OF_DATA, error, error.ended)
        return Failure(kinds.get(type(error), FailureKind.USER), error)

    def is_reachable(self, worker: int) -> bool:
        """Returns whether `worker` answers, and is still the incarnation to which `reconnect` connected."""
        with self.changed:
            is_silent = worker in self._frozen or worker in self._given_up
            return not is_silent and not self._is_lost(worker, self._connected.get(worker, -1))

    def seems_reachable(self, worker: int) -> bool:
        """Returns the same as `is_reachable`."""
        return self.is_reachable(worker)

    def seem_parameter_servers_reachable(self) -> bool:
        """Returns whether no parameter server was lost."""
        return self._lost_parameter_server is None

    def describe_loss(self, worker: int) -> str:
        """Returns that `worker` does not answer."""
        return f"{self._addresses.get(worker)} does not answer"

    def broken_links(self, workers: Collection[int]) -> Mapping[int, str]:
        """Returns the workers whose links `cut` has broken."""
        return {worker: "it does not reach the parameter server" for worker in workers if worker in self._cut}

    def separation(self) -> str:
        """Returns the words that `separate` was called with."""
        return self._separation

    def give_up(self, worker: int, why: str) -> None:  # noqa: ARG002 - tests know
        """Ends the running call on `worker` with `LinkLost`."""
        self._change(lambda: self._given_up.add(worker))

    def disconnect(self, worker: int) -> None:
        """Does nothing, because no call waits for a lost worker."""

    def reconnect(self, worker: int) -> bool:
        """Connects to the present incarnation of `worker`; returns False if it is dead, frozen or cut off."""
        with self.changed:
            if worker in self._dead or worker in self._frozen or worker in self._cut:
                return False
            self._given_up.discard(worker)
            self._connected[worker] = self._incarnations[worker]
            return True

    def lost_parameter_server(self) -> ParameterServerLost | None:
        """Returns the error that names the lost parameter server, or None."""
        name = self._lost_parameter_server
        return None if name is None else ParameterServerLost(name, f"{name} was lost.")

    def new_cancellation(self) -> FakeCancellation:
        """Returns a new, unused cancellation."""
        return FakeCancellation(self.changed)

    def close(self) -> None:
        """Refuses every further call."""
        self.is_closed = True

    def wait_at_gate(self, worker: int, is_open: Callable[[], bool]) -> None:
        """Blocks the worker's present call until `is_open()`, or raises the error that ended the call; see `Gate`."""
        with self.changed:
            while worker in self._frozen or worker in self._cut or self._separation or not is_open():
                if worker not in self._frozen or worker in self._hung_up:
                    self._raise_fault(worker)
                self.changed.wait()

    def _change(self, fault: Callable[[], object]) -> None:
        with self.changed:
            fault()
            self.changed.notify_all()

    def _is_lost(self, worker: int, incarnation: int) -> bool:
        return worker in self._dead or worker in self._hung_up or incarnation != self._incarnations[worker]

    def _raise_fault(self, worker: int) -> None:
        cancellation, incarnation = self._calls[worker]
        lost_server: TaskLost | None = self.lost_parameter_server()
        if lost_server is not None:
            raise lost_server
        if self._is_lost(worker, incarnation):
            raise WorkerLost(self.worker_device(worker), f"{self.worker_device(worker)} was lost.")
        if worker in self._given_up:
            raise LinkLost(f"{self.worker_device(worker)} does not reach the parameter server.")
        if cancellation.is_cancelled:
            raise ClosureCancelledError(f"The call on {self.worker_device(worker)} was cancelled.")


class Gate:
    """Work that waits until a test opens the gate, then returns the worker's index. Other work may call a gate, too."""

    def __init__(self, runtime: FakeRuntime) -> None:
        self._runtime = runtime
        self._is_open = False
        self._arrived = 0

    def __call__(self, worker: int) -> int:
        """Waits, on the thread of `worker`; raises the error that ends the call."""
        with self._runtime.changed:
            self._arrived += 1
            self._runtime.changed.notify_all()
        self._runtime.wait_at_gate(worker, lambda: self._is_open)
        return worker

    def open(self) -> None:
        """Lets waiting and later calls continue."""
        with self._runtime.changed:
            self._is_open = True
            self._runtime.changed.notify_all()

    def wait_arrived(self, count: int = 1, timeout: float = 30.0) -> None:
        """Waits at most `timeout` seconds until `count` calls have arrived since the gate was created.

        Raises:
          TimeoutError: fewer arrived.
        """
        with self._runtime.changed:
            if not self._runtime.changed.wait_for(lambda: self._arrived >= count, timeout):
                raise TimeoutError(f"{self._arrived} of {count} calls arrived at the gate within {timeout} s.")
