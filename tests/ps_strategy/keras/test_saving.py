"""Tests that models saved under the strategy load completely: without a strategy, under it, and on another cluster."""

import numpy as np
import pytest
import tensorflow as tf

from tests.ps_strategy.every_worker import on_every_worker
from tests.ps_strategy.keras.saved_keras_model import (
    BATCH,
    STEPS,
    inputs,
    load_and_check,
    make_model,
    make_step,
    save,
    train,
)

# Warnings of Keras itself.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")


@pytest.fixture(scope="module")
def folder(strategy, tmp_path_factory):
    """A folder with a saved model that was trained under the strategy."""
    folder = tmp_path_factory.mktemp("saved")
    with strategy.scope():
        model = make_model()
    train(strategy, model)
    assert int(model.optimizer.iterations) == STEPS
    save(model, folder)
    return folder


@pytest.mark.long
def test_a_saved_model_loads_outside_of_the_scope(folder):
    models, _ = load_and_check(folder, "/job:chief")
    for model in models.values():
        before = int(model.optimizer.iterations)
        make_step(model)(*map(tf.constant, BATCH))
        assert int(model.optimizer.iterations) == before + 1 == STEPS + 1


@pytest.mark.long
def test_a_saved_model_loads_onto_parameter_servers_and_continues_training(strategy, folder):
    with strategy.scope():
        models, served = load_and_check(folder, "/job:ps")
    for how, model in models.items():
        variables = [*model.variables, *model.optimizer.variables]
        assert {variable.value.device for variable in variables} == set(strategy.extended.parameter_devices), how
        train(strategy, model)
        assert int(model.optimizer.iterations) == 2 * STEPS, how
    # Every worker can run the exported model.
    for answer in on_every_worker(strategy, served.serve, inputs()):
        np.testing.assert_allclose(answer, np.load(folder / "output.npy"), rtol=1e-5)


@pytest.mark.long
def test_a_saved_model_loads_in_a_program_without_a_strategy(folder, run_program):
    program = run_program(
        """
        import pathlib
        import sys

        from tests.ps_strategy.keras.saved_keras_model import load_and_check

        load_and_check(pathlib.Path(sys.argv[1]), "/job:localhost")
        print("all the same")
        """,
        folder,
    )
    assert program.stdout.endswith("all the same\n")


@pytest.mark.long
def test_a_saved_model_loads_into_a_cluster_of_another_shape(folder, run_program):
    program = run_program(
        """
        import pathlib
        import sys

        import coordinator
        from coordinator.testing import LocalCluster
        from tests.ps_strategy.keras.saved_keras_model import BATCH, load_and_check, make_step

        servers = LocalCluster(workers=1, ps=3)
        with servers, coordinator.ParameterServerStrategy(servers.resolver) as strategy:
            with strategy.scope():
                models, _ = load_and_check(pathlib.Path(sys.argv[1]), "/job:ps")
            for how, model in models.items():
                step = make_step(model)
                for _ in range(3):
                    strategy.schedule(step, args=BATCH)
                strategy.join(100)
                used = {variable.value.device for variable in model.variables}
                print(how, int(model.optimizer.iterations), len(used))
        """,
        folder,
        timeout=240,
    )
    assert program.stdout.splitlines() == ["save 9 3", "save_weights 9 3", "Checkpoint 9 3"]
