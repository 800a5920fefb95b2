"""One function in flight: the time until it begins, and until its result is known."""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.contestants.side import Side

_FIRST_COUNT = 20
_LEAST = 20


class Latencies:
    """A `Workload` of functions that return when they began and ended: `scalar` and `assign_add`.

    Client and servers are on one machine and share its clock.

    Args:
      side: runs them.
    """

    def __init__(self, side: Side) -> None:
        with side.scope():
            total = tf.Variable(0.0)
        self._side = side
        self._functions = {"scalar": _timed(tf.no_op), "assign_add": _timed(lambda: total.assign_add(1.0))}
        self._warm: set[str] = set()

    def run(self, work: str, seconds: float) -> dict[str, float]:
        """See `Workload`: `schedule`, `start`, `result` and `whole`, each with `_p50` and `_p99`, in seconds."""
        function = self._functions[work]
        if work not in self._warm:
            self._warm.add(work)
            for _ in range(_FIRST_COUNT):
                self._measure(function)
        samples = []
        end = time.perf_counter() + seconds
        while time.perf_counter() < end or len(samples) < _LEAST:
            samples.append(self._measure(function))
        return {
            f"{name}_p{percent}": float(np.percentile([sample[name] for sample in samples], percent))
            for name in samples[0]
            for percent in (50, 99)
        }

    def _measure(self, function: Any) -> dict[str, float]:
        requested = time.time()
        wait = self._side.schedule(function)
        queued = time.time()
        began, ended = wait()
        known = time.time()
        return {
            "schedule": queued - requested,
            "start": float(began) - requested,
            "result": known - float(ended),
            "whole": known - requested,
        }


def _timed(body: Callable[[], Any]) -> Any:
    @tf.function
    def timed() -> tuple[tf.Tensor, tf.Tensor]:
        began = tf.timestamp()
        with tf.control_dependencies([began]):
            done = body()
        with tf.control_dependencies([done]):
            return began, tf.timestamp()

    return timed
