"""Finds out whether servers answer, why they do not answer, and whether they reach each other; without TensorFlow.

A probe (`TaskProbe`, or `AsyncTaskProbe` on an asyncio loop) is one empty `GetStatus` request over its own gRPC
channel. Guarantees: a probe

- returns within its deadline, even if the server is frozen or its host is gone;
- holds no Python lock while it waits, so it never blocks another thread;
- notices a server that was restarted on the same port, within about a second, by its new incarnation.

`find_obstacles` makes a plain connection to a server that does not answer. It limits the time for connections, but
waits until the resolution of host names has ended.

`ServerLinks` finds network faults that no client sees:

    client --"do you reach B?"--> server A --status--> server B
           <------- yes ---------          <---------

If packets between A and B are dropped, a call of A to B lasts until the kernel gives up the connection, after some 950
seconds. Neither the client nor its heartbeat notices the fault, because both servers answer the client.

The question is TensorFlow's `CreateSession` for a cluster of A and B: to answer, A asks B for B's devices. A answers on
threads that run no functions. So the question neither waits for a running function, nor takes a thread that this
function needs: with two processors, a second function on A would take the last thread. A question costs both servers
together about 8 ms.

Guarantees of `ServerLinks`: an unanswered question is not asked again, since it occupies a thread of A; the session
that A has made for an answer is freed; no method waits longer than `timeout`; an answer stays valid for `_FRESH`
seconds, so many threads may ask.

The message classes have only the fields that are used. The messages are part of TensorFlow's wire format
(`worker.proto`, `device_attributes.proto`, `eager_service.proto`, `master.proto`, `config.proto`, `cluster.proto`),
which does not change between releases; TensorFlow has no Python classes for some messages. A separate pool holds the
classes, because TensorFlow registers messages of the same names in the default pool.
"""

import asyncio
import concurrent.futures
import dataclasses
import enum
import functools
import socket
import threading
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError

from coordinator.addresses import parse_address
from coordinator.background_thread import start_once
from coordinator.clock import SYSTEM_CLOCK, Clock
from coordinator.time_limit import time_limit

# In seconds. A host that is up accepts or refuses a connection in a fraction of `_CONNECT_TIMEOUT`.
_RESOLVE_TIMEOUT = 2.0
_CONNECT_TIMEOUT = 1.0


class Obstacle(enum.Enum):
    """The result of a plain connection, in words for users."""

    REFUSED = "the connection is refused, so no server runs there"
    UNRESOLVED = "the host name does not resolve; correct it, or wait until the DNS has it"
    UNREACHED = "no connection is made: the host is down, or a firewall drops the packets"
    SILENT = "it accepts connections but does not answer: it is frozen or overloaded, or is no TensorFlow server"


def find_obstacles(addresses: Collection[str]) -> dict[str, Obstacle]:
    """Connects in parallel to servers (`host:port`) that do not answer; returns the obstacle of each."""

    async def find_all() -> list[Obstacle]:
        return await asyncio.gather(*map(find_obstacle, addresses))

    # The event loop needs another thread, since the caller's thread may already run one, as in a notebook.
    with concurrent.futures.ThreadPoolExecutor(1, "coordinator-obstacles") as thread:
        return dict(zip(addresses, thread.submit(asyncio.run, find_all()).result(), strict=True))


async def find_obstacle(address: str) -> Obstacle:
    """Connects to a server that does not answer; returns the obstacle."""
    loop = asyncio.get_running_loop()
    try:
        endpoints = await _endpoints(*parse_address(address))
    except (OSError, ValueError):  # includes timeouts, and names with an empty label
        return Obstacle.UNRESOLVED
    obstacle = Obstacle.UNREACHED
    for family, kind, protocol, _, endpoint in endpoints:
        try:
            # `socket` fails for an IPv6 address if the kernel has no IPv6.
            with socket.socket(family, kind, protocol) as connection:
                connection.setblocking(False)
                async with time_limit(_CONNECT_TIMEOUT):
                    await loop.sock_connect(connection, endpoint)
        except ConnectionRefusedError:
            obstacle = Obstacle.REFUSED
        except OSError:  # includes timeouts
            continue
        else:
            return Obstacle.SILENT
    return obstacle


async def _endpoints(host: str, port: int) -> Sequence[Any]:
    """Returns the result of `socket.getaddrinfo`; raises OSError after a timeout, ValueError for an invalid name."""
    try:
        # An IP address needs no thread. The event loop has few resolver threads; slow names can block all of them.
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
    except OSError:
        async with time_limit(_RESOLVE_TIMEOUT):
            return await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)


