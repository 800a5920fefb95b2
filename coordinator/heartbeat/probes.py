"""Asks servers for their status, why they do not answer, and whether they reach each other; without TensorFlow.

A probe (`TaskProbe`, on an asyncio loop `AsyncTaskProbe`) is one empty `GetStatus` request over a separate channel of
gRPC. It promises to

- return within its deadline, even when the server is frozen or its host is gone;
- hold no Python lock while it waits, so that no other thread is ever blocked by it;
- notice a server that was restarted on the same port, within about a second, by its new incarnation.

`find_obstacles` makes a plain connection to a server that does not answer. It waits for a limited time, except for the
resolution of host names, which it lets end.

`ServerLinks` finds the faults of a network that no client sees:

    client --"do you reach B?"--> server A --status--> server B
           <------- yes ---------          <---------

A call of a worker to a parameter server whose packets are dropped lasts until the kernel gives the connection up: after
some 950 s. Neither the client nor its heartbeat notices, since both servers answer the client.

The question is TensorFlow's `CreateSession` for a cluster of A and B: to answer it, A asks B for its devices. A does so
on other threads than those that run functions. So the question neither waits for a function that A runs, nor takes the
thread that this function needs: with two processors a second function on A would take the last one. It costs about 8 ms
of both servers together.

`ServerLinks` promises: a question that A cannot answer is not asked again before it has been answered, since it
occupies a thread of A until then; what A has made for an answer is freed; no method waits longer than `timeout`; an
answer is valid for a moment, so that many threads may ask.

The messages of these requests are described by the few fields that are used. They are part of TensorFlow's wire format
(`worker.proto`, `device_attributes.proto`, `eager_service.proto`, `master.proto`, `config.proto`, `cluster.proto`),
which does not change between releases; TensorFlow comes without Python classes for some of them. They are registered
in a separate pool, since TensorFlow registers messages of the same names in the default one.
"""

import asyncio
import concurrent.futures
import contextlib
import dataclasses
import enum
import functools
import socket
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from coordinator.addresses import parse_address

# In seconds. A host that is up accepts or refuses a connection in a fraction of that.
_RESOLVE_TIMEOUT = 2.0
_CONNECT_TIMEOUT = 1.0


class Obstacle(enum.Enum):
    """What a plain connection shows, in words for users."""

    REFUSED = "the connection is refused, so no server runs there"
    UNRESOLVED = "the host name does not resolve; correct it, or wait until the DNS has it"
    UNREACHED = "no connection is made: the host is down, or a firewall drops the packets"
    SILENT = "it accepts connections but does not answer: it is frozen or overloaded, or is no TensorFlow server"


def find_obstacles(addresses: Collection[str]) -> dict[str, Obstacle]:
    """Connects to servers (`host:port`) that do not answer, all at once; returns the obstacle of each."""

    async def find_all() -> list[Obstacle]:
        return await asyncio.gather(*map(find_obstacle, addresses))

    # On another thread, since the caller's may run an event loop already, as in a notebook.
    with concurrent.futures.ThreadPoolExecutor(1, "coordinator-obstacles") as thread:
        return dict(zip(addresses, thread.submit(asyncio.run, find_all()).result(), strict=True))


async def find_obstacle(address: str) -> Obstacle:
    """Connects to a server that does not answer; returns what that shows."""
    loop = asyncio.get_running_loop()
    try:
        endpoints = await _endpoints(*parse_address(address))
    except (OSError, ValueError):  # a time-out, and a name with an empty label, too
        return Obstacle.UNRESOLVED
    obstacle = Obstacle.UNREACHED
    for family, kind, protocol, _, endpoint in endpoints:
        try:
            # Fails for an IPv6 address where the kernel has no IPv6.
            with socket.socket(family, kind, protocol) as connection:
                connection.setblocking(False)
                await asyncio.wait_for(loop.sock_connect(connection, endpoint), _CONNECT_TIMEOUT)
        except ConnectionRefusedError:
            obstacle = Obstacle.REFUSED
        except OSError:  # a time-out too
            continue
        else:
            return Obstacle.SILENT
    return obstacle


