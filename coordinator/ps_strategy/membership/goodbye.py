"""How a server learns that its client has ended, and was not killed: `coordinator serve --until-client-ends`.

    client  has a marker on each server that it connects to (`client_registry`), and deletes it when its process ends
    server  looks at the list of its clients and at their markers

A client that is killed leaves its marker. So does one that ends with an error that nothing caught, and one that leaves
`with strategy` by `sys.exit` with a code other than 0: whatever started it may start it again, and needs the servers
then. A notebook ends in order, whatever errors its cells had. To delete a marker takes one small request, which needs
no connection of TensorFlow: there is none when the process ends.
"""

import functools
import sys
import weakref
from collections.abc import Collection

import grpc
import tensorflow as tf

from coordinator.forks import only_here
from coordinator.heartbeat.server_rpcs import CLEANUP_ALL, ContainersRequest, channel_options
from coordinator.ps_strategy.membership.client_registry import (
    Client,
    client_list,
    container_of,
    decode_clients,
    has_ended,
    is_alive,
    marker_of,
)

_CHANNEL_OPTIONS = channel_options(500, detect_dead_host=False)


class Goodbye:
    """Deletes the markers of this client when the process ends, unless it ends by an error.

    Args:
      context_id: the number by which servers know this client.
      timeout: how long a server may take to answer, in seconds.

    Attributes:
      addresses: `host:port` of the servers that have a marker.
      is_withheld: leave the markers where they are.
    """

    def __init__(self, context_id: int, timeout: float) -> None:
        self.addresses: set[str] = set()
        self.is_withheld = False
        # At the end of the process, after a strategy that is still open: it is created later, so its finalizer goes
        # first. The class itself lives as long as the process.
        weakref.finalize(Goodbye, only_here(functools.partial(self._say, context_id, timeout)))

    def strategy_closes(self) -> None:
        """Withholds the goodbye if the program is being ended by `sys.exit` with a code."""
        # Of `with` or `finally`, in which the strategy is closed. At the end of the process it is no longer known.
        error = sys.exc_info()[1]
        if isinstance(error, SystemExit) and error.code:
            self.is_withheld = True

    def _say(self, context_id: int, timeout: float) -> None:
        # A notebook, and an interpreter with a prompt, go on after each of these, and end in order.
        if hasattr(sys, "ps1") or not (self.is_withheld or is_ended_by_error()):
            delete_markers(context_id, self.addresses, timeout)


def is_ended_by_error() -> bool:
    """Returns True if an error that nothing caught ends this process, which is no interactive one.

    Python keeps the traceback of an error when it prints it. So does what catches errors and goes on, such as a runner
    of tests; but that traceback begins within the runner, and one of an error that nothing caught with the program.
    """
    traceback = getattr(sys, "last_traceback", None)
    if traceback is None:
        return False
    frame = traceback.tb_frame
    # `python program.py`, and `python -m module`.
    return frame.f_code.co_name == "<module>" or frame.f_globals.get("__name__") == "runpy"


def delete_markers(context_id: int, addresses: Collection[str], timeout: float) -> None:
    """Deletes the markers of a client on some servers, all at once; one that does not answer is left alone."""
    request = ContainersRequest(container=[container_of(context_id)])
    channels = [grpc.insecure_channel(address, options=_CHANNEL_OPTIONS) for address in addresses]
    serialize = ContainersRequest.SerializeToString
    calls = [
        channel.unary_unary(CLEANUP_ALL, request_serializer=serialize).future(request, timeout=timeout)
        for channel in channels
    ]
    for call, channel in zip(calls, channels, strict=True):
        # Waits for the answer.
        call.code()
        channel.close()


class ServedClients:
    """The clients of a TensorFlow server. One thread may call `have_ended`, any `living`.

    Args:
      target: of the `tf.distribute.Server`, such as `grpc://localhost:2222`.
      task: its name, such as `/job:worker/task:0`.
      timeout: how long a client may take to answer, in seconds.
    """

    def __init__(self, target: str, task: str, timeout: float) -> None:
        self._timeout = timeout
        # A session sees what belongs to the server itself. It would wait for all others of the server's cluster.
        config = tf.compat.v1.ConfigProto(device_filters=[task])
        self._session = tf.compat.v1.Session(target, graph=tf.Graph(), config=config)
        with self._session.graph.as_default():
            entry = client_list()
            self._exists = tf.raw_ops.VarIsInitializedOp(resource=entry)
            self._text = tf.raw_ops.ReadVariableOp(resource=entry, dtype=tf.string)
        self._markers: dict[int, tf.Tensor] = {}

    def registered(self) -> list[Client]:
        """Returns the clients that have connected, except those that a later one has found to have ended."""
        return decode_clients(self._session.run(self._text)) if self._session.run(self._exists) else []

    def living(self) -> list[Client]:
        """Returns the clients that have connected and may still live."""
        return [client for client in self.registered() if not has_ended(client, self._timeout)]

    def have_ended(self) -> bool:
        """Returns True if a client has said goodbye and ended, and no other one may still live."""
        registered = self.registered()
        rest = [client for client in registered if self._has_marker(client)]
        # A marker may be deleted by mistake: what answers lives.
        return (
            len(rest) < len(registered)
            and all(has_ended(client, self._timeout) for client in rest)
            and not any(is_alive(client, self._timeout) for client in registered if client not in rest)
        )

    def close(self) -> None:
        """Ends the session."""
        self._session.close()

    def _has_marker(self, client: Client) -> bool:
        if client.context_id not in self._markers:
            with self._session.graph.as_default():
                marker = tf.raw_ops.VarIsInitializedOp(resource=marker_of(client.context_id))
            self._markers[client.context_id] = marker
        return bool(self._session.run(self._markers[client.context_id]))
