"""Functions are called on the first GPU of a worker, where it has one; datasets are made on its CPU."""

import tensorflow as tf

from coordinator.ps_strategy.calls.tensorflow_runtime import TensorFlowRuntime
from coordinator.ps_strategy.per_worker.resource import WorkerContext
from coordinator.ps_strategy.tensorflow_internals.functions import CancellationManager
from coordinator.runtime import Builds
from tests.ps_strategy.membership.fake_servers import FIRST

# Two devices that any machine has.
WORKERS = [f"/job:worker/replica:0/task:{worker}/device:CPU:0" for worker in range(2)]


def test_work_is_told_which_device_of_its_worker_calls_functions(servers, connect):
    servers.with_gpu.add(FIRST)
    runtime = TensorFlowRuntime(connect())
    contexts = [runtime.run(worker, lambda context: context, None) for worker in range(2)]
    assert [context.device for context in contexts] == WORKERS
    assert [context.calling_device for context in contexts] == [WORKERS[0].replace("CPU", "GPU"), WORKERS[1]]
    assert [context.on_cpu.calling_device for context in contexts] == WORKERS


def context_of_both():
    """Returns a worker whose functions are called on another one's device."""
    return WorkerContext(0, *WORKERS, 0, CancellationManager(), Builds())


def test_the_dataset_of_a_worker_is_made_on_its_cpu(strategy):
    datasets = strategy.experimental_distribute_datasets_from_function(lambda _: tf.data.Dataset.range(3))
    made = datasets.value_on(context_of_both())
    # An iterator is where its dataset is.
    assert tf.data.experimental.to_variant(made).device == WORKERS[0]