async def _endpoints(host: str, port: int) -> Sequence[Any]:
    """Returns what `socket.getaddrinfo` does.

    Raises OSError if the name does not resolve in time, and ValueError if it is no host name (an empty or long label).
    """
    try:
        # An IP address needs no thread. The event loop has few resolver threads; hanging names can block them all.
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except OSError:
        resolution = asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        return await asyncio.wait_for(resolution, _RESOLVE_TIMEOUT)


GET_STATUS = "/tensorflow.WorkerService/GetStatus"
KEEP_ALIVE = "/tensorflow.eager.EagerService/KeepAlive"
CLOSE_CONTEXT = "/tensorflow.eager.EagerService/CloseContext"
CLEANUP_ALL = "/tensorflow.WorkerService/CleanupAll"
CREATE_SESSION = "/tensorflow.MasterService/CreateSession"
CLOSE_SESSION = "/tensorflow.MasterService/CloseSession"

ChannelOptions = tuple[tuple[str, int], ...]


def channel_options(longest_backoff: int, *, detect_dead_host: bool) -> ChannelOptions:
    """Returns the options of a channel to a server that may be restarted at any time.

    Two attempts to connect are at most `longest_backoff` milliseconds apart; gRPC's own default is two minutes. With
    `detect_dead_host` a connection is given up, and the request reported as refused, when the host has acknowledged
    nothing for five seconds.
    """
    options: ChannelOptions = (
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", longest_backoff),
        # This one bounds a single attempt to connect, so it must leave room for a slow network.
        ("grpc.min_reconnect_backoff_ms", 5_000),
        # Neither the connection nor the back-off of another channel to the same address is shared.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
    )
    if not detect_dead_host:
        return options
    # Setting any keep-alive makes gRPC give up a connection whose packets are not acknowledged after the second value;
    # the first keeps it from sending pings, which servers answer with a disconnect.
    return (*options, ("grpc.keepalive_time_ms", 3_600_000), ("grpc.keepalive_timeout_ms", 5_000))


_Field = descriptor_pb2.FieldDescriptorProto
_STRING, _INT32, _FIXED64 = _Field.TYPE_STRING, _Field.TYPE_INT32, _Field.TYPE_FIXED64
# Each field: its number, its type or the name of a message, and whether it is repeated.
_MESSAGES: dict[str, dict[str, tuple[int, int | str, bool]]] = {
    "DeviceAttributes": {"name": (1, _STRING, False), "incarnation": (6, _FIXED64, False)},
    "GetStatusResponse": {"device_attributes": (1, "DeviceAttributes", True)},
    # What both KeepAlive and CloseContext take.
    "ContextRequest": {"context_id": (1, _FIXED64, False), "context_view_id": (2, _FIXED64, False)},
    # What CleanupAll takes.
    "ContainersRequest": {"container": (1, _STRING, True)},
    # A map, in its form on the wire.
    "TaskDef": {"key": (1, _INT32, False), "value": (2, _STRING, False)},
    "JobDef": {"name": (1, _STRING, False), "tasks": (2, "TaskDef", True)},
    "ClusterDef": {"job": (1, "JobDef", True)},
    "ConfigProto": {"cluster_def": (14, "ClusterDef", False)},
    "CreateSessionRequest": {"config": (2, "ConfigProto", False), "target": (3, _STRING, False)},
    "CreateSessionResponse": {"session_handle": (1, _STRING, False)},
    "CloseSessionRequest": {"session_handle": (1, _STRING, False)},
}


def _message_classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="coordinator/server_rpcs.proto", package="coordinator")
    for message_name, fields in _MESSAGES.items():
        message = file.message_type.add(name=message_name)
        for field_name, (number, kind, is_repeated) in fields.items():
            label = _Field.LABEL_REPEATED if is_repeated else _Field.LABEL_OPTIONAL
            field = message.field.add(name=field_name, number=number, label=label)
            if isinstance(kind, str):
                field.type, field.type_name = _Field.TYPE_MESSAGE, f".coordinator.{kind}"
            else:
                field.type = kind
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {
        name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"coordinator.{name}")) for name in _MESSAGES
    }


