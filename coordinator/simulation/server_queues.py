"""The parameter servers in virtual time: each serves messages one after another, in the order of their arrival."""

import dataclasses
from collections import deque

import numpy as np

from coordinator.simulation.distribution import Constant, Distribution


@dataclasses.dataclass(frozen=True)
class QueueStatistics:
    """How messages waited at the rule's home server.

    Attributes:
      utilization: the share of the time that it was busy, from 0 to 1.
      mean_length: the mean number of messages in the queue when one more arrived.
      longest: the largest such number.
      mean_wait: the mean time that a message waited before it was served, in seconds.
    """

    utilization: float
    mean_length: float
    longest: int
    mean_wait: float


class ServerQueues:
    """Serves messages that are sent to all servers at once, each of which has a part of the model.

    The first server is the rule's home. If the servers always take the same time for a message, they stay in step, and
    one is simulated for all.

    Args:
      count: the number of servers.
      service: the time that a message takes on a server, in seconds, besides what depends on its size.
      generator: random numbers.

    Attributes:
      home_free_at: when the home server will have served all messages, in seconds.
    """

    def __init__(self, count: int, service: Distribution, generator: np.random.Generator) -> None:
        self._draw = service.sampler(generator)
        self._others_free_at = [0.0] * (0 if isinstance(service, Constant) else count - 1)
        self._leaving: deque[float] = deque()
        self.home_free_at = 0.0
        self._messages = 0
        self._busy_seconds = self._waited_seconds = 0.0
        self._longest = self._found = 0

    def serve(self, now: float, extra: float, least: float) -> float:
        """Serves a message that arrives now, on every server.

        Args:
          now: the time, in seconds; at least that of the call before.
          extra: the time that it takes on each server besides the usual, in seconds.
          least: the earliest end, in seconds: the worker's own link is busy until then.

        Returns:
          When the last server has served it, in seconds.
        """
        free_at, seconds = self.home_free_at, extra + self._draw()
        self._messages += 1
        self._busy_seconds += seconds
        leaving = self._leaving
        if free_at > now:
            while leaving[0] <= now:
                leaving.popleft()
            self._waited_seconds += free_at - now
            found = len(leaving)
            self._found += found
            self._longest = max(self._longest, found)
            end = free_at + seconds
        else:
            leaving.clear()
            end = now + seconds
        leaving.append(end)
        self.home_free_at = end
        if self._others_free_at:
            draw = self._draw
            self._others_free_at = [max(now, free_at) + extra + draw() for free_at in self._others_free_at]
            end = max(end, *self._others_free_at)
        return end if end > least else least

    def statistics(self, seconds: float) -> QueueStatistics:
        """Returns how messages waited within the first seconds."""
        messages = max(self._messages, 1)
        return QueueStatistics(
            # The last messages may keep it busy beyond the time that was simulated.
            utilization=min(self._busy_seconds / seconds, 1.0) if seconds else 0.0,
            mean_length=self._found / messages,
            longest=self._longest,
            mean_wait=self._waited_seconds / messages,
        )
