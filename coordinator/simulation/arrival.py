"""An event that happens again and again: a message of one worker arrives at the parameter servers."""

from collections.abc import Callable
from typing import Any

import simpy


class Arrival(simpy.Event):
    """An event of simpy that can be scheduled anew as soon as it has happened.

    Making a new event for each message would cost as much as all else that a message costs.

    Args:
      environment: where it is scheduled.
      callback: is called with this whenever it happens.
      worker: whose message it is.
    """

    def __init__(self, environment: simpy.Environment, callback: Callable[[Any], Any], worker: Any) -> None:
        super().__init__(environment)
        self.worker = worker
        # What `succeed` would set; but that schedules it for now.
        self._ok = True
        self._value = None
        self._again = [callback]

    def due_in(self, seconds: float) -> None:
        """Has it happen in so many seconds of virtual time; only if it is not scheduled already."""
        self.callbacks = self._again
        self.env.schedule(self, delay=seconds)

    def drop(self) -> None:
        """Has it not happen after all, and never again."""
        self.callbacks = []
        self._again = []
