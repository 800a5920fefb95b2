"""Steps of a rule on real workers: they sleep instead of computing, and note when they do what.

It promises that what is counted of a run happened while all of its workers had steps to do.
"""

import concurrent.futures
import dataclasses
import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator.ps_strategy.parameter_server_strategy import ParameterServerStrategy
from coordinator.ps_strategy.worker_index import get_current_worker_index
from coordinator.testbed.confirmation.confirmed_rule import ConfirmedRule
from coordinator.testbed.confirmation.figures import Counted
from coordinator.testbed.confirmation.sleeps import Sleeps
from coordinator.testbed.confirmation.step_times import FINISHED, NOTED
from coordinator.updates.state.gate import pause
from coordinator.updates.state.rule_state import WAITED
from coordinator.updates.update_rule import UpdateRule

# Steps that each worker finishes before anything is counted.
_SETTLING = 2
# Steps for each worker beyond those that there can be in the time of a run.
_MORE = 50
# In seconds, for what takes a few.
_DEADLINE = 300.0
_VARIABLE_SHAPE = [16]


@dataclasses.dataclass(frozen=True)
class Run:
    """What was seen of a run.

    Attributes:
      counted: by the rule.
      noted: of each worker, what its steps noted meanwhile, float64 [steps, NOTED]; see `StepTimes`.
    """

    counted: Counted
    noted: Sequence[Any]


class RealSteps:
    """A rule with a small model, and the step that uses it. When it is made, all workers have run it.

    Args:
      strategy: has at least so many workers.
      rule: the rule.
      workers: how many of them take part; the last one is slow.
      sleeps: what they sleep for.
    """

    def __init__(self, strategy: ParameterServerStrategy, rule: ConfirmedRule, workers: int, sleeps: Sleeps) -> None:
        self._strategy = strategy
        self._workers = workers
        self._sleeps = sleeps
        with strategy.scope():
            variable = tf.Variable(tf.zeros(_VARIABLE_SHAPE))
            self._rule = rule.real([variable], workers)
        self._step = _new_step(self._rule, variable, sleeps, slow_worker=workers - 1)
        for worker in range(workers):
            strategy.schedule(self._step, worker=worker)
        strategy.join(_DEADLINE)

    def run(self, seconds: float) -> Run:
        """Has all workers run steps for a time, in seconds.

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
            before = _Reading.of(self._rule)
            concurrent.futures.wait(counted, timeout=seconds, return_when=concurrent.futures.FIRST_EXCEPTION)
            after = _Reading.of(self._rule)
        finally:
            for future in reversed(counted):
                if not future.running():
                    future.cancel()
        self._strategy.join(_DEADLINE)
        if any(not future.cancelled() for future in scheduled[-1]):
            raise RuntimeError(f"A worker has run out of steps within {after.at - before.at:g} s: {self!r}.")
        noted = [_noted(futures, before.at_wall, after.at_wall) for futures in zip(*scheduled, strict=True)]
        return Run(after.since(before), noted)

    def __repr__(self) -> str:
        return f"<RealSteps: {self._rule}, {self._workers} workers>"


@dataclasses.dataclass(frozen=True)
class _Reading:
    """What a rule's ledger has at a time.

    Attributes:
      at, at_wall: in seconds, of the clock that only goes forward and of the one that steps note.
      updates, histogram, waited: so far; see `Counted`.
    """

    at: float
    at_wall: float
    updates: int
    histogram: Any
    waited: float

    @classmethod
    def of(cls, rule: UpdateRule) -> "_Reading":
        found = rule.ledger.snapshot()
        waited = float(found.seconds[:, WAITED].sum())
        return cls(time.monotonic(), time.time(), found.counts["updates"], found.histogram, waited)

    def since(self, before: "_Reading") -> Counted:
        return Counted(
            self.at - before.at,
            self.updates - before.updates,
            self.histogram - before.histogram,
            self.waited - before.waited,
        )


def _noted(futures: Sequence[Any], since: float, until: float) -> Any:
    """What those of a worker's steps noted that were finished between two times; float64 [steps, NOTED]."""
    results = [future.result() for future in futures if not future.cancelled()]
    steps = np.array(results, np.float64).reshape(-1, NOTED)
    return steps[(steps[:, FINISHED] > since) & (steps[:, FINISHED] <= until)]


def _new_step(rule: UpdateRule, variable: Any, sleeps: Sleeps, slow_worker: int) -> Any:
    def step() -> Any:
        asked = tf.timestamp()
        with tf.control_dependencies([asked]), rule.pull() as version:
            with tf.control_dependencies([version]):
                pulled = tf.timestamp()
            gradient = tf.ones_like(variable.read_value())
            with tf.control_dependencies([pulled, gradient]):
                slept = pause(sleeps.drawn(get_current_worker_index(), slow_worker))
            with tf.control_dependencies([slept]):
                computed = tf.timestamp()
            with tf.control_dependencies([computed]):
                accepted = rule.push([tf.identity(gradient)], version)
        with tf.control_dependencies([accepted]):
            return tf.stack([asked, pulled, computed, tf.timestamp()])

    return tf.function(step, autograph=False)
