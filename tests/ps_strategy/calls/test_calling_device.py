"""Functions are called on the first GPU of a worker, where it has one; datasets are made on its CPU."""

from coordinator.ps_strategy.calls.tensorflow_runtime import TensorFlowRuntime
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
