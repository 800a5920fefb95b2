"""A client whose only worker dies, in one way after another: work waits, and resumes when the worker is back.

Its argument is `killed` or `deadly`: from outside, or by what it runs. It ends with code 0 if every case passes.
"""

import sys

import pytest
import tensorflow as tf

import coordinator
from coordinator.testing import LocalCluster
from tests.deadline import wait_until
from tests.ps_strategy.every_worker import unhealthy
from tests.ps_strategy.gate import Gate

TIMEOUT = 120.0
FUNCTIONS = 5_000


def while_thousands_wait(cluster: LocalCluster, strategy: coordinator.ParameterServerStrategy) -> None:
    with strategy.scope():
        count = tf.Variable(0)
    step = tf.function(lambda: count.assign_add(1))
    for future in [strategy.schedule(step) for _ in range(FUNCTIONS // 10)]:
        future.result(TIMEOUT)
    gate = Gate(strategy)
    waiting = [*gate.occupy(), *(strategy.schedule(step) for _ in range(FUNCTIONS))]
    cluster.kill("worker", 0)
    wait_until(lambda: strategy.cluster.workers[0].state.value == "lost")
    gate.open()
    with pytest.raises(TimeoutError, match=f"{FUNCTIONS + 1} closures wait, running: nothing"):
        strategy.join(timeout=0.2)
    assert unhealthy(strategy) == ("/job:worker/replica:0/task:0",)
    assert not any(future.done() for future in waiting)
    cluster.restart("worker", 0)
    strategy.join(TIMEOUT)
    assert all(future.exception(timeout=0) is None for future in waiting)
    assert count.numpy() == FUNCTIONS + FUNCTIONS // 10
    assert unhealthy(strategy) == ()


def twice_in_a_row_while_iterators_are_made(
    cluster: LocalCluster, strategy: coordinator.ParameterServerStrategy
) -> None:
    take = tf.function(lambda iterator: next(iterator))  # noqa: PLW0108 - a builtin has no signature
    futures = []
    for _ in range(2):
        cluster.kill("worker", 0)
        dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.range(5, 8).repeat())
        futures += [strategy.schedule(take, args=(iter(dataset),)) for _ in range(3)]
        cluster.restart("worker", 0)
    strategy.join(TIMEOUT)
    assert [int(future.result(timeout=0)) for future in futures] == [5] * 6


@tf.function
def deadly(x: tf.Tensor) -> tf.Tensor:
    """Aborts the process that it runs in."""
    with tf.control_dependencies([tf.raw_ops.Abort(error_msg="a deadly function")]):
        return tf.identity(x)


def by_what_it_runs(cluster: LocalCluster, strategy: coordinator.ParameterServerStrategy) -> None:
    future = strategy.schedule(deadly, args=(tf.constant(1),))
    for _ in range(3):
        wait_until(lambda: not cluster.is_alive("worker", 0), limit=TIMEOUT)
        cluster.restart("worker", 0)
    error = future.exception(TIMEOUT)
    assert isinstance(error, coordinator.ClosureQuarantined), repr(error)
    assert str(error).count("worker lost") == 3, error
    assert "Options.max_attempts" in str(error)
    # The raw error distinguishes a lost worker from a lost parameter server.
    raw = error.original_exception
    assert isinstance(raw, tf.errors.UnavailableError | tf.errors.AbortedError), repr(raw)
    assert "/job:worker" in str(raw), raw
    assert "/job:ps" not in str(raw), raw
    with pytest.raises(coordinator.ClosureQuarantined):
        strategy.join(TIMEOUT)
    assert strategy.schedule(tf.function(lambda: tf.constant(1))).result(TIMEOUT) == 1


if __name__ == "__main__":
    killed = [while_thousands_wait, twice_in_a_row_while_iterators_are_made]
    with (
        LocalCluster(workers=1, ps=1) as servers,
        coordinator.ParameterServerStrategy(servers.resolver) as training,
    ):
        for case in {"killed": killed, "deadly": [by_what_it_runs]}[sys.argv[1]]:
            case(servers, training)
