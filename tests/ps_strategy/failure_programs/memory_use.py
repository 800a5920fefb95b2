"""Prints the memory of the client and of each parameter server, in bytes, after each of N repetitions.

With the arguments `opened N`, of opening and closing a strategy; with `restarted N`, of killing a worker.
"""

import gc
import os
import sys
from typing import Any

import psutil
import tensorflow as tf

import coordinator
from benchmarks.contestants.criteo_like import CATEGORIES, COUNTS, ROWS
from benchmarks.contestants.recommender_model import LEARNING_RATE, RecommenderModel
from coordinator.testing import LocalCluster

STEPS, BATCH = 60, 64
# Otherwise a call of more steps may be built at any time, which takes memory too.
OPTIONS = coordinator.Options(steps_per_dispatch=16)


def training_step(strategy: coordinator.ParameterServerStrategy) -> Any:
    """Makes a recommender on the servers of a strategy, and returns a step that trains it."""
    with strategy.scope():
        model = RecommenderModel()

    @tf.function
    def step() -> None:
        rows = tf.random.uniform([BATCH, CATEGORIES], maxval=ROWS, dtype=tf.int64)
        gradients = model.gradients(tf.random.uniform([BATCH, COUNTS]), rows, tf.ones([BATCH, 1]))
        for variable, gradient in zip(model.variables, gradients, strict=True):
            if isinstance(gradient, tf.IndexedSlices):
                variable.scatter_sub(tf.IndexedSlices(LEARNING_RATE * gradient.values, gradient.indices))
            else:
                variable.assign_sub(LEARNING_RATE * gradient)

    return step


def train(strategy: coordinator.ParameterServerStrategy, step: Any) -> None:
    """Makes some steps on all workers."""
    for _ in range(STEPS):
        strategy.schedule(step)
    strategy.join()


def report(cluster: LocalCluster) -> None:
    """Prints what the processes use now."""
    gc.collect()
    pids = [os.getpid(), *(cluster.pid("ps", index) for index in range(2))]
    print(*(psutil.Process(pid).memory_info().rss for pid in pids), flush=True)  # noqa: T201 - the test reads it


def main(cluster: LocalCluster, kind: str, repetitions: int) -> None:
    """Runs the repetitions."""
    if kind == "opened":
        for _ in range(repetitions):
            with coordinator.ParameterServerStrategy(cluster.resolver, options=OPTIONS) as strategy:
                train(strategy, training_step(strategy))
            report(cluster)
        return
    with coordinator.ParameterServerStrategy(cluster.resolver, options=OPTIONS) as strategy:
        step = training_step(strategy)
        for _ in range(repetitions):
            train(strategy, step)
            report(cluster)
            cluster.restart("worker", 0)
            strategy.schedule(step, worker=0).result(120)


if __name__ == "__main__":
    with LocalCluster(workers=2, ps=2) as servers:
        main(servers, sys.argv[1], int(sys.argv[2]))
