"""Steps of a rule on real workers. The steps sleep instead of computing, and record the times of their parts.

A run counts only the time in which all of its workers had steps to run.
"""

import concurrent.futures
import dataclasses
import math
import time
from typing import Any

import numpy as np
import tensorflow as tf

from coordinator import updates
from coordinator.ps_strategy.parameter_server_strategy import ParameterServerStrategy
from coordinator.ps_strategy.per_worker.resource import get_current_worker_index
from coordinator.simulation.rules import Rule
from coordinator.testbed.step_times import FINISHED, RECORDED, Run, Sleeps
from coordinator.testbed.training import counts_of, paused, run_between, timed_step
from coordinator.updates.update_rule import UpdateRule

# Steps that each worker finishes before the counts begin.
_SETTLING = 2
# The number of steps per worker in addition to the steps that fit into the time of a run.
_MORE = 50
# The timeout of waits that should take a few seconds, in seconds.
_DEADLINE = 300.0


class RealSteps:
    """A rule with a small model, and its step, which the constructor runs once on all workers.

    `rule` is a rule of the simulator; the cluster's rule has the same name and settings. The first `workers` workers of
    the strategy take part, and the last of them is slow. `sleeps` says how long steps sleep.
    """

    def __init__(self, strategy: ParameterServerStrategy, rule: Rule, workers: int, sleeps: Sleeps) -> None:
        self._strategy = strategy
        self._workers = workers
        self._sleeps = sleeps
        with strategy.scope():
            variable = tf.Variable(tf.zeros([16]))
            kind = getattr(updates, type(rule).__name__)
            self._rule: UpdateRule = kind(_descend, [variable], learning_rate=1e-6, **dataclasses.asdict(rule))

        def compute(pulled: Any) -> tuple[list[Any], list[Any]]:
            gradient = tf.ones_like(variable.read_value())
            with tf.control_dependencies([pulled, gradient]):
                seconds = sleeps.draw(get_current_worker_index(), workers - 1)
            return paused([gradient], seconds), []

        def step() -> Any:
            return timed_step(self._rule, tf.timestamp(), compute)

        self._step = tf.function(step, autograph=False)
        for worker in range(workers):
            strategy.schedule(self._step, worker=worker)
        strategy.join(_DEADLINE)

    def run(self, seconds: float) -> Run:
        """Runs steps on all workers for a time, in seconds.

        Raises RuntimeError if a worker was quicker than its sleeps, and the errors of `ParameterServerStrategy.join`.
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
            before, since, began = counts_of(self._rule), time.time(), time.monotonic()
            concurrent.futures.wait(counted, timeout=seconds, return_when=concurrent.futures.FIRST_EXCEPTION)
            after, until, seconds = counts_of(self._rule), time.time(), time.monotonic() - began
        finally:
            for future in reversed(counted):
                if not future.running():
                    future.cancel()
        self._strategy.join(_DEADLINE)
        if any(not future.cancelled() for future in scheduled[-1]):
            raise RuntimeError(
                f"A worker has run out of steps within {seconds:g} s: {self._rule}, {self._workers} workers."
            )
        # The times of each worker's steps that finished in the counted time.
        recorded = []
        for of_worker in zip(*scheduled, strict=True):
            results = [future.result() for future in of_worker if not future.cancelled()]
            steps = np.array(results, np.float64).reshape(-1, RECORDED)
            recorded.append(steps[(steps[:, FINISHED] > since) & (steps[:, FINISHED] <= until)])
        return run_between(before, after, seconds, recorded)


def _descend(variable: Any, gradient: Any, rate: Any) -> None:
    variable.assign_sub(rate * gradient)
