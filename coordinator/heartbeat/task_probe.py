"""Asks a server of the cluster whether it answers, and which devices it has.

A probe is one empty `GetStatus` request over a gRPC channel of its own. It promises to

- come back within its deadline, also when the server is frozen or its host is gone;
- hold no Python lock while it waits, so that no other thread is ever blocked by it;
- notice a server that was started again on the same port, within about a second, by its new incarnation.

`AsyncTaskProbe` asks the same on an asyncio loop, for whoever asks many servers at once.

It loads no TensorFlow. The reply is decoded with a description of the few fields that are read here: they are part of
TensorFlow's wire format (`device_attributes.proto`, `worker.proto`), which does not change between releases.
"""

import asyncio
import dataclasses
import socket

import grpc
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory
from google.protobuf.message import DecodeError, Message

_METHOD = "/tensorflow.WorkerService/GetStatus"

_CHANNEL_OPTIONS = (
    # A restarted server must be seen soon: gRPC's own default waits up to two minutes between attempts.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 500),
    # This one bounds a single attempt to connect, so it must leave room for a slow network.
    ("grpc.min_reconnect_backoff_ms", 5_000),
    # Not the connection, nor the back-off, of somebody else's channel to the same address.
    ("grpc.use_local_subchannel_pool", 1),
    # Setting any keep-alive makes gRPC give up a connection whose packets nobody acknowledges (a host that vanished)
    # after the second value; the first keeps it from sending pings, which servers answer with a disconnect.
    ("grpc.keepalive_time_ms", 3_600_000),
    ("grpc.keepalive_timeout_ms", 5_000),
    ("grpc.enable_http_proxy", 0),
)


@dataclasses.dataclass(frozen=True)
class TaskStatus:
    """What a server said of itself.

    Attributes:
      incarnation: a random number that the server drew when it started; another one means that it was restarted.
      devices: the names of its devices, such as `/job:worker/replica:0/task:0/device:CPU:0`, in its own order.
    """

    incarnation: int
    devices: tuple[str, ...]


class TaskProbe:
    """Asks the server at one address for its status, as often as wanted, from any thread.

    Args:
      address: `host:port` of a TensorFlow server.
    """

    def __init__(self, address: str):
        self._address = address
        self._channel = grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self._get_status = self._channel.unary_unary(_METHOD)

    def status(self, timeout: float) -> TaskStatus | None:
        """Returns what the server says, or None when it did not say anything: refused, gone, frozen or no such server.

        Args:
          timeout: how long to wait for the answer, in seconds.

        Raises:
          ValueError: the probe is closed.
        """
        try:
            reply = self._get_status(b"", timeout=timeout)
        except grpc.RpcError:
            return None
        return _decode(reply)

    def close(self) -> None:
        """Gives the connection back. Probes under way come back with None."""
        self._channel.close()

    def __enter__(self) -> "TaskProbe":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"TaskProbe({self._address!r})"


class AsyncTaskProbe:
    """Asks the server at one address on an asyncio loop, and tells silence from a refusal.

    It must be made, used and closed on the loop.

    Args:
      address: `host:port` of a TensorFlow server.
    """

    def __init__(self, address: str):
        self._address = address
        self._channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self._get_status = self._channel.unary_unary(_METHOD)

    async def status(self, timeout: float) -> TaskStatus | None:
        """Returns what the server says, or None when nobody can answer: refused, or no TensorFlow server.

        Args:
          timeout: how long to wait for the answer, in seconds.

        Raises:
          TimeoutError: no answer and no refusal: the server is frozen, or its host is gone.
        """
        try:
            async with asyncio.timeout(timeout):
                return await self._ask(timeout) or await self._insist(timeout)
        except TimeoutError as error:
            raise TimeoutError(f"{self._address} did not answer within {timeout:g} s.") from error

    async def close(self) -> None:
        """Gives the connection back."""
        await self._channel.close()

    async def __aenter__(self) -> "AsyncTaskProbe":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def __repr__(self) -> str:
        return f"AsyncTaskProbe({self._address!r})"

    async def _insist(self, timeout: float) -> TaskStatus | None:
        """Asks again after a failure, which gRPC also reports for a host that is gone and for a frozen server.

        The kernel of a frozen server accepts connections, and the network to a host that is gone says that there is no
        way to it, or nothing. Only a connection that is refused shows that there is no process.
        """
        if await self._is_refused():
            return None
        return await self._ask(timeout, wait_for_ready=True)

    async def _ask(self, timeout: float, *, wait_for_ready: bool = False) -> TaskStatus | None:
        try:
            reply = await self._get_status(b"", timeout=timeout, wait_for_ready=wait_for_ready)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                raise TimeoutError from error
            return None
        return _decode(reply)

    async def _is_refused(self) -> bool:
        """Whether a plain connection is refused at one of the host's addresses, and accepted at none."""
        loop = asyncio.get_running_loop()
        host, _, port = self._address.rpartition(":")
        refused = False
        try:
            endpoints = await loop.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
        except OSError:
            return False
        for family, kind, protocol, _, endpoint in endpoints:
            with socket.socket(family, kind, protocol) as connection:
                connection.setblocking(False)
                try:
                    await loop.sock_connect(connection, endpoint)
                except ConnectionRefusedError:
                    refused = True
                except OSError:
                    continue
                else:
                    return False
        return refused


def _reply_class() -> type[Message]:
    """Builds the class of the reply in a pool of its own: TensorFlow registers the full one in the default pool."""
    field = descriptor_pb2.FieldDescriptorProto
    file = descriptor_pb2.FileDescriptorProto(name="coordinator/task_status.proto", package="coordinator")
    device = file.message_type.add(name="DeviceAttributes")
    device.field.add(name="name", number=1, type=field.TYPE_STRING, label=field.LABEL_OPTIONAL)
    device.field.add(name="incarnation", number=6, type=field.TYPE_FIXED64, label=field.LABEL_OPTIONAL)
    reply = file.message_type.add(name="GetStatusResponse")
    reply.field.add(
        name="device_attributes",
        number=1,
        type=field.TYPE_MESSAGE,
        type_name=".coordinator.DeviceAttributes",
        label=field.LABEL_REPEATED,
    )
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    reply_class: type[Message] = message_factory.GetMessageClass(
        pool.FindMessageTypeByName("coordinator.GetStatusResponse")
    )
    return reply_class


_GetStatusResponse = _reply_class()


def _decode(reply: bytes) -> TaskStatus | None:
    """Reads a reply; one that is no list of devices came from something else than a TensorFlow server."""
    try:
        devices = _GetStatusResponse.FromString(reply).device_attributes
    except DecodeError:
        return None
    if not devices:
        return None
    return TaskStatus(incarnation=devices[0].incarnation, devices=tuple(device.name for device in devices))
