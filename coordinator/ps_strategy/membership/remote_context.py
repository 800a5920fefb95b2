"""What one server keeps for one client (every variable, function and iterator that it created there), and for how long.

TensorFlow calls it an eager context. It ends when its client releases it, when another process does so in the client's
name, or when the server has not heard from the client for `Options.client_timeout`. Steps are not enough to be heard
from: a client may be idle, or one step may take longer. TensorFlow's own keep-alive thread reaches only the servers
that were named when the process joined the cluster, none in our case. So there is a lease:

    thread coordinator-lease    four times in each `client_timeout`, sends a keep-alive to every leased server

Promises: no server frees anything while this process runs and can reach it, unless both stood still for three quarters
of the time; a server that does not answer delays no keep-alive to another. A request is one small message over a
separate gRPC channel; it returns within its deadline, and holds no Python lock while it waits.
"""

import enum
import threading
from collections.abc import Callable, Collection

import grpc

from coordinator.background_thread import BackgroundThread
from coordinator.heartbeat.server_rpcs import CLOSE_CONTEXT, KEEP_ALIVE, ContextRequest, channel_options
from coordinator.options import Options

# A server refuses to close a context of which it knows a later view than the one that is named.
_LATEST_VIEW = 2**62
_RENEWALS_PER_TIMEOUT = 4

# A dead host is not detected: it would count as one without a process, and what a client has there would be freed.
_CHANNEL_OPTIONS = channel_options(1_000, detect_dead_host=False)


class Answer(enum.Enum):
    """The outcome of a request."""

    HELD = "the server has the context"
    UNKNOWN = "a server answers, but does not have the context"
    UNREACHED = "the connection is refused: no process"
    SILENT = "no answer in time: frozen, or the host is gone"


class RemoteContext:
    """The context of one client on one server; every method may be called from any thread.

    Args:
      address: `host:port` of the server.
      context_id: of the client.
    """

    def __init__(self, address: str, context_id: int) -> None:
        self._address = address
        self._context_id = context_id
        self._channel = grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
        serialize = ContextRequest.SerializeToString
        self._keep_alive = self._channel.unary_unary(KEEP_ALIVE, request_serializer=serialize)
        self._close_context = self._channel.unary_unary(CLOSE_CONTEXT, request_serializer=serialize)

    def renew(self, timeout: float) -> Answer:
        """Sends a keep-alive: the server notes that the client lives, if it has the context.

        Args:
          timeout: how long to wait for the answer, in seconds.
        """
        return self.begin_renewal(timeout)()

    def begin_renewal(self, timeout: float) -> Callable[[], Answer]:
        """Sends a keep-alive without waiting. Returns a function that waits for the answer."""
        call = self._keep_alive.future(ContextRequest(context_id=self._context_id), timeout=timeout)
        return lambda: _answer(call.code())

    def release(self, timeout: float) -> Answer:
        """Has the server free the context, whichever process created it.

        Returns:
          `HELD` if the server did so, also if it has no such context.
        """
        request = ContextRequest(context_id=self._context_id, context_view_id=_LATEST_VIEW)
        return _answer(self._close_context.future(request, timeout=timeout).code())

    def close(self) -> None:
        """Closes the connection; the context stays as it is."""
        self._channel.close()

    def __enter__(self) -> "RemoteContext":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ClientLease:
    """A lease on servers that may come and go.

    Args:
      context_id: the number by which servers know this client.
      options: `client_timeout` is how long a server keeps a context without hearing from its client; `probe_timeout`
        is how long it may take to answer.
    """

    def __init__(self, context_id: int, options: Options) -> None:
        self._context_id = context_id
        self._answer_timeout = options.probe_timeout
        self._interval = options.client_timeout / _RENEWALS_PER_TIMEOUT
        self._held: dict[str, RemoteContext] = {}
        self._lock = threading.Lock()
        self._thread = BackgroundThread("coordinator-lease", self._renew_on_time)
        self._thread.start()

    def hold(self, addresses: Collection[str]) -> None:
        """Renews the lease on exactly these servers from now on."""
        with self._lock:
            dropped = [self._held.pop(address) for address in set(self._held) - set(addresses)]
            for address in set(addresses) - set(self._held):
                self._held[address] = RemoteContext(address, self._context_id)
        for context in dropped:
            context.close()

    def freed(self, addresses: Collection[str]) -> set[str]:
        """Asks servers all at once, and renews the lease where it still holds.

        Returns:
          The leased servers that no longer have this client's context. One that does not answer is not among them.
        """
        with self._lock:
            renewals = {
                address: self._held[address].begin_renewal(self._answer_timeout)
                for address in addresses
                if address in self._held
            }
        return {address for address, renewal in renewals.items() if renewal() is Answer.UNKNOWN}

    def close(self) -> None:
        """Ends the thread and the connections, without freeing anything on the servers."""
        self._thread.stop()
        self._thread.wait_stopped()
        self.hold(())

    def _renew_on_time(self) -> None:
        in_progress: list[Callable[[], Answer]] = []
        while not self._thread.stopping.wait(self._interval):
            with self._lock:
                # All at once and without waiting for the answers: a frozen server delays no other. gRPC cancels a
                # request that is no longer referenced.
                in_progress[:] = [context.begin_renewal(self._interval) for context in self._held.values()]


def _answer(code: grpc.StatusCode) -> Answer:
    known = {
        grpc.StatusCode.OK: Answer.HELD,
        grpc.StatusCode.UNAVAILABLE: Answer.UNREACHED,
        grpc.StatusCode.DEADLINE_EXCEEDED: Answer.SILENT,
        grpc.StatusCode.CANCELLED: Answer.SILENT,
    }
    # Any other code is a refusal: by a server that lacks the context, or by something that is not such a server.
    return known.get(code, Answer.UNKNOWN)
