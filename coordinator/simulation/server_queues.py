"""The parameter servers in virtual time: each serves messages one after another, in the order in which they come."""

from collections import deque

import numpy as np

from coordinator.simulation.distribution import Constant, Distribution


class ServerQueues:
    """Messages to all servers at a time, each of which has a part of the model. The first server is the rule's home.

    Servers that always take the same time for a message stay in step, so one of them stands for all.

    Args:
      count: how many servers there are.
      service: what a message takes on a server, in seconds, beside what depends on its size.
      generator: of random numbers.

    Attributes:
      home_free_at: when the home server will have served all that has come, in seconds.
      messages: how often a message was sent to all.
      busy: what the home server has spent serving, in seconds.
      queued: what messages have spent waiting there, in seconds, added up.
      longest: the most messages that were there when one more came.
      found: messages that were there when one more came, added up.
    """

    def __init__(self, count: int, service: Distribution, generator: np.random.Generator) -> None:
        self._draw = service.drawn(generator)
        self._others_free_at = [0.0] * (0 if isinstance(service, Constant) else count - 1)
        self._leaving: deque[float] = deque()
        self.home_free_at = 0.0
        self.messages = 0
        self.busy = self.queued = 0.0
        self.longest = self.found = 0

    def serve(self, now: float, extra: float, least: float) -> float:
        """Serves a message on every server that has just come.

        Args:
          now: the time, in seconds; never less than before.
          extra: what it takes longer than usual on each, in seconds.
          least: it is not through before that time, in seconds: the worker's own link is busy until then.

        Returns:
          When it is through, in seconds.
        """
        free_at, seconds = self.home_free_at, extra + self._draw()
        self.messages += 1
        self.busy += seconds
        leaving = self._leaving
        if free_at > now:
            while leaving[0] <= now:
                leaving.popleft()
            self.queued += free_at - now
            found = len(leaving)
            self.found += found
            self.longest = max(self.longest, found)
            end = free_at + seconds
        else:
            leaving.clear()
            end = now + seconds
        leaving.append(end)
        self.home_free_at = end
        if self._others_free_at:
            end = max(end, self._serve_others(now, extra))
        return end if end > least else least

    def _serve_others(self, now: float, extra: float) -> float:
        """The same on those that are not the home."""
        draw = self._draw
        self._others_free_at = [max(now, free_at) + extra + draw() for free_at in self._others_free_at]
        return max(self._others_free_at)

    def __repr__(self) -> str:
        return f"<ServerQueues: {self.messages} messages, home free at {self.home_free_at:g} s>"
