"""What one server keeps for one client: every variable, function and iterator that the client made there.

TensorFlow calls it an eager context. It ends when its client lets go of it, when somebody else does in the client's
name, or when the server has not heard of the client for as long as the client said.

A question is one small request over a gRPC channel of its own. It comes back within its deadline, also when nobody
answers, and holds no Python lock while it waits. The requests are written by hand, as `eager_service.proto` has them:
TensorFlow comes without Python classes for these messages.
"""

import enum
import struct
from collections.abc import Callable

import grpc

_SERVICE = "/tensorflow.eager.EagerService"

# The first byte of a `fixed64` field with this number, as protocol buffers write it.
_CONTEXT_ID, _CONTEXT_VIEW_ID = b"\x09", b"\x11"
# A server refuses to close a context of which it knows a later view than the one that is named.
_LATEST_VIEW = 2**62

# Without the keep-alive of a `TaskProbe`: a host that acknowledges nothing would count as one on which nobody is, and
# what a client has there would be freed.
_CHANNEL_OPTIONS = (
    # A server that was started again must be reached soon: gRPC's own default waits up to two minutes between attempts.
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.min_reconnect_backoff_ms", 5_000),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.enable_http_proxy", 0),
)


class Answer(enum.Enum):
    """What came back."""

    HELD = "the server keeps the context"
    UNKNOWN = "somebody is there, who does not have the context"
    UNREACHED = "nobody is there"
    SILENT = "no answer in time: frozen, or the host is gone"


class ServerContext:
    """The context of one client on one server; it may be asked about from any thread.

    Args:
      address: `host:port` of the server.
      context_id: of the client.
    """

    def __init__(self, address: str, context_id: int) -> None:
        self._address = address
        self._request = _CONTEXT_ID + struct.pack("<Q", context_id)
        self._channel = grpc.insecure_channel(address, options=_CHANNEL_OPTIONS)
        self._keep_alive = self._channel.unary_unary(f"{_SERVICE}/KeepAlive")
        self._close_context = self._channel.unary_unary(f"{_SERVICE}/CloseContext")

    def renew(self, timeout: float) -> Answer:
        """Has the server note that the client lives, if it keeps the context.

        Args:
          timeout: how long to wait for the answer, in seconds.
        """
        return self.begin_renewal(timeout)()

    def begin_renewal(self, timeout: float) -> Callable[[], Answer]:
        """The same, without waiting: returns what waits for the answer."""
        call = self._keep_alive.future(self._request, timeout=timeout)
        return lambda: _answer(call.code())

    def release(self, timeout: float) -> Answer:
        """Has the server free the context, whoever made it. One that is not there is as good as freed.

        Returns:
          `HELD` when the server obeyed.
        """
        request = self._request + _CONTEXT_VIEW_ID + struct.pack("<Q", _LATEST_VIEW)
        return _answer(self._close_context.future(request, timeout=timeout).code())

    def close(self) -> None:
        """Gives the connection back; the context stays as it is."""
        self._channel.close()

    def __enter__(self) -> "ServerContext":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"ServerContext({self._address!r})"


def _answer(code: grpc.StatusCode) -> Answer:
    known = {
        grpc.StatusCode.OK: Answer.HELD,
        grpc.StatusCode.UNAVAILABLE: Answer.UNREACHED,
        grpc.StatusCode.DEADLINE_EXCEEDED: Answer.SILENT,
        grpc.StatusCode.CANCELLED: Answer.SILENT,
    }
    # Any other answer is a refusal: by a server that lacks the context, or by something that is no such server.
    return known.get(code, Answer.UNKNOWN)
