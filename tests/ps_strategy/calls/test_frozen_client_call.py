"""Operations of the client return while a worker is frozen, although TensorFlow calls every worker for them."""

import re

import pytest

from tests.program_runner import ProgramRunner

# Generous: a worker is found silent after 3 seconds at most, and an idle machine needs little more than this.
LONGEST = 30.0

PROGRAM = """
    import faulthandler, gc, sys, tempfile, threading, time

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

    def measure(name, call):
        begun = time.monotonic()
        call()
        print(f"{name}: {time.monotonic() - begun:.2f} s", flush=True)

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
        measure("a new op", lambda: tf.constant([1, 2, 3], tf.int64) + 4)
        measure("an op on the parameter server", lambda: variable.assign_add(2.0))
        function = tf.function(lambda x: x * variable)
        measure("a new function", lambda: function(tf.constant(2.0)))
        measure("a trace", lambda: tf.function(lambda x: x + variable).get_concrete_function(tf.constant(2.0)))
        del function
        measure("dropping a function", gc.collect)
        with tempfile.TemporaryDirectory() as folder:
            measure("a checkpoint", lambda: tf.train.Checkpoint(v=variable).save(f"{folder}/checkpoint"))
        assert heartbeat.state(frozen).liveness is Liveness.SILENT, heartbeat

        measure("many new functions", lambda: [tf.function(lambda x: x + n)(tf.constant(1)) for n in range(5)])
        cluster.thaw("worker", 1)
        wait_state(heartbeat, frozen, Liveness.ANSWERING)
        heartbeat.close()
        assert variable.numpy() == 22.0, variable
"""


@pytest.mark.long
@pytest.mark.cluster
def test_operations_of_the_client_return_while_a_worker_is_frozen(run_program: ProgramRunner) -> None:
    program = run_program(PROGRAM, timeout=280.0)
    took = {name: float(seconds) for name, seconds in re.findall(r"^(.*): ([0-9.]+) s$", program.stdout, re.MULTILINE)}
    assert len(took) == 7, program.stdout
    assert max(took.values()) < LONGEST, took
