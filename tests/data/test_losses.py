"""Tests of epochs while servers and the client die, on clusters of their own; visits are counted on two servers."""

import os

import pytest

from tests.program_runner import ProgramRunner

TRAINING = """
    import os
    import threading

    import numpy as np
    import tensorflow as tf

    import coordinator
    from coordinator.data import Epochs
    from coordinator.testing import LocalCluster
    from tests.data.visits import Visits, numbered
    from tests.deadline import wait_until

    SIZE, WIDTH = 20_000, 10

    def train(cluster, folder, epochs=1, saves=(), kills=(), die=None, prefetch=0, **options):
        strategy = coordinator.ParameterServerStrategy(cluster.resolver, options=coordinator.Options(**options))
        source = numbered(SIZE)
        visits = Visits(strategy, source, epochs)
        data = Epochs(source, WIDTH, epochs, shuffle=5, prefetch=prefetch)
        first, second = visits.counts
        checkpoint = tf.train.Checkpoint(first=first, second=second, epochs=data)
        manager = tf.train.CheckpointManager(checkpoint, folder, max_to_keep=2)
        manager.restore_or_initialize()
        rollbacks = []
        strategy.restore_from(manager, on_rollback=rollbacks.append)
        begun = data.remaining
        threads = []
        for count, positions in enumerate(data.on(strategy)):
            strategy.schedule(visits.step, args=(positions,))
            if count in saves:
                manager.save()
            if count in (600, 1200) and len(kills) > len(threads):
                # More than the last checkpoint has, which is saved 300 ranges earlier.
                wait_until(lambda done=count - 100: data.statistics().done >= done)
                threads.append(threading.Thread(target=cluster.restart, args=(kills[len(threads)], 1)))
                threads[-1].start()
            if count == die:
                os._exit(9)
        strategy.join()
        for thread in threads:
            thread.join()
        assert len(rollbacks) == kills.count("ps"), rollbacks
        assert (data.statistics().rolled_back > 0) == ("ps" in kills), data.statistics()
        workers = strategy.cluster.statistics()
        for missing, too_many in visits.summary():
            assert missing == 0, visits.summary()
            # What a lost worker was running may have changed the model, and was run again. A busy worker may be lost
            # together with the parameter server.
            has_lost_worker = any(worker.losses for worker in workers.workers)
            assert too_many <= has_lost_worker * WIDTH * workers.retried, (visits.summary(), workers)
        strategy.close()
        return begun
"""


@pytest.mark.long
@pytest.mark.cluster
def test_ranges_go_back_with_the_model_or_are_repeated_when_a_server_dies(run_program: ProgramRunner) -> None:
    run_program(
        TRAINING
        + """
    import tempfile

    with LocalCluster(workers=2, ps=2) as cluster:
        for saves, options in (
            ((400, 900, 1400), {"kills": ["ps"], "prefetch": 3}),
            ((), {"kills": ["worker", "ps"], "steps_per_dispatch": 1}),
        ):
            train(cluster, tempfile.mkdtemp(), saves=saves, **options)
    """
    )


@pytest.mark.long
@pytest.mark.cluster
def test_a_client_that_dies_goes_on_with_other_numbers_of_servers(run_program: ProgramRunner, tmp_path) -> None:
    folder = os.fspath(tmp_path / "saved")
    for workers, servers, die in ((2, 1, 1100), (3, 2, None)):
        run_program(
            TRAINING
            + f"""
    with LocalCluster(workers={workers}, ps={servers}) as cluster:
        begun = train(cluster, {folder!r}, 2, saves=range(250, 4000, 250), die={die})
    assert begun < 4000, begun
    """,
            exit_code=0 if die is None else 9,
        )
