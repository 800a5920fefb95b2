"""A note on every server that says which clients made something there, so that the next one can free what is orphaned.

A client that is killed cannot let go of its variables: the servers would keep them for `Options.client_timeout`, and a
client that is started again and again would fill their memory. So each client leaves its name on every server that it
connects to, in a variable of TensorFlow's that belongs to the server itself. Whoever connects next asks each client
that is named there whether it lives, and has the server free what belongs to one that does not.

It promises to free nothing of a client that lives, or that only does not answer: what is not known to be orphaned is
left to the time-out. The note is a help and no more: one that cannot be read is begun anew.
"""

import dataclasses
import json
import logging
import socket

import tensorflow as tf

from coordinator.ps_strategy.server_context import Answer, ServerContext

_logger = logging.getLogger("coordinator")

_NAME = "coordinator/clients"
_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")


@dataclasses.dataclass(frozen=True)
class Client:
    """A client, as others can find it.

    Attributes:
      context_id: the number that servers know it by.
      address: `host:port` of the server that it has for its workers to call back.
      host: the name of its machine, where a loopback address would be its own.
    """

    context_id: int
    address: str
    host: str

    @classmethod
    def of_this_process(cls, context_id: int, address: str) -> "Client":
        """This process, as a client."""
        return cls(context_id, address, socket.gethostname())


def leave_note(device: str, address: str, own: Client, timeout: float) -> None:
    """Frees what clients that are gone left on a server, and adds this client to those that are named there.

    Args:
      device: the server's name, such as `/job:ps/replica:0/task:0`. We are connected to it.
      address: its `host:port`.
      own: this client.
      timeout: how long a former client may take to answer, and the server to obey, in seconds.

    Raises:
      tf.errors.OpError: the server is gone.
    """
    with tf.device(f"{device}/device:CPU:0"):
        # The name is what the next client finds it by; a `tf.Variable` has one that nobody else knows.
        note = tf.raw_ops.VarHandleOp(dtype=tf.string, shape=[], shared_name=_NAME)
        text = b""
        if tf.raw_ops.VarIsInitializedOp(resource=note):
            text = tf.raw_ops.ReadVariableOp(resource=note, dtype=tf.string).numpy()
        named = [own]
        for client in read_note(text):
            if client.context_id == own.context_id:
                continue
            if is_gone(client, own, timeout):
                _release(client, device, address, timeout)
            else:
                named.append(client)
        tf.raw_ops.AssignVariableOp(resource=note, value=tf.constant(write_note(named)))


def read_note(text: bytes) -> list[Client]:
    """The clients in a note; none if it is not readable."""
    try:
        return [Client(**entry) for entry in json.loads(text)]
    except (ValueError, TypeError):
        return []


def write_note(clients: list[Client]) -> bytes:
    """The note that names these clients."""
    return json.dumps([dataclasses.asdict(client) for client in clients]).encode()


def is_gone(client: Client, own: Client, timeout: float) -> bool:
    """Whether a client's process has ended for sure.

    Args:
      client: the one in question.
      own: the one that asks.
      timeout: how long it may take to answer, in seconds.
    """
    if client.host != own.host and client.address.rpartition(":")[0] in _LOOPBACK:
        # We would ask our own machine.
        return False
    # A client keeps a context for itself, by the same number.
    with ServerContext(client.address, client.context_id) as context:
        return context.renew(timeout) in (Answer.UNKNOWN, Answer.UNREACHED)


def _release(client: Client, device: str, address: str, timeout: float) -> None:
    with ServerContext(address, client.context_id) as context:
        if context.release(timeout) is Answer.HELD:
            _logger.info("%s freed what the client %s left there when it ended.", device, client.address)
