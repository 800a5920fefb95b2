"""What the core asks of the world outside: a `Runtime` that runs calls, and `Servers` that knows the cluster's tasks.

The core (queue, workers, scheduler) knows nothing of TensorFlow: it passes work to a `Runtime` and gets back a result
or an error, which the runtime classifies as one of a few kinds. `coordinator.ps_strategy` implements both protocols
over TensorFlow servers, `coordinator.testing.FakeRuntime` in memory with faults on request.

Guarantees that implementations give: `run` blocks its caller only, and returns when its server is lost, also a frozen
one; no other method that a worker calls raises; `reconnect` is safe from several threads. Workers are numbered by their
task index.

`Builds` has functions built in the background and prepared on workers, so that no closure waits for either. A call of
several steps has to be traced and registered on the client, and prepared on each worker that runs it, which takes from
tenths of a second to many seconds. No worker does so with closures in hand:

    a worker's thread      4 steps would pay --request--> builder's thread: traces and registers them, once for all
    the same, without      prepares them on the worker <------------------------'
    a closure in hand      uses them from then on

    worker 0   1 1 1 1 1 1 [4 prepared] 4 4 4 4 4 4 4
    worker 1   1 1 1 1 1 1  1  1  1  1 [4 prepared] 4

Guarantees: nothing waits for a build; at most a quarter of the workers, but at least one, prepare something at a time,
so that the others go on. What a worker prepares is an internal closure: `join` does not wait for it, and it ends when
the worker is lost or the strategy is closed.
"""

import dataclasses
import enum
import functools
import queue
import threading
from collections import deque
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from coordinator.errors import ParameterServerLost
from coordinator.future import Future


class Preparation(NamedTuple):
    """What a worker prepares by running some work, named for messages.

    `on_end` is called once it has been prepared, or never will be: the work failed, or the worker is lost.
    """

    worker: int
    work: Any
    name: str
    on_end: Callable[[], object] = lambda: None


