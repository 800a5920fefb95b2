"""This process as the client of a cluster, and the records that servers keep of this client and of former clients.

A client's objects on a server (variables, functions, iterators) belong to the client's *context* there. A context ends
when its client releases it, when another process releases it in the client's name, or when the server has not heard
from the client for `Options.client_timeout`. The messages of steps are not enough, because a client may be idle, or a
step may take longer. TensorFlow's own keep-alive thread reaches only servers that were in the cluster when the process
joined, and the cluster had none then. So a lease keeps the contexts alive:

    thread coordinator-lease    four times in each `client_timeout`, sends a keep-alive to every leased server

A killed client cannot release its contexts. A client that is restarted again and again would fill the servers' memory.
So each server has two kinds of TensorFlow variables that belong to no client's context:

    list of clients       each client adds itself when it connects. It asks the other clients whether they live, and has
                          the server free the context of each client that has ended
    marker of a client    in a container named after the client's number. A client that exits in order deletes the
                          marker (the goodbye); then `coordinator serve --until-client-ends` ends its server

A killed client leaves its marker. A client also leaves its marker if it ends with an uncaught error, or leaves a block
`with strategy` by `sys.exit` with a code other than 0, because a launcher may restart the client, which then needs the
servers. A notebook ends in order, even after errors in its cells. The goodbye is one small request that needs no
connection of TensorFlow, because TensorFlow is disconnected when the process ends.

Promises:
- While this process runs and reaches a server, the server frees no object of this process. The only exception: the
  process and server stood still for 3/4 of `client_timeout`. A silent server delays no keep-alive to another server.
- The objects of a living or silent client are not freed: if it is not certain that a client has ended, its context is
  kept until the timeout. The list is best effort: a list that cannot be read is replaced.
- A request is one small message over a separate gRPC channel. A request returns within its deadline, and holds no
  Python lock while it waits.
"""

import contextlib
import dataclasses
import enum
import functools
import json
import logging
import os
import select
import socket
import sys
import threading
import weakref
from collections.abc import Callable, Collection
from typing import Any

import grpc.experimental
import portpicker
import tensorflow as tf

from coordinator.addresses import check_port_is_free, parse_address
from coordinator.background_thread import BackgroundThread, only_here
from coordinator.heartbeat.listening import described_watches, loopback_of, reached_only_at
from coordinator.heartbeat.open_connections import OpenConnections, peer_of
from coordinator.heartbeat.probes import (
    CLEANUP_ALL,
    CLOSE_CONTEXT,
    KEEP_ALIVE,
    ContainersRequest,
    ContextRequest,
    begin_request,
    channel_options,
    code_of,
)
from coordinator.options import Options
from coordinator.ps_strategy.membership.cluster_definition import CLIENT_JOB, ClusterDefinition, client_server_def
from coordinator.ps_strategy.tensorflow_internals.process import (
    current_server_def,
    leave_calls_to_parent,
    set_server_def,
)

# A server refuses to close a context if it knows a later view of the context than the request names.
_LATEST_VIEW = 2**62
_RENEWALS_PER_TIMEOUT = 4
# If dead hosts were detected, a dead host would look like a host without the client, whose objects would be freed.
_CHANNEL_OPTIONS = channel_options(1_000, detect_dead_host=False)
_GOODBYE_OPTIONS = (
    *channel_options(500, detect_dead_host=False),
    (grpc.experimental.ChannelOptions.SingleThreadedUnaryStream, 1),
)

_LIST = "coordinator/clients"
_MARKER = "coordinator/mark"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")

_logger = logging.getLogger("coordinator")


class Answer(enum.Enum):
    """The outcome of a request."""

    HELD = "the server has the context"
    UNKNOWN = "a server answers, but does not have the context"
    UNREACHED = "the connection is refused: no process"
    SILENT = "no answer in time: frozen, or the host is gone"


# Any other status is a refusal, by a server without the context or by another kind of server.
_ANSWERS = {
    grpc.StatusCode.OK: Answer.HELD,
    grpc.StatusCode.UNAVAILABLE: Answer.UNREACHED,
    grpc.StatusCode.DEADLINE_EXCEEDED: Answer.SILENT,
    grpc.StatusCode.CANCELLED: Answer.SILENT,
}


