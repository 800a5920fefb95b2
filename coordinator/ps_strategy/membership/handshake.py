"""Which servers take part, of those that TensorFlow has just been connected to.

    connected --> same TensorFlow version --> registered there (`ClientRegistry`) --> on the lease (`ClientLease`)

Promises: nothing runs on a server of another TensorFlow, unless `Options.version_mismatch` allows it; such a server is
checked once in its life; a server that dies meanwhile is not admitted.
"""

import logging
from collections.abc import Collection, Mapping

import tensorflow as tf

from coordinator.errors import VersionMismatchError
from coordinator.options import Options
from coordinator.ps_strategy.membership.bounded_calls import call_within, in_parallel
from coordinator.ps_strategy.membership.client_registry import Client, ClientRegistry
from coordinator.ps_strategy.membership.cluster_change import Connection
from coordinator.ps_strategy.membership.cluster_definition import Task
from coordinator.ps_strategy.membership.remote_context import ClientLease
from coordinator.ps_strategy.tensorflow_internals.process import context_id

_logger = logging.getLogger("coordinator")

# In seconds; former clients have to be asked, too.
_LONGEST_HANDSHAKE = 30.0


class Handshake:
    """Checks servers that are new, and renews the lease on those that were admitted.

    `admit` is called by one thread at a time, the other methods by any.

    Args:
      client_address: `host:port` of this process's own TensorFlow server.
      options: time limits, and what to do about another TensorFlow.
    """

    def __init__(self, client_address: str, options: Options) -> None:
        client = Client.of_this_process(context_id(), client_address)
        self._registry = ClientRegistry(client, options.probe_timeout)
        self._lease = ClientLease(client.context_id, options)
        self._is_mismatch_error = options.version_mismatch == "error"
        self._admitted: dict[Task, Connection] = {}
        self._refused: dict[int, VersionMismatchError] = {}

    def admit(self, connected: Mapping[Task, Connection], addresses: Mapping[Task, str]) -> dict[Task, Connection]:
        """Makes the handshake with servers, all at once; those that were admitted before need no other one.

        Args:
          connected: the servers that TensorFlow is connected to now.
          addresses: `host:port` of each.

        Returns:
          The servers that take part. The lease is renewed on them, and on no others.
        """
        new = [task for task, connection in connected.items() if self._admitted.get(task) is not connection]
        succeeded = in_parallel(
            "coordinator-handshakes",
            lambda task: self._handshake(task, addresses[task], connected[task].incarnation),
            new,
        )
        self._admitted = {task: connection for task, connection in connected.items() if succeeded.get(task, True)}
        self._lease.hold([addresses[task] for task in self._admitted])
        return dict(self._admitted)

    def is_refused(self, incarnation: int) -> bool:
        """Returns True if a server of this incarnation was found to run another TensorFlow."""
        return incarnation in self._refused

    def raise_refusal(self) -> None:
        """Raises the `VersionMismatchError` of a server that was refused, if one was."""
        for error in self._refused.values():
            raise error

    def freed(self, addresses: Collection[str]) -> set[str]:
        """Returns the servers that have freed what this client created there; see `ClientLease.freed`."""
        return self._lease.freed(addresses)

    def close(self) -> None:
        """Ends the lease's thread."""
        self._lease.close()

    def _handshake(self, task: Task, address: str, incarnation: int) -> bool:
        def check_and_register() -> None:
            check_version(task.device, address, is_error=self._is_mismatch_error)
            self._registry.register(task.device, address)

        try:
            call_within(_LONGEST_HANDSHAKE, "coordinator-handshake", check_and_register)
        except VersionMismatchError as error:
            _logger.error("%s It takes no part.", error)
            self._refused[incarnation] = error
            return False
        except (tf.errors.OpError, TimeoutError) as error:
            _logger.info("%s (%s) was lost during the handshake; it is tried again: %s", task, address, error)
            return False
        return True


def check_version(device: str, address: str, *, is_error: bool) -> None:
    """Compares the TensorFlow version of a connected server with that of this program.

    Args:
      device: the server's name, such as `/job:ps/replica:0/task:0`.
      address: its `host:port`.
      is_error: whether a difference is raised; otherwise it is logged as a warning.

    Raises:
      VersionMismatchError: the server runs another release.
      tf.errors.UnavailableError: the server is gone.
    """
    theirs, ours = graph_version(device), tf.version.GRAPH_DEF_VERSION
    if theirs == ours:
        return
    if theirs is None:
        difference = "another TensorFlow, whose graphs cannot be read here,"
    else:
        difference = f"{'an older' if theirs < ours else 'a newer'} TensorFlow (graph version {theirs}, not {ours})"
    message = (
        f"{device} ({address}) runs {difference} than this program, which runs {tf.version.VERSION}. Install the same "
        'TensorFlow on both, or create the strategy with Options(version_mismatch="warn") to try it as it is.'
    )
    if is_error:
        raise VersionMismatchError(message)
    _logger.warning(message)


def graph_version(device: str) -> int | None:
    """Returns the version of the graphs that a server writes; None if its TensorFlow does not do that as ours does.

    Raises:
      tf.errors.UnavailableError: the server is gone.
    """
    zero, one = (tf.constant(number, tf.int64) for number in (0, 1))
    try:
        with tf.device(f"{device}/device:CPU:0"):
            dataset = tf.raw_ops.RangeDataset(
                start=zero, stop=zero, step=one, output_types=[tf.int64], output_shapes=[[]]
            )
            written = tf.raw_ops.DatasetToGraphV2(input_dataset=dataset).numpy()
    except (tf.errors.NotFoundError, tf.errors.InvalidArgumentError, tf.errors.UnimplementedError):
        return None
    return tf.compat.v1.GraphDef.FromString(written).versions.producer
