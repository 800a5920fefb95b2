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

# The size of a table of times. Random draws from the table resemble the distribution.
_SIZE = 64


@dataclasses.dataclass(frozen=True)
class Sleeps:
    """Lognormal times with a median in seconds. The last worker is slow: it sleeps `slow_factor` times as long.

    The times vary, because with equal times workers would by chance stay in or out of phase for the whole run. `sigma`
    is the standard deviation of the times' logarithm.
    """

    median: float = 0.1
    sigma: float = 0.25
    slow_factor: float = 2.5

    @functools.cached_property
    def table(self) -> tuple[float, ...]:
        """Equally likely times of a normal worker, in seconds, in ascending order."""
        normal = statistics.NormalDist(0.0, self.sigma)
        return tuple(self.median * math.exp(normal.inv_cdf((place + 0.5) / _SIZE)) for place in range(_SIZE))

    @property
    def mean(self) -> float:
        """The mean time of a normal worker's step, in seconds."""
        return statistics.fmean(self.table)

    def draw(self, worker: Any, slow_worker: Any) -> Any:
        """Draws the time that a step sleeps, in the step's graph; returns seconds, a float64 scalar.

        `worker` is the index of the step's worker, `slow_worker` the index of the slow worker; int64 scalars.
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


# The times that a step records, in seconds: when it asks to begin, has the version, has slept, and has been accepted.
ASKED, PULLED, COMPUTED, FINISHED = range(4)
RECORDED = 4
# The number of simulated pushes, large enough that the p99 does not depend on the seed.
_PUSHES = 20_000
# The least simulated latency, in seconds. Messages take longer, but a measured pull minus its waiting is noisy.
_LEAST_LATENCY = 1e-5


@dataclasses.dataclass(frozen=True)
class Run:
    """The measurements of a real run of some seconds.

    `histogram` has the number of gradients at each staleness, int64. All workers together waited for the rule for
    `waited` seconds. `recorded` has the times of each worker's steps, float64 [steps, RECORDED].
    """

    seconds: float
    updates: int
    histogram: Any
    waited: float
    recorded: Sequence[Any]


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """The times of the parts of steps, in seconds; `computed` has a tuple for each worker.

    A step computes between its pull and its push. `dispatch` has the times between a worker's steps. `pull` is the mean
    time until a step had the version, without the time that it waited for the rule. `push` is the mean time until the
    step's gradient was accepted.
    """

    computed: tuple[tuple[float, ...], ...]
    dispatch: tuple[float, ...]
    pull: float
    push: float

    @classmethod
    def of(cls, runs: Sequence[Run]) -> "StepTimes":
        """Computes the times of parts from recorded runs. In one run or more, each worker has at least two steps."""
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
            # A time may be negative if the wall clock was set in between.
            tuple(np.maximum(between, 0.0).tolist()),
            max(pull, 2 * _LEAST_LATENCY),
            max(float(np.mean(together[:, FINISHED] - together[:, COMPUTED])), 2 * _LEAST_LATENCY),
        )

    def setting(self, rule: Rule) -> Setting:
        """Returns the simulator's setting, whose steps draw from the same times."""
        # The shorter of pull and push consists of two messages.
        latency = min(self.pull, self.push) / 2
        # If the pull is longer, the simulated computation takes the difference, too.
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
