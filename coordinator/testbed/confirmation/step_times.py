"""What real steps took, part by part, read off the times that they note, and the simulator's setting of the same times.

asked          pulled                    computed           finished        asked (the next step)
  | latency x 2  |  sleep                    | latency x 2, update |  dispatch  |
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from coordinator.simulation.distribution import Empirical
from coordinator.simulation.rules.rule import Rule
from coordinator.simulation.setting import Setting

# What a step notes: when it asked whether it may begin, when it knew the version, when it had slept, and when its
# gradient was taken; in seconds.
ASKED, PULLED, COMPUTED, FINISHED = range(4)
NOTED = 4
# Enough for a p99 that the seed does not change.
_PUSHES = 20_000
# In seconds: messages on one machine take longer, but what is left of a noisy pull after the waiting may not.
_LEAST_LATENCY = 1e-5


@dataclasses.dataclass(frozen=True)
class StepTimes:
    """All in seconds.

    Attributes:
      computed: what each worker's steps took between pull and push; a tuple for each worker.
      dispatch: what passed between a worker's steps.
      pull: what a step took until it knew the version, waiting for the rule left out; a mean.
      push: what a gradient took until it was taken; a mean.
    """

    computed: tuple[tuple[float, ...], ...]
    dispatch: tuple[float, ...]
    pull: float
    push: float

    @classmethod
    def of(cls, runs: Sequence[Sequence[Any]], waited: float) -> "StepTimes":
        """Of what steps have noted.

        Args:
          runs: of each run, of each worker, float64 [steps, NOTED]; at least two steps of each worker in one run.
          waited: what all of them together waited because their rule made them, in seconds.
        """
        together = np.concatenate([steps for run in runs for steps in run])
        between = np.concatenate([steps[1:, ASKED] - steps[:-1, FINISHED] for run in runs for steps in run])
        computed = [
            np.concatenate([steps[:, COMPUTED] - steps[:, PULLED] for steps in worker])
            for worker in zip(*runs, strict=True)
        ]
        pull = float(np.mean(together[:, PULLED] - together[:, ASKED])) - waited / len(together)
        return cls(
            tuple(tuple(each.tolist()) for each in computed),
            # Two clocks of one machine are one, but it may be set.
            tuple(np.maximum(between, 0.0).tolist()),
            max(pull, 2 * _LEAST_LATENCY),
            max(float(np.mean(together[:, FINISHED] - together[:, COMPUTED])), 2 * _LEAST_LATENCY),
        )

    @property
    def latency(self) -> float:
        """Of a message, one way: the quicker of pull and push is two messages and nothing else."""
        return min(self.pull, self.push) / 2

    def setting(self, rule: Rule, seed: int = 0) -> Setting:
        """The simulator's setting in which steps take the same times, which are drawn anew and in another order."""
        # What a pull takes longer than a push is spent before the push, as is the sleep.
        extra = self.pull - 2 * self.latency
        return Setting(
            workers=len(self.computed),
            rule=rule,
            compute=[Empirical(tuple(seconds + extra for seconds in each)) for each in self.computed],
            latency=self.latency,
            update=self.push - 2 * self.latency,
            dispatch=Empirical(self.dispatch),
            pushes=_PUSHES,
            seed=seed,
        )
