"""Servers that `coordinator` starts use the memory of one step again in the next."""

from pathlib import Path

import pytest
import tensorflow as tf

from coordinator import ParameterServerStrategy
from coordinator.testing import LocalCluster

pytestmark = pytest.mark.cluster

NUMBERS = 4 << 20
PAGE = 4096


def page_faults(process: int) -> int:
    """Returns how often the kernel has given a page to a process (`minflt` in /proc/PID/stat)."""
    return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[7])


def test_steps_do_not_ask_the_kernel_for_their_memory_again(
    strategy: ParameterServerStrategy, shared_cluster: LocalCluster
) -> None:
    with strategy.scope():
        variable = tf.Variable(tf.zeros([NUMBERS]))

    @tf.function
    def step() -> tf.Tensor:
        variable.assign_add(tf.ones_like(variable))
        return tf.reduce_sum(variable)

    def run(count: int) -> None:
        for _ in range(count):
            strategy.schedule(step, worker=0)
        strategy.join()

    worker = shared_cluster.pid("worker", 0)
    # Calls of several steps are built.
    run(40)
    before = page_faults(worker)
    run(40)
    assert page_faults(worker) - before < 40 * 4 * NUMBERS / PAGE / 10