GET_STATUS = "/tensorflow.WorkerService/GetStatus"
KEEP_ALIVE = "/tensorflow.eager.EagerService/KeepAlive"
CLOSE_CONTEXT = "/tensorflow.eager.EagerService/CloseContext"
CLEANUP_ALL = "/tensorflow.WorkerService/CleanupAll"
CREATE_SESSION = "/tensorflow.MasterService/CreateSession"
CLOSE_SESSION = "/tensorflow.MasterService/CloseSession"

ChannelOptions = tuple[tuple[str, int], ...]


def channel_options(longest_backoff: int, *, detect_dead_host: bool) -> ChannelOptions:
    """Returns the options of a channel to a server that may be restarted at any time.

    Attempts to connect are at most `longest_backoff` milliseconds apart; gRPC's own default is two minutes. With
    `detect_dead_host` a connection ends, and the request counts as refused, when the host has acknowledged nothing for
    five seconds.
    """
    options: ChannelOptions = (
        ("grpc.initial_reconnect_backoff_ms", 100),
        ("grpc.max_reconnect_backoff_ms", longest_backoff),
        # This value bounds a single attempt to connect, so the value must leave room for a slow network.
        ("grpc.min_reconnect_backoff_ms", 5_000),
        # The channel shares neither connection nor back-off with another channel to the same address.
        ("grpc.use_local_subchannel_pool", 1),
        ("grpc.enable_http_proxy", 0),
    )
    if not detect_dead_host:
        return options
    # With any keep-alive option, gRPC ends a connection whose packets stay unacknowledged for the time of the second
    # option. The long time of the first option prevents pings, which servers answer with a disconnect.
    return (*options, ("grpc.keepalive_time_ms", 3_600_000), ("grpc.keepalive_timeout_ms", 5_000))


