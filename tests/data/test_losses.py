"""Tests of epochs while servers and the client die, on clusters of their own; visits are counted on two servers."""

import os

import pytest

from tests.program_runner import ProgramRunner

TRAINING = """
    import os
    import sys
    import threading

    import numpy as np
    import tensorflow as tf

    import coordinator
    from coordinator.data import Epochs
    from coordinator.testing import LocalCluster
    from tests.data.visits import EXACT, Visits, numbered

    SIZE, WIDTH = 20_000, 10
    ALONE = {"steps_per_dispatch": 1}

    def train(cluster, folder, epochs=1, saves=(), kill=None, die=None, prefetch=0, **options):
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
            if kill and count == kill[2]:
                threads.append(threading.Thread(target=cluster.restart, args=kill[:2]))
                threads[-1].start()
            if count == die:
                os._exit(9)
        strategy.join()
        for thread in threads:
            thread.join()
        found = visits.summary(), data.statistics(), len(rollbacks), begun
        strategy.close()
        return found
"""


@pytest.mark.long
@pytest.mark.cluster
def test_data_goes_back_with_the_model_when_a_parameter_server_dies(run_program: ProgramRunner) -> None:
    run_program(
        TRAINING
        + """
    import tempfile

    with LocalCluster(workers=2, ps=2) as cluster:
        for saves, options in (((400, 900, 1400), {}), ((400, 900, 1400), ALONE), ((), ALONE)):
            summary, statistics, rollbacks, _ = train(
                cluster, tempfile.mkdtemp(), saves=saves, kill=("ps", 1, 1200), **options
            )
            assert rollbacks == 1, rollbacks
            assert statistics.rolled_back > 0, statistics
            assert summary == EXACT, (saves, options, summary, statistics)
    """
    )


@pytest.mark.long
@pytest.mark.cluster
def test_a_client_that_dies_goes_on_with_other_numbers_of_servers(run_program: ProgramRunner, tmp_path) -> None:
    folder = os.fspath(tmp_path / "saved")
    shapes = ((2, 1, 1100), (3, 2, 1700), (1, 1, None))
    for workers, servers, die in shapes:
        run_program(
            TRAINING
            + f"""
    die_at = {die}
    with LocalCluster(workers={workers}, ps={servers}) as cluster:
        summary, _, _, begun = train(cluster, {folder!r}, 2, saves=range(250, 4000, 250), die=die_at)
    assert (begun == 4000) == (die_at == 1100), begun
    assert summary == EXACT, summary
    """,
            exit_code=0 if die is None else 9,
        )


@pytest.mark.long
@pytest.mark.cluster
def test_ranges_that_were_read_ahead_survive_workers_and_parameter_servers(run_program: ProgramRunner) -> None:
    run_program(
        TRAINING
        + """
    import tempfile

    with LocalCluster(workers=3, ps=2) as cluster:
        for job in ("worker", "ps", "worker"):
            summary, statistics, rollbacks, _ = train(
                cluster, tempfile.mkdtemp(), saves=(100, 400, 900), kill=(job, 1, 1200), prefetch=3
            )
            assert rollbacks == (job == "ps"), rollbacks
            if job == "ps":
                assert summary == EXACT, (summary, statistics)
            # The functions that the worker ran may have changed the model.
            assert [(never, more <= WIDTH) for never, more in summary] == [(0, True)] * 2, (summary, statistics)
    """
    )
