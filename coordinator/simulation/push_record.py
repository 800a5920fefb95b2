"""The pushes of one training: when, by whom, how stale."""

from array import array


class PushRecord:
    """Every push, in the order of their arrival at the parameter servers.

    Attributes:
      times: in seconds.
      workers: their indices.
      staleness: in updates.
    """

    def __init__(self) -> None:
        # Millions of them: of plain numbers, eight bytes each.
        self.times = array("d")
        self.workers = array("l")
        self.staleness = array("q")

    def note(self, now: float, worker: int, staleness: int) -> None:
        """Notes a push at a time in seconds, of a worker, of a staleness in updates."""
        self.times.append(now)
        self.workers.append(worker)
        self.staleness.append(staleness)

    def __repr__(self) -> str:
        return f"<PushRecord of {len(self.times)}>"