class RemoteContext:
    """The context of the client `context_id` on the server at `address`. Any thread may call every method."""

    def __init__(self, address: str, context_id: int) -> None:
        self._address = address
        self._context_id = context_id
        self._channel = grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
        serialize = ContextRequest.SerializeToString
        self._keep_alive = self._channel.unary_unary(KEEP_ALIVE, request_serializer=serialize)
        self._close_context = self._channel.unary_unary(CLOSE_CONTEXT, request_serializer=serialize)

    def renew(self, timeout: float) -> Answer:
        """Sends a keep-alive, and waits at most `timeout` seconds for the answer."""
        return self.begin_renewal(timeout)()

    def begin_renewal(self, timeout: float) -> Callable[[], Answer]:
        """Sends a keep-alive without waiting. Returns a function that waits for the answer."""
        answer = begin_request(self._keep_alive, ContextRequest(context_id=self._context_id), timeout)
        return lambda: _ANSWERS.get(code_of(answer), Answer.UNKNOWN)

    def release(self, timeout: float) -> Answer:
        """Has the server free the context, whichever process created it. Returns `HELD` also if there is no context."""
        request = ContextRequest(context_id=self._context_id, context_view_id=_LATEST_VIEW)
        return _ANSWERS.get(code_of(begin_request(self._close_context, request, timeout)), Answer.UNKNOWN)

    def close(self) -> None:
        """Closes the connection; the context stays."""
        self._channel.close()

    def __enter__(self) -> "RemoteContext":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class ClientLease:
    """A lease on servers that may come and go. `context_id` is the number by which servers know this client."""

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
        """Renews the lease on servers in parallel. Returns the leased servers that have lost this client's context."""
        with self._lock:
            renewals = {
                address: self._held[address].begin_renewal(self._answer_timeout)
                for address in addresses
                if address in self._held
            }
        return {address for address, renewal in renewals.items() if renewal() is Answer.UNKNOWN}

    def close(self) -> None:
        """Ends the thread and the connections; frees nothing on the servers."""
        self._thread.stop()
        self._thread.wait_stopped()
        self.hold(())

    def _renew_on_time(self) -> None:
        while not self._thread.stopping.wait(self._interval):
            with self._lock:
                # The answers are not awaited, so that a frozen server delays no other server.
                for context in self._held.values():
                    context.begin_renewal(self._interval)


@dataclasses.dataclass(frozen=True)
class Client:
    """A client, as other clients can find it. Servers know the client by the number `context_id`.

    `address`, `host:port`, is the client's own server, which workers call back. `host` is the name of the client's
    machine: a loopback address is valid only on this machine.
    """

    context_id: int
    address: str
    host: str


def register(own: Client, device: str, address: str, timeout: float) -> None:
    """Frees the objects of ended clients on a server, and adds this client to the server's list, with its marker.

    A former client has `timeout` seconds to answer, and the server has the same time to free a context. Raises OpError
    if the server is gone.
    """
    with tf.device(f"{device}/device:CPU:0"):
        tf.raw_ops.AssignVariableOp(resource=marker_of(own.context_id), value=True)
        entry = client_list()
        text = b""
        if tf.raw_ops.VarIsInitializedOp(resource=entry):
            text = tf.raw_ops.ReadVariableOp(resource=entry, dtype=tf.string).numpy()
        registered = [own]
        for client in decode_clients(text):
            if client.context_id == own.context_id:
                continue
            if not has_ended(client, timeout):
                registered.append(client)
                continue
            with RemoteContext(address, client.context_id) as context:
                if context.release(timeout) is Answer.HELD:
                    _logger.info("%s freed what the ended client %s had left there.", device, client.address)
        tf.raw_ops.AssignVariableOp(resource=entry, value=tf.constant(encode_clients(registered)))


def client_list() -> Any:
    """Returns the handle of the list, on the current device."""
    # The next client finds the list by this name. The name of a `tf.Variable` is known only to the variable's client.
    return tf.raw_ops.VarHandleOp(dtype=tf.string, shape=[], shared_name=_LIST)


def marker_of(context_id: int) -> Any:
    """Returns the handle of a client's marker, on the current device."""
    return tf.raw_ops.VarHandleOp(dtype=tf.bool, shape=[], container=_container_of(context_id), shared_name=_MARKER)


def _container_of(context_id: int) -> str:
    return f"coordinator_{context_id:x}"


def has_ended(client: Client, timeout: float) -> bool:
    """Returns True if the process of a client has certainly ended."""
    return _ask(client, timeout) in (Answer.UNKNOWN, Answer.UNREACHED)


