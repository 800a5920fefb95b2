"""Workers that are added, removed and moved as a description of the cluster changes."""

import logging
from collections.abc import Callable, Collection, Mapping

from coordinator.runtime import Servers
from coordinator.workers.background_threads import QueueThread
from coordinator.workers.cluster import Cluster
from coordinator.workers.worker import WorkerState

_logger = logging.getLogger("coordinator")


# The addresses at which workers are wanted: by index, where each worker keeps its own.
WorkerAddresses = Mapping[int, str] | Collection[str]


def change_between(
    present: Mapping[int, str], lost: Collection[int], wanted: WorkerAddresses
) -> tuple[dict[int, str], list[int], list[str]]:
    """Compares the workers that there are with those that are wanted.

    Without indices, a lost worker whose address is not wanted any more is taken to have moved to a new address, if
    there is one.

    Args:
      present: the address of each worker, by index.
      lost: the indices of those that do not answer.
      wanted: the addresses at which workers are wanted.

    Returns:
      The new address of each worker that moved, by index; the indices of workers that are to be removed; and the
      addresses of new workers.
    """
    if isinstance(wanted, Mapping):
        changed = {index: address for index, address in wanted.items() if present.get(index, address) != address}
        removed = [index for index in sorted(present) if index not in wanted]
        return changed, removed, [address for index, address in sorted(wanted.items()) if index not in present]
    added = [address for address in dict.fromkeys(wanted) if address not in present.values()]
    gone = [index for index, address in sorted(present.items()) if address not in wanted]
    lost_and_gone = [index for index in gone if index in lost]
    moved = dict(zip(lost_and_gone, added, strict=False))
    return moved, [index for index in gone if index not in moved], added[len(moved) :]


class MembershipWatch(QueueThread):
    """Asks for the workers' addresses at intervals, and changes the workers while training runs.

    Addresses that cannot be read or applied change nothing, and are reported once.

    Args:
      cluster: has the workers.
      servers: know the workers' addresses.
      addresses: returns the addresses at which workers are wanted, at once or when they change; called on the thread of
        this class.
      interval: from its return to the next call, in seconds.
      interrupt: ends a call of `addresses` that waits; called by `stop`.
    """

    def __init__(
        self,
        cluster: Cluster,
        servers: Servers,
        addresses: Callable[[], WorkerAddresses],
        interval: float,
        interrupt: Callable[[], object] | None = None,
    ) -> None:
        super().__init__("coordinator-membership", self._follow, cluster.queue)
        self._cluster = cluster
        self._servers = servers
        self._addresses = addresses
        self._interval = interval
        self._interrupt = interrupt

    def stop(self) -> None:
        """Asks the thread to end."""
        super().stop()
        if self._interrupt is not None:
            self._interrupt()

    def _follow(self) -> None:
        last_reason = ""
        while not self.stopping.wait(self._interval):
            try:
                self._apply(self._addresses())
                last_reason = ""
            except (Exception, SystemExit) as error:  # noqa: BLE001 - it comes from the user's own source of addresses
                reason = f"{type(error).__name__}: {error}"
                if reason != last_reason and not self.stopping.is_set():
                    last_reason = reason
                    _logger.warning(
                        "The workers stay as they are: the cluster's description cannot be read. %s", reason
                    )

    def _apply(self, wanted: WorkerAddresses) -> None:
        cluster = self._cluster
        lost = [worker.index for worker in cluster.workers if worker.state is WorkerState.LOST]
        moved, removed, added = change_between(self._servers.worker_addresses, lost, wanted)
        for index, address in moved.items():
            _logger.warning("Worker %d has moved to %s.", index, address)
            cluster.move_worker(index, address)
        indices = {address: index for index, address in wanted.items()} if isinstance(wanted, Mapping) else {}
        for address in added:
            index = cluster.add_worker(address, indices.get(address))
            _logger.warning("A worker at %s joined as worker %d.", address, index)
        for index in removed:
            _logger.warning("Worker %d is removed, since its address is not listed any more.", index)
            cluster.remove_worker(index)
