"""Follows a description of the cluster that changes while training runs: workers come, go and move.

Promises: a description that cannot be had, or makes no sense, changes nothing and is reported; a worker that is lost
and another that is new are taken for the same one at another address. The thread ends with `stop`.
"""

import dataclasses
import logging
from collections.abc import Callable, Collection, Mapping, Sequence

from coordinator.background_thread import BackgroundThread

_logger = logging.getLogger("coordinator")


@dataclasses.dataclass(frozen=True)
class MembershipChange:
    """What is to be done to have the workers that are wanted.

    Attributes:
      moved: the new address of each worker that is somewhere else now, by index.
      removed: the indices of workers that are gone for good.
      added: the addresses of new workers.
    """

    moved: Mapping[int, str]
    removed: Sequence[int]
    added: Sequence[str]


def change_between(present: Mapping[int, str], lost: Collection[int], wanted: Collection[str]) -> MembershipChange:
    """Says how to come from the workers that there are to those that are wanted.

    Args:
      present: the address of each worker, by index.
      lost: the indices of those that do not answer.
      wanted: the addresses at which there are to be workers.
    """
    added = [address for address in dict.fromkeys(wanted) if address not in present.values()]
    gone = [index for index, address in sorted(present.items()) if address not in wanted]
    lost_and_gone = [index for index in gone if index in lost]
    moved = dict(zip(lost_and_gone, added, strict=False))
    return MembershipChange(moved, [index for index in gone if index not in moved], added[len(moved) :])


class MembershipWatch(BackgroundThread):
    """Asks for the workers' addresses every so often, and has the difference carried out.

    Args:
      addresses: gives the addresses at which there are to be workers; called on the thread of this class.
      interval: between two questions, in seconds.
      apply: brings the workers in line with these addresses.
    """

    def __init__(
        self, addresses: Callable[[], Collection[str]], interval: float, apply: Callable[[Collection[str]], None]
    ) -> None:
        super().__init__("coordinator-membership")
        self._addresses = addresses
        self._interval = interval
        self._apply = apply

    def _run(self) -> None:
        last_complaint = ""
        while not self._stop.wait(self._interval):
            try:
                self._apply(self._addresses())
                last_complaint = ""
            except Exception as error:  # noqa: BLE001 - it comes from the user's own source of addresses
                complaint = f"{type(error).__name__}: {error}"
                if complaint != last_complaint and not self._stop.is_set():
                    last_complaint = complaint
                    _logger.warning("The workers stay as they are, for the cluster's description is bad. %s", complaint)