def _ask(client: Client, timeout: float) -> Answer:
    """Asks a client whether it lives. If the answer is `HELD`, the client certainly lives."""
    if client.host != socket.gethostname() and parse_address(client.address).host in _LOOPBACK:
        # The request would go to this machine instead of the client's machine.
        return Answer.SILENT
    # A client has a context on its own server too, under the same number.
    with RemoteContext(client.address, client.context_id) as context:
        return context.renew(timeout)


def decode_clients(text: bytes) -> list[Client]:
    """Returns the clients in a server's list; none if the list is not readable."""
    try:
        clients = [Client(**entry) for entry in json.loads(text)]
        for client in clients:
            parse_address(client.address)
        return clients
    except (ValueError, TypeError):
        return []


def encode_clients(clients: list[Client]) -> bytes:
    """Returns the list of these clients, as servers store it."""
    return json.dumps([dataclasses.asdict(client) for client in clients]).encode()


class Goodbye:
    """Deletes this client's markers on `addresses` when the process ends, unless an error ends the process."""

    def __init__(self, context_id: int, timeout: float) -> None:
        self.addresses: set[str] = set()
        self.is_withheld = False
        # The class lives as long as the process, so the finalizer runs at the end of the process. Finalizers run in
        # reverse order of creation: an open strategy, whose finalizer is created later, closes first.
        weakref.finalize(Goodbye, only_here(functools.partial(self._say, context_id, timeout)))

    def strategy_closes(self) -> None:
        """Withholds the goodbye if the program is being ended by `sys.exit` with a code."""
        # The error that is raised while a `with` or `finally` closes the strategy; None at the end of the process.
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit) and error.code:
            self.is_withheld = True

    def _say(self, context_id: int, timeout: float) -> None:
        # A notebook, or an interpreter with a prompt, continues after an error or `sys.exit`, and ends in order.
        if hasattr(sys, "ps1") or not (self.is_withheld or _is_ended_by_error()):
            delete_markers(context_id, self.addresses, timeout)


def _is_ended_by_error() -> bool:
    """Returns True if an uncaught error ends this process.

    Python keeps the traceback of an error that it prints. A test runner that catches errors and goes on may keep a
    traceback too, which begins within the runner. The traceback of an uncaught error begins with the program.
    """
    traceback = getattr(sys, "last_traceback", None)
    if traceback is None:
        return False
    frame = traceback.tb_frame
    # The name is `<module>` after `python program.py`; the module is `runpy` after `python -m module`.
    return frame.f_code.co_name == "<module>" or frame.f_globals.get("__name__") == "runpy"


def delete_markers(context_id: int, addresses: Collection[str], timeout: float) -> None:
    """Deletes the markers of a client on servers in parallel; a server that does not answer keeps its marker.

    At the end of a process, Python 3.12 and later start no thread, which other requests of gRPC need.
    """
    request = ContainersRequest(container=[_container_of(context_id)])
    channels = [grpc.insecure_channel(address, options=_GOODBYE_OPTIONS) for address in addresses]
    serialize = ContainersRequest.SerializeToString
    calls = [
        channel.unary_stream(CLEANUP_ALL, request_serializer=serialize)(request, timeout=timeout)
        for channel in channels
    ]
    for call, channel in zip(calls, channels, strict=True):
        with contextlib.suppress(grpc.RpcError):
            list(call)  # Waits for the answer.
        channel.close()


class ServedClients:
    """The clients of a `tf.distribute.Server`. One thread may call `have_ended`; any thread may call `living`.

    `target` is a URL such as `grpc://localhost:2222`, `task` a name such as `/job:worker/task:0`.
    """

    def __init__(self, target: str, task: str, timeout: float) -> None:
        self._timeout = timeout
        # The session sees the server's own variables. With the filter, the session does not wait for other servers.
        config = tf.compat.v1.ConfigProto(device_filters=[task])
        self._session = tf.compat.v1.Session(target, graph=tf.Graph(), config=config)
        with self._session.graph.as_default():
            entry = client_list()
            self._exists = tf.raw_ops.VarIsInitializedOp(resource=entry)
            self._text = tf.raw_ops.ReadVariableOp(resource=entry, dtype=tf.string)
        self._markers: dict[int, tf.Tensor] = {}

    def registered(self) -> list[Client]:
        """Returns the clients that have connected, without clients whose end a later client has found."""
        return decode_clients(self._session.run(self._text)) if self._session.run(self._exists) else []

    def living(self) -> list[Client]:
        """Returns the clients that have connected and may still live."""
        return [client for client in self.registered() if not has_ended(client, self._timeout)]

    def have_ended(self) -> bool:
        """Returns True if a client has said goodbye and ended, and no other client may still live."""
        registered = self.registered()
        marked = [client for client in registered if self._has_marker(client)]
        # A marker may have been deleted by mistake, so clients without a marker are asked whether they live.
        return (
            len(marked) < len(registered)
            and all(has_ended(client, self._timeout) for client in marked)
            and not any(_ask(client, self._timeout) is Answer.HELD for client in registered if client not in marked)
        )

    def close(self) -> None:
        self._session.close()

    def _has_marker(self, client: Client) -> bool:
        if client.context_id not in self._markers:
            with self._session.graph.as_default():
                marker = tf.raw_ops.VarIsInitializedOp(resource=marker_of(client.context_id))
            self._markers[client.context_id] = marker
        return bool(self._session.run(self._markers[client.context_id]))


