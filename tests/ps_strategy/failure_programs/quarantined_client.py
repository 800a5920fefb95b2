"""A client that schedules a function which kills its worker each time. The test starts the servers: three workers.

Its argument is the cluster specification as JSON.
"""

import sys

import pytest
import tensorflow as tf

import coordinator
from tests.deadline import wait_until
from tests.ps_strategy.every_worker import unhealthy
from tests.ps_strategy.failure_programs.trainer import connect

TIMEOUT = 120.0


@tf.function
def deadly(is_deadly: tf.Tensor) -> tf.Tensor:
    """Aborts the process that it runs in."""
    if is_deadly:
        with tf.control_dependencies([tf.raw_ops.Abort(error_msg="a deadly function")]):
            return tf.identity(is_deadly)
    return is_deadly


def main(spec: str) -> None:
    strategy = connect(spec, max_attempts=2)
    count = tf.function(lambda: tf.constant(1))
    assert strategy.schedule(deadly, args=(tf.constant(False),)).result(TIMEOUT) == 0

    future = strategy.schedule(deadly, args=(tf.constant(True),))
    error = future.exception(TIMEOUT)
    assert isinstance(error, coordinator.ClosureQuarantined), repr(error)
    assert str(error).count("worker lost") == 2, error
    assert "Options.max_attempts" in str(error)
    # The raw error distinguishes a lost worker from a lost parameter server.
    raw = error.original_exception
    assert isinstance(raw, tf.errors.UnavailableError | tf.errors.AbortedError), repr(raw)
    assert "/job:worker" in str(raw), raw
    assert "/job:ps" not in str(raw), raw
    with pytest.raises(coordinator.ClosureQuarantined):
        strategy.join(TIMEOUT)

    # The remaining worker never ran it, and runs the rest.
    for _ in range(10):
        strategy.schedule(count)
    strategy.join(TIMEOUT)
    assert len(unhealthy(strategy)) == 2
    # The last loss is counted only after the future has its error.
    wait_until(lambda: sorted(worker.losses for worker in strategy.cluster.statistics().workers) == [0, 1, 1])
    strategy.close()


if __name__ == "__main__":
    main(sys.argv[1])