class Builds:
    """What is built and prepared for the workers of one strategy. Any thread may use it.

    Attributes:
      workers: the number of workers, set by the cluster.
      schedule: queues the work of a preparation on its worker, as an internal closure; returns None if it can no longer
        run. Set by the scheduler.
    """

    def __init__(self) -> None:
        self.workers = 1
        self.schedule: Callable[[Preparation], Future | None] = lambda _: None
        self._requests: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        # A leaf: no other lock is taken while it is held.
        self._lock = threading.Lock()
        self._waiting: deque[Preparation] = deque()
        self._preparing = 0

    def request(self, build: Callable[[], object]) -> None:
        """Has the builder's thread call `build`, after all that was requested before."""
        self._requests.put(build)

    def next(self) -> Callable[[], object] | None:
        """Waits for the next request, for the builder's thread; returns None after `end`."""
        return self._requests.get()

    def end(self) -> None:
        """Ends the wait of `next`."""
        self._requests.put(None)

    def prepare(self, preparation: Preparation) -> None:
        """Has a worker prepare something once it has its turn."""
        with self._lock:
            self._waiting.append(preparation)
        self._begin()

    def _begin(self) -> None:
        """Begins what waits, as far as workers may prepare something now."""
        while True:
            with self._lock:
                if not self._waiting or self._preparing >= max(1, self.workers // 4):
                    return
                preparation = self._waiting.popleft()
                self._preparing += 1
            future = self.schedule(preparation)
            if future is None:
                self._end(preparation)
            else:
                future.add_done_callback(functools.partial(self._go_on, preparation))

    def _go_on(self, preparation: Preparation, _: Future) -> None:
        self._end(preparation)
        self._begin()

    def _end(self, preparation: Preparation) -> None:
        with self._lock:
            self._preparing -= 1
        preparation.on_end()


class FailureKind(enum.Enum):
    """Why a closure did not finish, which decides what happens next."""

    WORKER_LOST = "worker lost"
    PARAMETER_SERVER_LOST = "parameter server lost"
    LINK_LOST = "link between two servers lost"
    TRANSIENT = "transient"
    INPUT = "input could not be created"
    END_OF_DATA = "end of data"
    CANCELLED = "cancelled"
    USER = "user's own error"


class FiniteInput:
    """Data that closures take: an iterator with a copy on each worker. A worker's part may end.

    A closure that takes it runs only on workers whose part has not ended.

    Args:
      new_error: creates the error that is raised when it has ended on all workers; called without a lock.

    Attributes:
      is_finite: whether a worker's part may end, None until an iterator exists; set by the runtime.
      ended: the workers whose part has ended, each with the number of its reconnections until then. Guarded by the
        queue's lock.
    """

    __slots__ = ("ended", "is_finite", "new_error")

    def __init__(self, new_error: Callable[[], BaseException]) -> None:
        self.new_error = new_error
        self.is_finite: bool | None = None
        self.ended: dict[int, int] = {}


@dataclasses.dataclass(frozen=True)
class Failure:
    """One failed attempt, classified.

    Attributes:
      kind: why it failed.
      error: the exception to raise for it, which may name the cause better than the one that was caught.
      ended: the input whose part on the worker has ended, if that is why.
    """

    kind: FailureKind
    error: BaseException
    ended: FiniteInput | None = None


class FusionKey(NamedTuple):
    """Closures whose keys are equal may run in one call. Keys are compared under the queue's lock: plain values only.

    Attributes:
      function: identifies what they run; the time that a call takes is learned for each function.
      arguments: what their arguments must have in common.
    """

    function: Hashable
    arguments: Hashable


class Cancellation(Protocol):
    """Cancels every call that was started with it."""

    def cancel(self) -> None:
        """Cancels those calls; each ends soon with an error of kind CANCELLED. Calling it again does nothing."""


class Runtime(Protocol):
    """Runs work on numbered workers."""

    @property
    def builds(self) -> Builds:
        """What is built in the background."""

    def bind_thread(self, worker: int) -> None:
        """Prepares the calling thread to run work on `worker`; called once at the thread's start."""

    def run(self, worker: int, work: Any, cancellation: Cancellation) -> Any:
        """Runs `work` on `worker`; raises what went wrong.

        Returns:
          Its result: values on the client, or a `ValueElsewhere` if the call leaves its result on the worker.
        """

    def most_fused(self, worker: int, work: Any) -> int:
        """Returns how many works of the fusion key of `work` may run on `worker` in one call; 0 or 1 for none."""

    def ready(self, worker: int, work: Any) -> Mapping[int, float] | None:
        """Returns how many works like `work` may run on `worker` in one call without being built first.

        Returns:
          The numbers above 1, with the seconds that it has taken to build and prepare each; None for any number.
        """

    def prepare(self, worker: int, work: Any, like: Any, count: int) -> None:
        """Has a call of `count` works built and prepared, in the background; `ready` then has the number.

        `work` is the first of them; `like` is another work of the same fusion key, or the same again.
        """

    def run_fused(self, worker: int, works: Sequence[Any], cancellation: Cancellation) -> Sequence[Any]:
        """Runs works of one fusion key in one call, one after the other; returns their results.

        Raises what went wrong with any of them.
        """

    def run_steps(self, worker: int, work: Any, count: int, cancellation: Cancellation) -> Any:
        """Runs `work` `count` times in one call, one run after the other; returns the stacked results."""

    def classify(self, worker: int, error: BaseException) -> Failure:
        """Classifies an error that `run` raised on `worker`, by which tasks answer now."""

    def new_cancellation(self) -> Cancellation:
        """Returns a cancellation that was not used yet."""


class Servers(Protocol):
    """Knows the tasks of the cluster, and whether they answer."""

    @property
    def worker_addresses(self) -> Mapping[int, str]:
        """The address of each worker (`host:port`), by index."""

    @property
    def parameter_server_devices(self) -> Sequence[str]:
        """The names of the parameter servers, such as `/job:ps/replica:0/task:0`, by index."""

    def worker_device(self, worker: int) -> str:
        """Returns the name of a worker, such as `/job:worker/replica:0/task:0`."""

    def add_worker(self, worker: int, address: str) -> None:
        """Adds a worker; `reconnect` connects to it. Raises ValueError."""

    def move_worker(self, worker: int, address: str) -> None:
        """Changes the address of a worker, which counts as lost until `reconnect`. Raises ValueError."""

    def move_parameter_server(self, index: int, address: str) -> None:
        """Changes the address of a parameter server, which counts as lost until it is recovered. Raises ValueError."""

    def remove_worker(self, worker: int) -> None:
        """Removes a worker; nothing is run on it afterwards."""

    def is_reachable(self, worker: int) -> bool:
        """Probes `worker`; returns whether it answers and is the server to which we are connected."""

    def seems_reachable(self, worker: int) -> bool:
        """Returns the same by its last heartbeat. Never blocks. Safe from any thread; False for a removed worker."""

    def describe_loss(self, worker: int) -> str:
        """Returns the address of `worker`, which was lost, and words on what happened to it; for messages."""

    def broken_links(self, workers: Collection[int]) -> Mapping[int, str]:
        """Asks workers that answer whether they reach the parameter servers that answer, all at once.

        Returns:
          The workers that do not, each with words on it. Takes at most some `Options.heartbeat_timeout`.
        """

    def separation(self) -> str:
        """Asks the parameter servers whether they reach each other; returns words on it if they do not, or ""."""

    def give_up(self, worker: int, why: str) -> None:
        """Counts a worker as lost because one of its links is broken: what it runs fails with kind LINK_LOST.

        `reconnect` connects to it once the link is whole.
        """

    def disconnect(self, worker: int) -> None:
        """Disconnects from a worker that was lost, so that no call waits for it before it is reconnected."""

    def reconnect(self, worker: int) -> bool:
        """Tries once to connect to `worker` again after it was lost; returns False if it does not answer."""

    def lost_parameter_server(self) -> ParameterServerLost | None:
        """Returns the error that names a lost parameter server, if one is lost."""

    def seem_parameter_servers_reachable(self) -> bool:
        """Returns whether all parameter servers are reachable, by their last heartbeats. Never blocks."""

    def close(self) -> None:
        """Disconnects from every server. Nothing is run afterwards."""
