"""Each server's list of the clients that have created something there, so that the next one can free what is orphaned.

A client that is killed cannot release its variables: the servers would keep them for `Options.client_timeout`, and a
client that is restarted again and again would fill their memory. So each client adds itself to a list on every server
that it connects to: a TensorFlow variable that belongs to the server itself. It asks each client in the list whether it
lives, and has the server free the context of one that does not.

Beside the list each client has a marker variable, in a container named after its number. A client that exits normally
deletes its marker (`goodbye`); a killed one leaves it.

Promises: nothing is freed of a client that lives, or that merely does not answer: what is not known to be orphaned is
left to the timeout. The list is best effort: one that cannot be read is replaced.
"""

import dataclasses
import json
import logging
import socket
from typing import Any

import tensorflow as tf

from coordinator.addresses import parse_address
from coordinator.ps_strategy.membership.remote_context import Answer, RemoteContext

_logger = logging.getLogger("coordinator")

_LIST = "coordinator/clients"
_MARKER = "coordinator/mark"
_LOOPBACK = ("localhost", "127.0.0.1", "::1")


@dataclasses.dataclass(frozen=True)
class Client:
    """A client, as others can find it.

    Attributes:
      context_id: the number by which servers know it.
      address: `host:port` of the server that it has for its workers to call back.
      host: the name of its machine, since a loopback address is valid only there.
    """

    context_id: int
    address: str
    host: str


def register(own: Client, device: str, address: str, timeout: float) -> None:
    """Frees what clients that have ended left on a server, and adds this client to the server's list, with its marker.

    Args:
      own: this client.
      device: the server's name, such as `/job:ps/replica:0/task:0`. TensorFlow is connected to it.
      address: its `host:port`.
      timeout: how long a former client may take to answer, and the server to free its context, in seconds.

    Raises:
      tf.errors.OpError: the server is gone.
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
    # The next client finds it by this name; the name of a `tf.Variable` is known to its client alone.
    return tf.raw_ops.VarHandleOp(dtype=tf.string, shape=[], shared_name=_LIST)


def marker_of(context_id: int) -> Any:
    """Returns the handle of a client's marker, on the current device."""
    return tf.raw_ops.VarHandleOp(dtype=tf.bool, shape=[], container=container_of(context_id), shared_name=_MARKER)


def container_of(context_id: int) -> str:
    """Returns the name of the container that has a client's marker and nothing else."""
    return f"coordinator_{context_id:x}"


def has_ended(client: Client, timeout: float) -> bool:
    """Returns True if the process of a client has certainly ended."""
    return _ask(client, timeout) in (Answer.UNKNOWN, Answer.UNREACHED)


def is_alive(client: Client, timeout: float) -> bool:
    """Returns True if the process of a client certainly lives: it answers."""
    return _ask(client, timeout) is Answer.HELD


def _ask(client: Client, timeout: float) -> Answer:
    if client.host != socket.gethostname() and parse_address(client.address).host in _LOOPBACK:
        # The question would reach this machine instead of the client's.
        return Answer.SILENT
    # A client has a context on its own server too, under the same number.
    with RemoteContext(client.address, client.context_id) as context:
        return context.renew(timeout)


def decode_clients(text: bytes) -> list[Client]:
    """Returns the clients in a list; none if it is not readable."""
    try:
        clients = [Client(**entry) for entry in json.loads(text)]
        for client in clients:
            parse_address(client.address)
        return clients
    except (ValueError, TypeError):
        return []


def encode_clients(clients: list[Client]) -> bytes:
    """Returns the list of these clients, as it is written on a server."""
    return json.dumps([dataclasses.asdict(client) for client in clients]).encode()
