"""The interfaces that the core needs: `Runtime`, which runs calls, and `Servers`, which knows the cluster's tasks.

The core (queue, workers, scheduler) knows nothing of TensorFlow: it passes work to a `Runtime` and gets back a result
or an error, which the runtime classifies. `coordinator.ps_strategy` implements both protocols with TensorFlow servers.
`coordinator.testing.FakeRuntime` implements them in memory, with faults on request.

Guarantees of an implementation: `run` blocks only its caller, and ends when the worker is lost or frozen. Only methods
that run work raise errors in a worker's thread. `reconnect` is thread-safe. A worker's number is its task index.

`Builds` builds functions in the background and prepares them on workers, so no closure waits for a build or a
preparation. A call of several steps is traced and registered on the client, and prepared on each worker that runs it.
This work takes tenths of a second to many seconds. No worker's thread prepares a call while it holds closures:

    a worker's thread      4 steps would pay --request--> builder's thread: traces and registers them, once for all
    the same, without      prepares them on the worker <------------------------'
    a closure in hand      uses them from then on

    worker 0   1 1 1 1 1 1 [4 prepared] 4 4 4 4 4 4 4
    worker 1   1 1 1 1 1 1  1  1  1  1 [4 prepared] 4

Guarantees: nothing waits for a build. At most a quarter of the workers, but at least one, prepare something at a time;
the other workers continue to run closures. A preparation is an internal closure: `join` does not wait for it, and the
preparation ends when the worker is lost or the strategy is closed.
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

    `on_end` is called when the preparation has ended, also if the work failed or the worker was lost.
    """

    worker: int
    work: Any
    name: str
    on_end: Callable[[], object] = lambda: None


class Builds:
    """Functions that are built and prepared for the workers of one strategy. Any thread may use a `Builds`.

    The cluster sets `workers`, the number of workers. The scheduler sets `schedule`, which queues a preparation on its
    worker as an internal closure, and returns None if the preparation can no longer run.
    """

    def __init__(self) -> None:
        self.workers = 1
        self.schedule: Callable[[Preparation], Future | None] = lambda _: None
        self._requests: queue.SimpleQueue[Callable[[], object] | None] = queue.SimpleQueue()
        # A leaf lock: no other lock is taken while it is held.
        self._lock = threading.Lock()
        self._waiting: deque[Preparation] = deque()
        self._preparing = 0

    def request(self, build: Callable[[], object]) -> None:
        """Queues `build` for the builder's thread, which calls requests in order."""
        self._requests.put(build)

    def next(self) -> Callable[[], object] | None:
        """Waits for the next request; returns None after `end`. Only the builder's thread calls `next`."""
        return self._requests.get()

    def end(self) -> None:
        """Ends the wait of `next`."""
        self._requests.put(None)

    def prepare(self, preparation: Preparation) -> None:
        """Queues a preparation, which begins when few enough workers prepare something."""
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
    """Why a closure did not finish. The kind decides what happens to the closure."""

    WORKER_LOST = "worker lost"
    PARAMETER_SERVER_LOST = "parameter server lost"
    LINK_LOST = "link between two servers lost"
    TRANSIENT = "transient"
    INPUT = "input could not be created"
    END_OF_DATA = "end of data"
    CANCELLED = "cancelled"
    USER = "user's own error"


class FiniteInput:
    """An input of closures: an iterator with a copy on each worker. A worker's part of the data may end.

    A closure runs only on workers where none of its inputs has ended.

    Args:
      new_error: creates the error to raise when the data has ended on all workers; called without a lock.

    Attributes:
      is_finite: whether a worker's part of the data may end; None until an iterator exists. Set by the runtime.
      ended: worker index -> number of reconnections when the worker's part ended. Guarded by the queue's lock.
    """

    __slots__ = ("ended", "is_finite", "new_error")

    def __init__(self, new_error: Callable[[], BaseException]) -> None:
        self.new_error = new_error
        self.is_finite: bool | None = None
        self.ended: dict[int, int] = {}


@dataclasses.dataclass(frozen=True)
class Failure:
    """A failed attempt and its classification.

    `error` is the exception to raise, which may name the cause better than the caught exception. For the kind
    END_OF_DATA, `ended` is the input that has ended on the worker.
    """

    kind: FailureKind
    error: BaseException
    ended: FiniteInput | None = None


class FusionKey(NamedTuple):
    """A key of a closure. Closures with equal keys may run in one call.

    Keys hold plain values only, because they are compared under the queue's lock. `function` identifies the function,
    since the duration of a call is learned for each function. `arguments` is what the arguments must have in common.
    """

    function: Hashable
    arguments: Hashable


class Cancellation(Protocol):
    """Cancels every call that was started with it."""

    def cancel(self) -> None:
        """Cancels the calls, which soon end with an error of kind CANCELLED. A second call of `cancel` does nothing."""


class Runtime(Protocol):
    """Runs work on numbered workers."""

    @property
    def builds(self) -> Builds:
        """The functions that are built in the background."""

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
        """Builds and prepares a call of `count` works in the background, after which `ready` contains `count`.

        `work` is the first work; `like` is another work with the same fusion key, or the same work again.
        """

    def run_fused(self, worker: int, works: Sequence[Any], cancellation: Cancellation) -> Sequence[Any]:
        """Runs works of one fusion key in one call, in order; returns the results. Raises the error of any work."""

    def run_steps(self, worker: int, work: Any, count: int, cancellation: Cancellation) -> Any:
        """Runs `work` `count` times in one call, in sequence; returns the stacked results."""

    def classify(self, worker: int | None, error: BaseException) -> Failure:
        """Classifies an error that `run` raised for `worker`, or a call of the client (None), by which tasks answer."""

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
        """Adds a worker, to which `reconnect` connects. Raises ValueError if the address is invalid or in use."""

    def move_worker(self, worker: int, address: str) -> None:
        """Changes the address of a worker, which counts as lost until `reconnect`. Raises ValueError."""

    def move_parameter_server(self, index: int, address: str) -> None:
        """Changes the address of a parameter server, which counts as lost until it is recovered. Raises ValueError."""

    def remove_worker(self, worker: int) -> None:
        """Removes a worker. Nothing runs on that worker afterwards."""

    def is_reachable(self, worker: int) -> bool:
        """Probes `worker`; returns whether it answers and is still the server to which the client is connected."""

    def seems_reachable(self, worker: int) -> bool:
        """Returns whether `worker` answered its last heartbeat; False for a removed one. Never blocks; thread-safe."""

    def describe_loss(self, worker: int) -> str:
        """Returns the address of a lost worker, with a description of the loss for messages."""

    def broken_links(self, workers: Collection[int]) -> Mapping[int, str]:
        """Asks all workers that answer, in parallel, whether they reach the parameter servers that answer.

        Returns each worker with a broken link, with a description. Takes at most a few times
        `Options.heartbeat_timeout`.
        """

    def separation(self) -> str:
        """Asks the parameter servers whether they reach each other; returns a description of a broken link, or ""."""

    def give_up(self, worker: int, why: str) -> None:
        """Counts a worker with a broken link as lost until `reconnect`. The worker's calls fail with kind LINK_LOST."""

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
