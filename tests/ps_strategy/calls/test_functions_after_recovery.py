"""Tests of functions that workers were preparing when a parameter server died, on a cluster of their own."""

import pytest

from tests.program_runner import ProgramRunner


@pytest.mark.long
@pytest.mark.cluster
def test_functions_that_were_being_prepared_run_after_the_recovery(run_program: ProgramRunner) -> None:
    run_program(
        """
    import tempfile
    import threading

    import tensorflow as tf

    import coordinator
    from coordinator.testing import LocalCluster

    FUNCTIONS, KILLS, STEPS = 300, 3, 4
    with LocalCluster(workers=2, ps=2) as cluster:
        strategy = coordinator.ParameterServerStrategy(
            cluster.resolver, options=coordinator.Options(steps_per_dispatch=STEPS)
        )
        with strategy.scope():
            variables = [tf.Variable(0.0) for _ in range(2)]

        @tf.function
        def step():
            for number in range(100):  # So many operations take long to prepare.
                for variable in variables:
                    variable.assign_add(tf.sin(number * variable.read_value()))

        manager = tf.train.CheckpointManager(tf.train.Checkpoint(variables=variables), tempfile.mkdtemp(), 2)
        manager.save()
        killers = []

        def kill_soon(_=None):
            if len(killers) < KILLS:
                killers.append(threading.Timer(0.1, cluster.restart, ("ps", 1)))
                killers[-1].start()

        strategy.restore_from(manager, on_rollback=kill_soon)
        futures = [strategy.schedule(step) for _ in range(FUNCTIONS)]
        kill_soon()
        for future in futures:
            future.result(200)
        for killer in killers:
            killer.join()
        workers = strategy.cluster.statistics().workers
        assert len(killers) == KILLS, len(killers)
        assert [worker.losses for worker in workers] == [0, 0], workers
        # What ran when the server died, on both workers. Without a new function, every call would fail.
        assert sum(worker.retried for worker in workers) <= 2 * len(workers) * KILLS * STEPS, workers
        strategy.close()
    """,
        timeout=280,
    )