_Field = descriptor_pb2.FieldDescriptorProto
_STRING, _INT32, _FIXED64 = _Field.TYPE_STRING, _Field.TYPE_INT32, _Field.TYPE_FIXED64
# Message -> field -> its number, its type or the name of its message, and whether the field is repeated.
_MESSAGES: dict[str, dict[str, tuple[int, int | str, bool]]] = {
    "DeviceAttributes": {"name": (1, _STRING, False), "incarnation": (6, _FIXED64, False)},
    "GetStatusResponse": {"device_attributes": (1, "DeviceAttributes", True)},
    # The request of both KeepAlive and CloseContext.
    "ContextRequest": {"context_id": (1, _FIXED64, False), "context_view_id": (2, _FIXED64, False)},
    # The request of CleanupAll.
    "ContainersRequest": {"container": (1, _STRING, True)},
    # An entry of the map `JobDef.tasks`.
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
    """The status of a server: the names of its devices, such as `/job:worker/replica:0/task:0/device:CPU:0`.

    `incarnation` is a random number that the server drew at its start; another number means that it was restarted.
    """

    incarnation: int
    devices: tuple[str, ...]


def begin_request(method: Any, request: Any, timeout: float | None) -> concurrent.futures.Future[Any]:
    """Makes a request on a new thread. The future raises `grpc.RpcError`, or ValueError if the channel is closed.

    From Python 3.12 on, no thread can be started while the process ends. Then the request is made on this thread;
    without a timeout RuntimeError is raised. (gRPC's own futures need a thread too, and would never be done.)
    """
    answer: concurrent.futures.Future[Any] = concurrent.futures.Future()

    def make() -> None:
        try:
            answer.set_result(method(request, timeout=timeout))
        except (grpc.RpcError, ValueError) as error:
            answer.set_exception(error)

    try:
        start_once("coordinator-request", make)
    except RuntimeError:
        if timeout is None:
            raise
        make()
    return answer


def code_of(answer: concurrent.futures.Future[Any]) -> grpc.StatusCode:
    """Waits for the answer to a request; returns its code. Raises ValueError if the channel is closed."""
    error: Any = answer.exception()
    if isinstance(error, ValueError):
        raise error
    return grpc.StatusCode.OK if error is None else error.code()


class TaskProbe:
    """Asks the server at one `host:port` for its status. Every method may be called from any thread."""

    def __init__(self, address: str):
        self._channel = grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self._get_status = self._channel.unary_unary(GET_STATUS)

    def status(self, timeout: float) -> TaskStatus | None:
        """Returns the server's status within `timeout` seconds. Raises ValueError if the probe is closed.

        None means that the server refuses connections, is gone or frozen, or is not a TensorFlow server.
        """
        return self.begin_status(timeout)()

    def begin_status(self, timeout: float) -> Callable[[], TaskStatus | None]:
        """Begins a probe without waiting; returns a function that waits for the result of `status`."""
        answer = begin_request(self._get_status, b"", timeout)
        return lambda: _decode(answer.result()) if code_of(answer) is grpc.StatusCode.OK else None

    def close(self) -> None:
        """Closes the connection. Probes in progress return None."""
        self._channel.close()

    def __enter__(self) -> "TaskProbe":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncTaskProbe:
    """Asks the server at one `host:port` on an asyncio loop, and distinguishes silence from a refusal.

    The probe is an asynchronous context manager, and must be created, used and left on the loop.
    """

    def __init__(self, address: str):
        self._address = address
        self._channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self._get_status = self._channel.unary_unary(GET_STATUS)

    async def status(self, timeout: float) -> TaskStatus | None:
        """Returns the server's status, or None if no TensorFlow server runs there.

        Raises TimeoutError after `timeout` seconds of silence, because the server is frozen or its host is gone.
        """
        try:
            async with time_limit(timeout):
                status = await self._ask(timeout)
                # A failure of gRPC may also mean a frozen server, whose kernel accepts connections, or a host that is
                # gone. Only a refused connection shows that there is no process.
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
    """Decodes a reply; returns None if the reply has no devices, and so is not from a TensorFlow server."""
    try:
        devices = GetStatusResponse.FromString(reply).device_attributes
    except DecodeError:
        return None
    if not devices:
        return None
    return TaskStatus(incarnation=devices[0].incarnation, devices=tuple(device.name for device in devices))


# These names differ from the servers' own job names, which TensorFlow refuses in a `CreateSession`.
_HERE, _THERE = "coordinator_here", "coordinator_there"
# The errors of a server that does not reach another one. A server with another error does not answer such questions.
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
    """A link from one server to another: the `host:port` of the caller, and of the server that is called."""

    source: str
    target: str


class ServerLinks:
    """Asks servers whether they reach other servers. Every method may be called from any thread.

    A server that has not answered for `timeout` seconds does not reach the other server.
    """

    def __init__(self, timeout: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self._timeout = timeout
        self._clock = clock
        # Guards the next attributes. No thread waits while it holds this lock.
        self._lock = threading.Lock()
        self._channels: dict[str, grpc.Channel] = {}
        self._asked: dict[Link, tuple[concurrent.futures.Future[Any], float]] = {}
        # Link -> when the link was last found to work.
        self._whole: dict[Link, float] = {}
        self._is_closed = False

    def broken(self, links: Collection[Link]) -> dict[Link, str]:
        """Asks, in parallel, about links whose sources answer the client; returns broken links with descriptions.

        A link whose source does not answer such questions is not returned.
        """
        questions = {link: question for link in links if (question := self._ask(link)) is not None}
        # The wait takes only the rest of a question's timeout, because an earlier call may have waited already.
        deadline = max((asked_at + self._timeout for _, asked_at in questions.values()), default=0.0)
        concurrent.futures.wait([answer for answer, _ in questions.values()], max(0.0, deadline - self._clock.now()))
        described = {link: self._words(link, *question) for link, question in questions.items()}
        return {link: words for link, words in described.items() if words}

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
            channels = [*self._channels.values()]
            self._channels.clear()
            self._asked.clear()
        for channel in channels:
            channel.close()

    def _ask(self, link: Link) -> tuple[concurrent.futures.Future[Any], float] | None:
        """Returns the answer to a question, and when it was asked; None after `close`, or if the answer is known."""
        with self._lock:
            if self._is_closed or self._clock.now() - self._whole.get(link, -_FRESH) < _FRESH:
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
            try:
                asked = self._asked[link] = begin_request(create, request, None), self._clock.now()
            except RuntimeError:  # the process ends
                return None
        asked[0].add_done_callback(functools.partial(self._free, channel))
        return asked

    def _free(self, channel: grpc.Channel, answer: concurrent.futures.Future[Any]) -> None:
        """Frees the session that a server has made for its answer."""
        if answer.exception() is None:
            handle = CreateSessionResponse.FromString(answer.result()).session_handle
            close = channel.unary_unary(CLOSE_SESSION, request_serializer=CloseSessionRequest.SerializeToString)
            begin_request(close, CloseSessionRequest(session_handle=handle), self._timeout)

    def _words(self, link: Link, answer: concurrent.futures.Future[Any], asked_at: float) -> str:
        """Describes a broken link; returns "" if the link works."""
        if not answer.done():
            return f"no answer for {self._clock.now() - asked_at:.0f} s"
        error: Any = answer.exception()
        with self._lock:
            if self._asked.get(link, (None,))[0] is answer:
                del self._asked[link]
            # ValueError: `close` was called.
            if error is None or isinstance(error, ValueError) or error.code() not in _UNREACHED:
                self._whole[link] = self._clock.now()
                return ""
        return f"{error.code().name}: {error.details()}".partition("\n")[0]
