"""Asks a server of the cluster for its status: whether it answers, as which incarnation, and its devices.

A probe is one empty `GetStatus` request over a separate gRPC channel. It promises to

- return within its deadline, even when the server is frozen or its host is gone;
- hold no Python lock while it waits, so that no other thread is ever blocked by it;
- notice a server that was restarted on the same port, within about a second, by its new incarnation.

`AsyncTaskProbe` does the same on an asyncio loop, for a process that probes many servers at once.
"""

import asyncio
import dataclasses
from collections.abc import Callable

import grpc
from google.protobuf.message import DecodeError

from coordinator.heartbeat.obstacle import Obstacle, find_obstacle
from coordinator.heartbeat.server_rpcs import GET_STATUS, GetStatusResponse, channel_options

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
    """Asks the server at one address for its status; every method may be called from any thread.

    Args:
      address: `host:port` of a TensorFlow server.
    """

    def __init__(self, address: str):
        self._channel = grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self._get_status = self._channel.unary_unary(GET_STATUS)

    def status(self, timeout: float) -> TaskStatus | None:
        """Returns the server's status, or None if it gave none: refused, gone, frozen, or not a TensorFlow server.

        Args:
          timeout: how long to wait for the answer, in seconds.

        Raises:
          ValueError: the probe is closed.
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
    """Asks the server at one address on an asyncio loop, and distinguishes silence from a refusal.

    It is an asynchronous context manager, to be created, used and left on the loop.

    Args:
      address: `host:port` of a TensorFlow server.
    """

    def __init__(self, address: str):
        self._address = address
        self._channel = grpc.aio.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self._get_status = self._channel.unary_unary(GET_STATUS)

    async def status(self, timeout: float) -> TaskStatus | None:
        """Returns the server's status, or None if no TensorFlow server runs there.

        Args:
          timeout: how long to wait for the answer, in seconds.

        Raises:
          TimeoutError: no answer and no refusal: the server is frozen, or its host is gone.
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
