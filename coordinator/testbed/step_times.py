"""The times of the parts of real steps, and the simulator's setting with the same times.

asked          pulled                    computed           finished        asked (the next step)
  | latency x 2  |  sleep                    | latency x 2, update |  dispatch  |

Steps of a rule on real workers that sleep instead of computing, and record the times of their parts.

What is counted in a run happened while all of its workers had steps to run.
"""

import concurrent.futures
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator.ps_strategy.parameter_server_strategy import ParameterServerStrategy
from coordinator.ps_strategy.per_worker.resource import get_current_worker_index
from coordinator.simulation.distribution import Empirical
from coordinator.simulation.rules import Rule
from coordinator.simulation.setting import Setting
from coordinator.testbed.training import RuleCounts
from coordinator.updates.rule_state import pause
from coordinator.updates.rules.asynchronous import Asynchronous
from coordinator.updates.rules.bounded_delay import BoundedDelay
from coordinator.updates.rules.model_average import ModelAverage
from coordinator.updates.rules.stale_synchronous import StaleSynchronous
from coordinator.updates.rules.synchronous import Synchronous
from coordinator.updates.update_rule import UpdateRule

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


# Steps that each worker finishes before the counts begin.
_SETTLING = 2
# Steps per worker beyond those that fit into the time of a run.
_MORE = 50
# In seconds, for waits of a few seconds.
_DEADLINE = 300.0
_VARIABLE_SHAPE = [16]
_KINDS: dict[str, Callable[..., UpdateRule]] = {
    kind.__name__: kind for kind in (Asynchronous, Synchronous, StaleSynchronous, BoundedDelay, ModelAverage)
}


class RealSteps:
    """A rule with a small model, and its step. The constructor has all workers run the step once.

    Args:
      strategy: has at least that number of workers.
      rule: the rule, as it is simulated; that of the cluster has the same name and settings.
      workers: the number of workers that take part; the last one is slow.
      sleeps: how long their steps sleep.
    """

    def __init__(self, strategy: ParameterServerStrategy, rule: Rule, workers: int, sleeps: Sleeps) -> None:
        self._strategy = strategy
        self._workers = workers
        self._sleeps = sleeps
        with strategy.scope():
            variable = tf.Variable(tf.zeros(_VARIABLE_SHAPE))
            kind = _KINDS[type(rule).__name__]
            self._rule = kind(_descend, [variable], learning_rate=1e-6, **dataclasses.asdict(rule))
        self._step = _new_step(self._rule, variable, sleeps, slow_worker=workers - 1)
        for worker in range(workers):
            strategy.schedule(self._step, worker=worker)
        strategy.join(_DEADLINE)

    def run(self, seconds: float) -> Run:
        """Runs steps on all workers for a time, in seconds.

        Raises:
          RuntimeError: a worker was quicker than its sleeps.
          Exception: what `ParameterServerStrategy.join` raises.
        """
        most = _SETTLING + _MORE + math.ceil(2 * seconds / self._sleeps.mean)
        scheduled = [
            [self._strategy.schedule(self._step, worker=worker) for worker in range(self._workers)] for _ in range(most)
        ]
        counted = [future for futures in scheduled[_SETTLING:] for future in futures]
        try:
            for futures in scheduled[:_SETTLING]:
                for future in futures:
                    future.result(_DEADLINE)
            before, since, began = RuleCounts.of(self._rule), time.time(), time.monotonic()
            concurrent.futures.wait(counted, timeout=seconds, return_when=concurrent.futures.FIRST_EXCEPTION)
            after, until, seconds = RuleCounts.of(self._rule), time.time(), time.monotonic() - began
        finally:
            for future in reversed(counted):
                if not future.running():
                    future.cancel()
        self._strategy.join(_DEADLINE)
        if any(not future.cancelled() for future in scheduled[-1]):
            raise RuntimeError(
                f"A worker has run out of steps within {seconds:g} s: {self._rule}, {self._workers} workers."
            )
        found = after - before
        recorded = [_recorded(futures, since, until) for futures in zip(*scheduled, strict=True)]
        return Run(seconds, found.updates, found.histogram, found.waited, recorded)


def _descend(variable: Any, gradient: Any, rate: Any) -> None:
    variable.assign_sub(rate * gradient)


def _recorded(futures: Sequence[Any], since: float, until: float) -> Any:
    """Returns the times of a worker's steps that finished between two wall times; float64 [steps, RECORDED]."""
    results = [future.result() for future in futures if not future.cancelled()]
    steps = np.array(results, np.float64).reshape(-1, RECORDED)
    return steps[(steps[:, FINISHED] > since) & (steps[:, FINISHED] <= until)]


def _new_step(rule: UpdateRule, variable: Any, sleeps: Sleeps, slow_worker: int) -> Any:
    def step() -> Any:
        asked = tf.timestamp()
        with tf.control_dependencies([asked]), rule.pull() as version:
            with tf.control_dependencies([version]):
                pulled = tf.timestamp()
            gradient = tf.ones_like(variable.read_value())
            with tf.control_dependencies([pulled, gradient]):
                slept = pause(sleeps.draw(get_current_worker_index(), slow_worker))
            with tf.control_dependencies([slept]):
                computed = tf.timestamp()
            with tf.control_dependencies([computed]):
                accepted = rule.push([tf.identity(gradient)], version)
        with tf.control_dependencies([accepted]):
            return tf.stack([asked, pulled, computed, tf.timestamp()])

    return tf.function(step, autograph=False)