_CLASSES = _message_classes()
GetStatusResponse, ContextRequest = _CLASSES["GetStatusResponse"], _CLASSES["ContextRequest"]
ContainersRequest, CreateSessionRequest = _CLASSES["ContainersRequest"], _CLASSES["CreateSessionRequest"]
CreateSessionResponse, CloseSessionRequest = _CLASSES["CreateSessionResponse"], _CLASSES["CloseSessionRequest"]


_CHANNEL_OPTIONS = channel_options(500, detect_dead_host=True)


@dataclasses.dataclass(frozen=True)
class TaskStatus:
    """The status of a server.

    Attributes:
      incarnation: a random number that the server drew when it started; another one means that it was restarted.
      devices: the names of its devices, such as `/job:worker/replica:0/task:0/device:CPU:0`, in its own order.
    """

    incarnation: int
    devices: tuple[str, ...]


class TaskProbe:
    """Asks the server at one `host:port` for its status; every method may be called from any thread."""

    def __init__(self, address: str):
        self._channel = grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self._get_status = self._channel.unary_unary(GET_STATUS)

    def status(self, timeout: float) -> TaskStatus | None:
        """Returns the server's status, or None if it gave none: refused, gone, frozen, or not a TensorFlow server.

        It waits for the answer at most `timeout` seconds. Raises ValueError if the probe is closed.
        """
        return self.begin_status(timeout)()

    def begin_status(self, timeout: float) -> Callable[[], TaskStatus | None]:
        """Begins a probe without waiting. Returns a function that waits for its result, as `status` returns it."""
        call = self._get_status.future(b"", timeout=timeout)
        return lambda: _decode(call.result()) if call.code() is grpc.StatusCode.OK else None

    def close(self) -> None:
        """Closes the connection. Probes in progress return None."""
        self._channel.close()

    def __enter__(self) -> "TaskProbe":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncTaskProbe:
    """Asks the server at one `host:port` on an asyncio loop, and distinguishes silence from a refusal.

    It is an asynchronous context manager: create, use and leave it on the loop.
    """

    def __init__(self, address: str):
        self._address = address
        self._channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self._get_status = self._channel.unary_unary(GET_STATUS)

    async def status(self, timeout: float) -> TaskStatus | None:
        """Returns the server's status, or None if no TensorFlow server runs there.

        Raises TimeoutError after `timeout` seconds without an answer or a refusal: the server is frozen, or its host is
        gone.
        """
        try:
            async with asyncio.timeout(timeout):
                status = await self._ask(timeout)
                # gRPC reports a failure for a host that is gone and for a frozen server too: the kernel of a frozen
                # server accepts connections, and a host that is gone is reported as unreachable or not at all. Only a
                # refused connection shows that there is no process.
                if status is None and await find_obstacle(self._address) is not Obstacle.REFUSED:
                    status = await self._ask(timeout, wait_for_ready=True)
                return status
        except TimeoutError as error:
            raise TimeoutError(f"{self._address} did not answer within {timeout:g} s.") from error

    async def __aenter__(self) -> "AsyncTaskProbe":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._channel.close()

    async def _ask(self, timeout: float, *, wait_for_ready: bool = False) -> TaskStatus | None:
        try:
            reply = await self._get_status(b"", timeout=timeout, wait_for_ready=wait_for_ready)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise TimeoutError from error
            return None
        return _decode(reply)


def _decode(reply: bytes) -> TaskStatus | None:
    """Decodes a reply. Returns None if it is not a list of devices, and so not from a TensorFlow server."""
    try:
        devices = GetStatusResponse.FromString(reply).device_attributes
    except DecodeError:
        return None
    if not devices:
        return None
    return TaskStatus(incarnation=devices[0].incarnation, devices=tuple(device.name for device in devices))


# Other names than the servers have themselves, which TensorFlow refuses here.
_HERE, _THERE = "coordinator_here", "coordinator_there"
# The answers of a server that does not reach another one. Any other error: it does not answer such questions.
_UNREACHED = frozenset(
    {
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.DEADLINE_EXCEEDED,
        grpc.StatusCode.ABORTED,
        grpc.StatusCode.CANCELLED,
        grpc.StatusCode.INTERNAL,
        grpc.StatusCode.UNKNOWN,
    }
)
# How long an answer is valid, in seconds.
_FRESH = 1.0


