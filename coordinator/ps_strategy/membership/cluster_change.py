"""Changes of the cluster that TensorFlow makes, in bounded time.

Telling TensorFlow which servers there are (`update_server_def`) closes what this client has on the servers that are no
longer named. Each of them first ends what it runs for the client, and that may take for ever: a dataset made by
`from_generator` calls back a generator in this process, which may wait. So a change is made on a thread:

    make --> thread: update_server_def -----------------------> done
      |          in time? else cut the connections to the servers that leave, which ends the wait for them
      '--------> still not in time: DeadlineExceededError; the thread is left behind

Promises: `make` returns or raises within five times `patience`. No change is begun before the one before it has ended,
be it of another strategy of this process: there is one cluster for all of TensorFlow.
"""

import concurrent.futures
import logging
import time
from collections.abc import Collection, Mapping
from typing import ClassVar

import tensorflow as tf

from coordinator.heartbeat.open_connections import OpenConnections
from coordinator.ps_strategy import tensorflow_internals
from coordinator.ps_strategy.membership.bounded_calls import on_own_thread
from coordinator.ps_strategy.membership.cluster_definition import Task, server_def
from coordinator.ps_strategy.tensorflow_internals import FunctionRegistration

# The most patience while a strategy is being closed, in seconds, however large `heartbeat_timeout` is.
PATIENCE_AT_CLOSE = 4.0
# How long it takes to notice that patience has become less, in seconds.
_LONGEST_SLEEP = 0.5

_logger = logging.getLogger("coordinator")


class ClusterChanges:
    """Has TensorFlow change the cluster; one thread at a time may use it.

    Args:
      protocol: of all servers, such as `grpc`.
      client_address: `host:port` of this process's own TensorFlow server.
      client_timeout: see `update_server_def`.
      patience: how long a server may take to end what it runs for this client before connections to it are cut, in
        seconds.

    Attributes:
      named: the servers that TensorFlow was given last, with their addresses. Some may have been lost since.
    """

    _under_way: ClassVar[concurrent.futures.Future[None] | None] = None

    def __init__(self, protocol: str, client_address: str, client_timeout: float, patience: float) -> None:
        self._protocol = protocol
        self._client_address = client_address
        self._client_timeout = client_timeout
        self._patience = patience
        self._functions = FunctionRegistration(patience)
        self.named: dict[Task, str] = {}

    def make(self, addresses: Mapping[Task, str]) -> None:
        """Connects to exactly these servers.

        Args:
          addresses: `host:port` of each.

        Raises:
          tf.errors.DeadlineExceededError: the change, or the one before it, takes too long. It may still be made.
          tf.errors.OpError: a server does not answer.
        """
        if ClusterChanges._under_way is not None:
            self._wait(ClusterChanges._under_way)
            if not ClusterChanges._under_way.done():
                raise _unfinished()
        definition = server_def(self._protocol, self._client_address, addresses)

        def change() -> None:
            with self._functions.held_back():
                tensorflow_internals.update_server_def(definition, self._client_timeout)

        leaving = {task: address for task, address in self.named.items() if task not in addresses}
        self.named = {**self.named, **addresses}
        ClusterChanges._under_way = made = on_own_thread("coordinator-cluster-change", change)
        # Parameter servers leave last: what is on them is freed if they are told.
        for job in ("worker", "ps"):
            self._wait(made)
            if not made.done():
                self._cut([address for task, address in leaving.items() if task.job == job])
        # A server that stays and freezes is hung up on by the heartbeat, which takes about `patience` too.
        self._wait(made, times=2)
        if not made.done():
            _logger.warning("TensorFlow has not finished a change of the cluster; the next one waits for that.")
            raise _unfinished()
        made.result()
        self.named = dict(addresses)

    def hurry(self) -> float:
        """Limits the patience, of a change that is under way too, because the strategy is being closed.

        Returns:
          The longest that a change may take from now on, in seconds.
        """
        self._patience = min(self._patience, PATIENCE_AT_CLOSE)
        return 5 * self._patience

    def close(self) -> None:
        """Leaves TensorFlow as it was before."""
        self._functions.close()

    def _cut(self, addresses: Collection[str]) -> None:
        if addresses:
            _logger.warning(
                "%s did not end what this client runs there in %g s; the connections are cut. A generator of "
                "tf.data.Dataset.from_generator that waits is the usual cause.",
                ", ".join(addresses),
                self._patience,
            )
        for address in addresses:
            OpenConnections().shut_down(address)

    def _wait(self, change: concurrent.futures.Future[None], times: int = 1) -> None:
        """Waits for a change to end, at most `times` the patience, which may become less meanwhile."""
        began = time.monotonic()
        while not change.done() and (left := began + times * self._patience - time.monotonic()) > 0:
            concurrent.futures.wait([change], min(left, _LONGEST_SLEEP))


def _unfinished() -> tf.errors.OpError:
    return tf.errors.DeadlineExceededError(None, None, "TensorFlow has not finished a change of the cluster.")
