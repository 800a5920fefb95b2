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


@pytest.mark.long
def test_steps_do_not_ask_the_kernel_for_their_memory_again(
    strategy: ParameterServerStrategy, shared_cluster: LocalCluster
) -> None:
    with strategy.scope():
        variable = tf.Variable(tf.zeros([NUMBERS]))

    @tf.function
    def step() -> tf.Tensor:
        variable.assign_add(tf.ones_like(variable))
        return tf.reduce_sum(variable)

    def page_faults_of(count: int) -> int:
        before = page_faults(worker)
        for _ in range(count):
            strategy.schedule(step, worker=0)
        strategy.join()
        return page_faults(worker) - before

    worker = shared_cluster.pid("worker", 0)
    # While calls of more and more steps are built, a worker needs more memory at a time than ever before. Then it does
    # not: if it gave memory back after each step, every run would have ten times as many page faults.
    assert any(page_faults_of(40) < 40 * 4 * NUMBERS / PAGE / 10 for _ in range(6))
