"""Operations of the client return while a worker is frozen, although TensorFlow calls every worker for them."""

import pytest

from tests.program_runner import ProgramRunner

PROGRAM = """
    import faulthandler, gc, tempfile, threading

    import tensorflow as tf
    import coordinator
    from coordinator.heartbeat.heartbeat import Heartbeat
    from coordinator.heartbeat.heartbeat_process import Liveness
    from coordinator.testing import LocalCluster

    # A call that hangs here may keep Python's global lock; nothing else could end this program.
    faulthandler.dump_traceback_later(240, exit=True)

    def wait_state(heartbeat, address, state):
        pause = threading.Event()
        while heartbeat.state(address).liveness is not state:
            pause.wait(0.01)

    with LocalCluster(workers=2, ps=1) as cluster, coordinator.ParameterServerStrategy(cluster.resolver) as strategy:
        with strategy.scope():
            variable = tf.Variable(0.0)

        @tf.function
        def step():
            return variable.assign_add(1.0)

        # Both workers know the function by now.
        for _ in range(20):
            strategy.schedule(step)
        strategy.join(timeout=60)

        heartbeat = Heartbeat(interval=1.0, timeout=2.0)
        addresses = [address for job in cluster.spec.values() for address in job]
        for address in addresses:
            heartbeat.watch(address)
        for address in addresses:
            wait_state(heartbeat, address, Liveness.ANSWERING)

        frozen = cluster.spec["worker"][1]
        cluster.freeze("worker", 1)
        # A new operation, one on a server, a new function, a trace, dropping a function, a checkpoint, and functions.
        tf.constant([1, 2, 3], tf.int64) + 4
        variable.assign_add(2.0)
        function = tf.function(lambda x: x * variable)
        function(tf.constant(2.0))
        tf.function(lambda x: x + variable).get_concrete_function(tf.constant(2.0))
        del function
        gc.collect()
        with tempfile.TemporaryDirectory() as folder:
            tf.train.Checkpoint(v=variable).save(f"{folder}/checkpoint")
        [tf.function(lambda x: x + n)(tf.constant(1)) for n in range(5)]
        assert heartbeat.state(frozen).liveness is Liveness.SILENT, heartbeat
        cluster.thaw("worker", 1)
        wait_state(heartbeat, frozen, Liveness.ANSWERING)
        heartbeat.close()
        assert variable.numpy() == 22.0, variable
"""


@pytest.mark.long
@pytest.mark.cluster
def test_operations_of_the_client_return_while_a_worker_is_frozen(run_program: ProgramRunner) -> None:
    run_program(PROGRAM, timeout=280.0)
