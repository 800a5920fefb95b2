"""Changes of the cluster that TensorFlow makes, in bounded time.

Telling TensorFlow which servers there are (`update_server_def`) closes what this client has on the servers that are no
longer named. Each of them first ends what it runs for the client, and that may take for ever: a dataset made by
`from_generator` calls back a generator in this process, which may wait. So a change is made on a thread:

    make --> thread: update_server_def -----------------------> done
      |          in time? else cut the connections to the servers that leave, which ends the wait for them
      '--------> still not in time: DeadlineExceededError; the thread is left behind

Promises: `make` returns or raises within four times `patience`. No change is begun before the one before it has ended.
"""

import concurrent.futures
import logging
import threading
from collections.abc import Callable, Collection, Mapping
from typing import TypeVar

import tensorflow as tf

from coordinator.heartbeat.open_connections import OpenConnections
from coordinator.ps_strategy import tensorflow_internals
from coordinator.ps_strategy.cluster_definition import Task, server_def
from coordinator.ps_strategy.tensorflow_internals import FunctionRegistration

# How patient whoever closes a strategy is at most, in seconds, however patient heartbeats are.
LONGEST_PATIENCE_AT_CLOSE = 5.0

_logger = logging.getLogger("coordinator")

Result = TypeVar("Result")


class ClusterChanges:
    """Has TensorFlow change the cluster; one thread at a time may use it.

    Args:
      protocol: of all servers, such as `grpc`.
      client_address: `host:port` of this process's own TensorFlow server.
      client_timeout: see `update_server_def`.
      patience: how long a server may take to end what it runs for this client before connections to it are cut, in
        seconds.

    Attributes:
      patience: as given; may be changed.
      named: the servers that TensorFlow was given last, with their addresses. Some may have been lost since.
    """

    def __init__(self, protocol: str, client_address: str, client_timeout: float, patience: float) -> None:
        self._protocol = protocol
        self._client_address = client_address
        self._client_timeout = client_timeout
        self.patience = patience
        self._functions = FunctionRegistration(patience)
        self._under_way: concurrent.futures.Future[None] | None = None
        self.named: dict[Task, str] = {}

    def make(self, addresses: Mapping[Task, str]) -> None:
        """Connects to exactly these servers.

        Args:
          addresses: `host:port` of each.

        Raises:
          tf.errors.DeadlineExceededError: the change, or the one before it, takes too long. It may still be made.
          tf.errors.OpError: a server does not answer.
        """
        if self._under_way is not None:
            concurrent.futures.wait([self._under_way], self.patience)
            self._refuse_unfinished()
        definition = server_def(self._protocol, self._client_address, addresses)

        def change() -> None:
            with self._functions.held_back():
                tensorflow_internals.update_server_def(definition, self._client_timeout)

        leaving = {task: address for task, address in self.named.items() if task not in addresses}
        self.named = {**self.named, **addresses}
        self._under_way = made = on_own_thread("coordinator-cluster-change", change)
        # Parameter servers leave last: what is on them is freed if they are told.
        for job in ("worker", "ps"):
            concurrent.futures.wait([made], self.patience)
            if not made.done():
                self._cut([address for task, address in leaving.items() if task.job == job])
        # A server that stays and freezes is hung up on by the heartbeat, which takes about `patience` too.
        concurrent.futures.wait([made], 2 * self.patience)
        self._refuse_unfinished()
        made.result()
        self.named = dict(addresses)

    def close(self) -> None:
        """Leaves TensorFlow as it was before."""
        self._functions.close()

    def _cut(self, addresses: Collection[str]) -> None:
        if addresses:
            _logger.warning(
                "%s did not end what this client runs there in %g s; the connections are cut. A generator of "
                "tf.data.Dataset.from_generator that waits is the usual cause.",
                ", ".join(addresses),
                self.patience,
            )
        for address in addresses:
            OpenConnections().shut_down(address)

    def _refuse_unfinished(self) -> None:
        assert self._under_way is not None
        if not self._under_way.done():
            raise tf.errors.DeadlineExceededError(None, None, "TensorFlow has not finished a change of the cluster.")


def on_own_thread(name: str, call: Callable[[], Result]) -> concurrent.futures.Future[Result]:
    """Calls a function on a new daemon thread, with an executor that no other thread uses.

    An error stays with the executor of the thread that saw it. A call into TensorFlow that never returns keeps nothing
    but that thread.

    Args:
      name: of the thread.
      call: the function.

    Returns:
      A future of what it returns.
    """
    future: concurrent.futures.Future[Result] = concurrent.futures.Future()

    def run() -> None:
        try:
            with tensorflow_internals.own_executor():
                result = call()
        except BaseException as error:  # noqa: BLE001 - the future raises it
            future.set_exception(error)
        else:
            future.set_result(result)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
