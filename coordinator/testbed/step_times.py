"""The times of the parts of real steps, and the simulator's setting with the same times.

asked          pulled                    computed           finished        asked (the next step)
  | latency x 2  |  sleep                    | latency x 2, update |  dispatch  |
"""

import dataclasses
import functools
import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from coordinator.simulation.distribution import Empirical
from coordinator.simulation.rules import Rule
from coordinator.simulation.setting import Setting

# The size of the table: large enough that draws from it resemble the distribution.
_SIZE = 64


@dataclasses.dataclass(frozen=True)
class Sleeps:
    """Lognormal times, and one slow worker, the last.

    The times vary because workers with equal times would stay in or out of phase for the whole run, by chance.

    Attributes:
      median: of a normal worker's step, in seconds.
      sigma: the standard deviation of the times' logarithm.
      slow_factor: the slow worker sleeps this many times as long.
    """

    median: float = 0.1
    sigma: float = 0.25
    slow_factor: float = 2.5

    @functools.cached_property
    def table(self) -> tuple[float, ...]:
        """Equally likely times of a normal worker, in seconds, rising."""
        normal = statistics.NormalDist(0.0, self.sigma)
        return tuple(self.median * math.exp(normal.inv_cdf((place + 0.5) / _SIZE)) for place in range(_SIZE))

    @property
    def mean(self) -> float:
        """The mean time of a normal worker's step, in seconds."""
        return statistics.fmean(self.table)

    def draw(self, worker: Any, slow_worker: Any) -> Any:
        """Draws the time that a step sleeps, in its graph.

        Args:
          worker: the index of the worker that runs the step; an int64 scalar.
          slow_worker: the index of the slow worker; an int64 scalar.

        Returns:
          Seconds, a float64 scalar.
        """
        import tensorflow as tf

        table = tf.constant(self.table, tf.float64)
        seconds = table[tf.random.uniform([], 0, _SIZE, tf.int32)]
        return tf.where(worker == slow_worker, self.slow_factor * seconds, seconds)

    def __str__(self) -> str:
        return (
            f"lognormal({1e3 * self.median:g}ms,{self.sigma:g}), mean {1e3 * self.mean:.1f} ms; on the last worker "
            f"{self.slow_factor:g} times that"
        )


# The times that a step records, in seconds: it asks to begin, has the version, has slept, its gradient is accepted.
ASKED, PULLED, COMPUTED, FINISHED = range(4)
RECORDED = 4
# Enough for a p99 that does not depend on the seed.
_PUSHES = 20_000
# In seconds: messages on one machine take longer, but a noisy pull without its waiting may not.
_LEAST_LATENCY = 1e-5


@dataclasses.dataclass(frozen=True)
class Run:
    """The measurements of a real run.

    Attributes:
      seconds: the duration of the run.
      updates: the number of updates of the model.
      histogram: the number of gradients at each staleness, int64.
      waited: the time that all workers together waited for the rule, in seconds.
      recorded: for each worker the times of its steps, float64 [steps, RECORDED].
    """

    seconds: float
    updates: int
    histogram: Any
    waited: float
    recorded: Sequence[Any]


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """The times of the parts of steps, in seconds.

    Attributes:
      computed: the times between pull and push; a tuple for each worker.
      dispatch: the times between a worker's steps.
      pull: the mean time until a step had the version, without waiting for the rule.
      push: the mean time until a gradient was accepted.
    """

    computed: tuple[tuple[float, ...], ...]
    dispatch: tuple[float, ...]
    pull: float
    push: float

    @classmethod
    def of(cls, runs: Sequence[Run]) -> "StepTimes":
        """Computes the times of parts from those recorded in runs, at least two steps of each worker in one of them."""
        together = np.concatenate([steps for run in runs for steps in run.recorded])
        between = np.concatenate([steps[1:, ASKED] - steps[:-1, FINISHED] for run in runs for steps in run.recorded])
        computed = [
            np.concatenate([steps[:, COMPUTED] - steps[:, PULLED] for steps in worker])
            for worker in zip(*(run.recorded for run in runs), strict=True)
        ]
        waited = sum(run.waited for run in runs) / len(together)
        pull = float(np.mean(together[:, PULLED] - together[:, ASKED])) - waited
        return cls(
            tuple(tuple(each.tolist()) for each in computed),
            # The wall clock may have been set meanwhile.
            tuple(np.maximum(between, 0.0).tolist()),
            max(pull, 2 * _LEAST_LATENCY),
            max(float(np.mean(together[:, FINISHED] - together[:, COMPUTED])), 2 * _LEAST_LATENCY),
        )

    def setting(self, rule: Rule) -> Setting:
        """Returns the simulator's setting, in which steps draw from the same times."""
        # The shorter of pull and push consists of two messages.
        latency = min(self.pull, self.push) / 2
        # The time by which a pull is longer than a push is spent before the push, as is the sleep.
        extra = self.pull - 2 * latency
        return Setting(
            workers=len(self.computed),
            rule=rule,
            compute=[Empirical(tuple(seconds + extra for seconds in each)) for each in self.computed],
            latency=latency,
            update=self.push - 2 * latency,
            dispatch=Empirical(self.dispatch),
            pushes=_PUSHES,
        )
