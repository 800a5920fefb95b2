"""What the core needs from outside: a `Runtime` that runs calls, and `Servers` that knows the cluster's tasks.

The core (queue, workers, scheduler) knows nothing of TensorFlow: it passes work to a `Runtime` and gets back a result
or an error, which the runtime classifies. `coordinator.ps_strategy` implements both protocols over TensorFlow servers,
`coordinator.testing.FakeRuntime` in memory with faults on request.

Guarantees of an implementation: `run` blocks only its caller, and returns when its server is lost or frozen. No other
method that a worker calls raises. `reconnect` is safe from several threads. A worker's number is its task index.

`Builds` builds functions in the background and prepares them on workers, so no closure waits for either. A call of
several steps is traced and registered on the client, and prepared on each worker that runs it. That takes tenths of a
second to many seconds. No worker does it while it holds closures:

    a worker's thread      4 steps would pay --request--> builder's thread: traces and registers them, once for all
    the same, without      prepares them on the worker <------------------------'
    a closure in hand      uses them from then on

    worker 0   1 1 1 1 1 1 [4 prepared] 4 4 4 4 4 4 4
    worker 1   1 1 1 1 1 1  1  1  1  1 [4 prepared] 4

Guarantees: nothing waits for a build. At most a quarter of the workers, but at least one, prepare something at a time;
the others continue. A preparation is an internal closure: `join` does not wait for it, and it ends when the worker is
lost or the strategy is closed.
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
    """Work that prepares something on a worker, with a name for messages.

    `on_end` is called when it is prepared, or never will be because the work failed or the worker is lost.
    """

    worker: int
    work: Any
    name: str
    on_end: Callable[[], object] = lambda: None


class Builds:
    """Functions that are built and prepared for the workers of one strategy. Any thread may use it.

    The cluster sets `workers`, the number of workers. The scheduler sets `schedule`, which queues a preparation on its
    worker as an internal closure, and returns None if it can no longer run.
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
        """Queues `build` for the builder's thread, which calls requests in order."""
        self._requests.put(build)

    def next(self) -> Callable[[], object] | None:
        """Waits for the next request; returns None after `end`. For the builder's thread."""
        return self._requests.get()

    def end(self) -> None:
        """Ends the wait of `next`."""
        self._requests.put(None)

    def prepare(self, preparation: Preparation) -> None:
        """Prepares something on a worker when it is that worker's turn."""
        with self._lock:
            self._waiting.append(preparation)
        self._begin()

    def _begin(self) -> None:
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
    """Data that closures take: an iterator with a copy on each worker, whose part of the data may end.

    A closure runs only on workers where none of its inputs has ended.

    Args:
      new_error: creates the error to raise when the data has ended on all workers; called without a lock.

    Attributes:
      is_finite: whether a worker's part may end; None until an iterator exists. Set by the runtime.
      ended: worker index -> number of reconnections when the worker's part ended. Guarded by the queue's lock.
    """

    __slots__ = ("ended", "is_finite", "new_error")

    def __init__(self, new_error: Callable[[], BaseException]) -> None:
        self.new_error = new_error
        self.is_finite: bool | None = None
        self.ended: dict[int, int] = {}


@dataclasses.dataclass(frozen=True)
class Failure:
    """One failed attempt, classified.

    `error` is the exception to raise for it, and may name the cause better than the exception that was caught. `ended`
    is the input that has ended on the worker, for the kind END_OF_DATA.
    """

    kind: FailureKind
    error: BaseException
    ended: FiniteInput | None = None


class FusionKey(NamedTuple):
    """Closures with equal keys may run in one call. Keys are compared under the queue's lock: plain values only.

    `function` identifies what runs: the duration of a call is learned for each function. `arguments` is what the
    arguments must have in common.
    """

    function: Hashable
    arguments: Hashable


class Cancellation(Protocol):
    """Cancels every call that was started with it."""

    def cancel(self) -> None:
        """Cancels the calls; each ends soon with an error of kind CANCELLED. Repeating it does nothing."""


class Runtime(Protocol):
    """Runs work on numbered workers."""

    @property
    def builds(self) -> Builds:
        """What is built in the background."""

    def bind_thread(self, worker: int) -> None:
        """Prepares the calling thread to run work on `worker`; called once when the thread starts."""

    def run(self, worker: int, work: Any, cancellation: Cancellation) -> Any:
        """Runs `work` on `worker`; returns the result, on the client or as a `ValueElsewhere`. Raises any error."""

    def most_fused(self, worker: int, work: Any) -> int:
        """Returns how many works with the fusion key of `work` may share a call on `worker`; 0 or 1 for none."""

    def ready(self, worker: int, work: Any) -> Mapping[int, float] | None:
        """Returns the numbers (above 1) of works like `work` that may share a call on `worker` without a new build.

        Each number maps to the seconds that its build and preparation took. None means any number.
        """

    def prepare(self, worker: int, work: Any, like: Any, count: int) -> None:
        """Builds and prepares a call of `count` works in the background; then `ready` has the number.

        `work` is the first work; `like` is another one with the same fusion key, or the same work again.
        """

    def run_fused(self, worker: int, works: Sequence[Any], cancellation: Cancellation) -> Sequence[Any]:
        """Runs works of one fusion key in one call, in order; returns their results. Raises the error of any."""

    def run_steps(self, worker: int, work: Any, count: int, cancellation: Cancellation) -> Any:
        """Runs `work` `count` times in one call, in sequence; returns the stacked results."""

    def classify(self, worker: int, error: BaseException) -> Failure:
        """Classifies an error that `run` raised on `worker`, by which tasks answer at that time."""

    def new_cancellation(self) -> Cancellation:
        """Returns a new, unused cancellation."""


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
        """Probes `worker`; returns whether it answers and is still the server that we are connected to."""

    def seems_reachable(self, worker: int) -> bool:
        """Returns the same from its last heartbeat. Never blocks. Safe from any thread; False for a removed worker."""

    def describe_loss(self, worker: int) -> str:
        """Returns the address of a lost worker, with a description of the loss for messages."""

    def broken_links(self, workers: Collection[int]) -> Mapping[int, str]:
        """Asks all workers that answer, in parallel, whether they reach the parameter servers that answer.

        Returns workers that do not, with a description. Takes at most a few times `Options.heartbeat_timeout`.
        """

    def separation(self) -> str:
        """Asks the parameter servers whether they reach each other; returns a description if not, or ""."""

    def give_up(self, worker: int, why: str) -> None:
        """Counts a worker with a broken link as lost, until `reconnect`: its calls fail with kind LINK_LOST."""

    def disconnect(self, worker: int) -> None:
        """Disconnects from a lost worker, so no call waits for it before it is reconnected."""

    def reconnect(self, worker: int) -> bool:
        """Tries once to reconnect to a lost `worker`; returns False if it does not answer."""

    def lost_parameter_server(self) -> ParameterServerLost | None:
        """Returns the error that names a lost parameter server, or None."""

    def seem_parameter_servers_reachable(self) -> bool:
        """Returns whether all parameter servers are reachable, by their last heartbeats. Never blocks."""

    def close(self) -> None:
        """Disconnects from every server. Nothing runs afterwards."""
