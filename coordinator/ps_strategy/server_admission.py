"""Which servers take part, of those that TensorFlow has just been connected to.

    connected --> of our version? --> whose clients are gone? --> held by our lease
                   server_version          client_note             client_lease

It promises that nothing runs on a server of another TensorFlow, unless `Options.version_mismatch` says so; that such a
server is looked at once in its life; and that a server which dies meanwhile is simply not admitted.
"""

import concurrent.futures
import logging
from collections.abc import Mapping
from typing import Protocol, TypeVar

import tensorflow as tf

from coordinator.errors import VersionMismatchError
from coordinator.options import Options
from coordinator.ps_strategy import tensorflow_internals
from coordinator.ps_strategy.client_lease import ClientLease
from coordinator.ps_strategy.client_note import Client, leave_note
from coordinator.ps_strategy.membership.bounded_calls import call_within
from coordinator.ps_strategy.membership.cluster_definition import Task
from coordinator.ps_strategy.server_version import check_version

_logger = logging.getLogger("coordinator")

# Each greeting is a few short calls to another server: many at once cost little.
_MOST_THREADS = 16
# In seconds; there are former clients to be asked, too.
_LONGEST_GREETING = 30.0


class ServerRun(Protocol):
    """One run of a server, from its start to its end."""

    @property
    def incarnation(self) -> int:
        """The number that the server drew when it started."""


Run = TypeVar("Run", bound=ServerRun)


class ServerAdmission:
    """Greets servers that are new, and keeps up the lease on those that were admitted.

    `admit` is called by one thread at a time, the others by any.

    Args:
      client_address: `host:port` of this process's own TensorFlow server.
      options: time limits, and what to do about another TensorFlow.
    """

    def __init__(self, client_address: str, options: Options) -> None:
        self._client = Client.of_this_process(tensorflow_internals.context_id(), client_address)
        self._lease = ClientLease(self._client.context_id, options)
        self._answer_timeout = options.probe_timeout
        self._is_mismatch_error = options.version_mismatch == "error"
        self._admitted: dict[Task, ServerRun] = {}
        self._refused: dict[int, VersionMismatchError] = {}

    def admit(self, connected: Mapping[Task, Run], addresses: Mapping[Task, str]) -> dict[Task, Run]:
        """Those of the servers that take part; the lease is kept up on them, and on no others.

        Args:
          connected: the servers that TensorFlow is connected to now. A run that was admitted before is not greeted.
          addresses: `host:port` of each.
        """
        new = [task for task, run in connected.items() if self._admitted.get(task) is not run]
        with concurrent.futures.ThreadPoolExecutor(_MOST_THREADS, "coordinator-admission") as threads:
            greeted = threads.map(lambda task: self._greet(task, addresses[task], connected[task].incarnation), new)
            stay_out = {task for task, is_welcome in zip(new, greeted, strict=True) if not is_welcome}
        admitted = {task: run for task, run in connected.items() if task not in stay_out}
        self._admitted = dict(admitted)
        self._lease.hold([addresses[task] for task in admitted])
        return admitted

    def is_refused(self, incarnation: int) -> bool:
        """Whether a run of a server was found to be of another TensorFlow."""
        return incarnation in self._refused

    def raise_refusal(self) -> None:
        """Raises the `VersionMismatchError` of a server that was refused, if one was."""
        for error in self._refused.values():
            raise error

    def is_forgotten(self, address: str) -> bool:
        """Whether an admitted server has freed what this client made on it; see `ClientLease.is_forgotten`."""
        return self._lease.is_forgotten(address)

    def close(self) -> None:
        """Ends the lease's thread."""
        self._lease.close()

    def __repr__(self) -> str:
        return f"<ServerAdmission: {len(self._admitted)} admitted, {len(self._refused)} refused>"

    def _greet(self, task: Task, address: str, incarnation: int) -> bool:
        def greet() -> None:
            check_version(task.device, address, is_error=self._is_mismatch_error)
            leave_note(task.device, address, self._client, self._answer_timeout)

        try:
            call_within(_LONGEST_GREETING, "coordinator-greeting", greet)
        except VersionMismatchError as error:
            _logger.error("%s It takes no part.", error)
            self._refused[incarnation] = error
            return False
        except (tf.errors.OpError, TimeoutError) as error:
            _logger.info("%s could not be greeted: %s", task, error)
            return False
        return True