def join_as_client(definition: ClusterDefinition) -> str:
    """Makes this process the client of a cluster with no other task yet; returns the address of the client's server.

    Workers call back the client's own server. If its address is a loopback address, the server refuses connections from
    other machines. TensorFlow cannot stop this server, so a process keeps the server of its first strategy, and logs a
    warning if a later cluster reserves another address for the client. Raises RuntimeError if this process is connected
    to a cluster already, LaunchError if the reserved address is in use.
    """
    current = current_server_def()
    if current is None:
        address = definition.client_address or f"localhost:{portpicker.pick_unused_port()}"
        check_port_is_free(f"This program, /job:{CLIENT_JOB}/task:0,", address)
        server_def = client_server_def(definition.protocol, address)
        host, port = parse_address(address)
        if (loopback := loopback_of(host)) is None:
            set_server_def(server_def)
            return address
        try:
            with reached_only_at(loopback, port):
                set_server_def(server_def)
        except OSError as error:
            _logger.warning(
                "This program accepts connections on port %d from every machine that reaches it, and the interface "
                "cannot be restricted: %s. See docs/security.md.",
                port,
                error,
            )
        return address
    jobs = {job.name: dict(job.tasks) for job in current.cluster.job}
    if current.job_name != CLIENT_JOB or set(jobs) != {CLIENT_JOB}:
        raise RuntimeError(
            "This process is connected to a cluster already. One process has one strategy at a time: close the first "
            "one (strategy.close()) before making another."
        )
    present = jobs[CLIENT_JOB][0]
    if definition.client_address not in (None, present):
        _logger.warning(
            "The cluster reserves %s for /job:%s/task:0, but this program keeps the server at %s, which its first "
            "strategy started: workers call back there. Start another program for another address.",
            definition.client_address,
            CLIENT_JOB,
            present,
        )
    return present


class Children:
    """Keeps processes that are forked from this process from its connections to the servers.

    A child that ends in order deletes TensorFlow's objects. The deletion would write into the sockets that the child
    shares with this process, and remove these sockets from the epoll instances of this process.
    """

    def __init__(self) -> None:
        self._addresses: Callable[[], Collection[str]] | None = None

    def keep_from(self, addresses: Callable[[], Collection[str]]) -> None:
        """Keeps children from connections with `addresses()`, each `host:port`. Each fork calls `addresses`."""
        if self._addresses is None:
            # Python cannot remove this hook, which stays as long as the process lives.
            os.register_at_fork(after_in_child=self._replace_connections)
        self._addresses = addresses

    def _replace_connections(self) -> None:
        assert self._addresses is not None
        leave_calls_to_parent()
        # Only ports are compared, because a process that was just forked must not look up names.
        ports = {parse_address(address).port for address in self._addresses()}
        dead, other = socket.socketpair()
        other.close()
        with dead:
            replaced = []
            for descriptor, duplicate in OpenConnections().sockets():
                with duplicate:
                    peer = peer_of(duplicate)
                    is_meant = peer is not None and not ports.isdisjoint((peer.port, duplicate.getsockname()[1]))
                if is_meant:
                    os.dup2(dead.fileno(), descriptor, inheritable=False)
                    replaced.append(descriptor)
        if sys.platform != "linux":
            return
        for epoll in {watch.epoll for descriptor in replaced for watch in described_watches(descriptor)}:
            with select.epoll() as fresh:
                os.dup2(fresh.fileno(), epoll, inheritable=False)


CHILDREN = Children()