class Link(NamedTuple):
    """A connection between two servers: `host:port` of the server that calls, and of the server that is called."""

    source: str
    target: str


class ServerLinks:
    """Asks servers whether they reach others. Every method may be called from any thread.

    Args:
      timeout: a server that has not answered for this long, in seconds, does not reach the other one.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout
        # Guards what follows; nothing is waited for while it is held.
        self._lock = threading.Lock()
        self._channels: dict[str, grpc.Channel] = {}
        self._asked: dict[Link, tuple[Any, float]] = {}
        # When links were last found to be whole.
        self._whole: dict[Link, float] = {}
        self._is_closed = False
        self._freeing: set[Any] = set()

    def broken(self, links: Collection[Link]) -> dict[Link, str]:
        """Asks about links whose sources answer the client, all at once; returns the broken ones, each with words.

        A link whose source does not answer such questions is not among them.
        """
        questions = {link: question for link in links if (question := self._ask(link)) is not None}
        # A question that was asked and waited for before is not waited for again.
        deadline = max((asked_at + self._timeout for _, asked_at in questions.values()), default=0.0)
        concurrent.futures.wait([_done(call) for call, _ in questions.values()], max(0.0, deadline - time.monotonic()))
        described = {link: self._words(link, *question) for link, question in questions.items()}
        return {link: words for link, words in described.items() if words}

    def close(self) -> None:
        """Closes the connections."""
        with self._lock:
            self._is_closed = True
            channels = [*self._channels.values()]
            self._channels.clear()
            self._asked.clear()
        for channel in channels:
            channel.close()

    def _ask(self, link: Link) -> tuple[Any, float] | None:
        """Returns the call of a question, and when it was asked; None after `close`, or if the answer is known."""
        with self._lock:
            if self._is_closed or time.monotonic() - self._whole.get(link, -_FRESH) < _FRESH:
                return None
            known = self._asked.get(link)
            if known is not None:
                return known
            channel = self._channels.get(link.source)
            if channel is None:
                channel = self._channels[link.source] = grpc.insecure_channel(link.source, options=_CHANNEL_OPTIONS)
            request = CreateSessionRequest(target=f"grpc://{link.source}")
            for job, address in ((_HERE, link.source), (_THERE, link.target)):
                request.config.cluster_def.job.add(name=job).tasks.add(key=0, value=address)
            create = channel.unary_unary(CREATE_SESSION, request_serializer=CreateSessionRequest.SerializeToString)
            asked = self._asked[link] = create.future(request), time.monotonic()
        asked[0].add_done_callback(functools.partial(self._free, channel))
        return asked

    def _free(self, channel: grpc.Channel, call: Any) -> None:
        """Frees what a server has made for its answer; called on a thread of gRPC."""
        # The channel may be closed by now.
        with contextlib.suppress(ValueError):
            if call.code() is grpc.StatusCode.OK:
                handle = CreateSessionResponse.FromString(call.result()).session_handle
                close = channel.unary_unary(CLOSE_SESSION, request_serializer=CloseSessionRequest.SerializeToString)
                freeing = close.future(CloseSessionRequest(session_handle=handle), timeout=self._timeout)
                # gRPC cancels a request that is no longer referenced.
                self._freeing.add(freeing)
                freeing.add_done_callback(self._freeing.discard)

    def _words(self, link: Link, call: Any, asked_at: float) -> str:
        """Returns words on a broken link; empty if it is not."""
        if not call.done():
            return f"no answer for {time.monotonic() - asked_at:.0f} s"
        with self._lock:
            if self._asked.get(link, (None,))[0] is call:
                del self._asked[link]
            if call.code() not in _UNREACHED:
                self._whole[link] = time.monotonic()
                return ""
        return f"{call.code().name}: {call.details()}".partition("\n")[0]


def _done(call: Any) -> concurrent.futures.Future[None]:
    """Returns a future that is done when a call of gRPC is, whose own kind `concurrent.futures.wait` does not know."""
    future: concurrent.futures.Future[None] = concurrent.futures.Future()
    call.add_done_callback(lambda _: future.set_result(None))
    return future
