"""Tests that saved models load completely: without a strategy, under it, in parts, and on another cluster."""

import contextlib

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
from tests.ps_strategy.sharded.partitioners import partitioned

# Warnings of Keras itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning"),
    pytest.mark.long,
]


@pytest.fixture(scope="module", params=["whole", "sharded"])
def folder(strategy, tmp_path_factory, request):
    """A folder with a model that was saved while it was trained under the strategy."""
    folder = tmp_path_factory.mktemp("saved")
    with strategy.scope(), partitioned(3) if request.param == "sharded" else contextlib.nullcontext():
        model = make_model()
    train(strategy, model)
    assert int(model.optimizer.iterations) == STEPS
    parts = [getattr(variable.value, "parts", ()) for variable in model.optimizer.variables]
    assert any(parts) == (request.param == "sharded")
    save(model, folder)
    train(strategy, model)
    # What was exported keeps its values.
    served = tf.saved_model.load(str(folder / "exported"))
    np.testing.assert_allclose(served.serve(inputs()), np.load(folder / "output.npy"), rtol=1e-5)
    assert not np.allclose(model(inputs()), np.load(folder / "output.npy"))
    return folder


def test_a_saved_model_loads_outside_of_the_scope(folder):
    models, _ = load_and_check(folder, "/job:chief")
    for how, model in models.items():
        make_step(model)(*map(tf.constant, BATCH))
        assert int(model.optimizer.iterations) == STEPS + 1, how


@pytest.mark.parametrize("parts", [1, 2])
def test_a_saved_model_loads_onto_parameter_servers_and_continues_training(strategy, folder, parts):
    with strategy.scope(), partitioned(parts):
        models, served = load_and_check(folder, "/job:ps")
    for how, model in models.items():
        kernels = [variable.value for variable in model.trainable_variables if len(variable.shape) == 2]
        assert {len(getattr(kernel, "parts", [kernel])) for kernel in kernels} == {parts}, how
        train(strategy, model)
        assert int(model.optimizer.iterations) == 2 * STEPS, how
    # Every worker can run the exported model.
    for answer in on_every_worker(strategy, served.serve, inputs()):
        np.testing.assert_allclose(answer, np.load(folder / "output.npy"), rtol=1e-5)


def test_a_saved_model_loads_without_this_library_and_into_another_cluster(folder, run_program):
    run_program(
        """
        import pathlib
        import sys

        from tests.ps_strategy.keras.saved_keras_model import BATCH, STEPS, load_and_check, make_step

        folder = pathlib.Path(sys.argv[1])
        load_and_check(folder, "/job:localhost")
        assert "coordinator" not in sys.modules

        import coordinator
        from coordinator.testing import LocalCluster

        servers = LocalCluster(workers=1, ps=3)
        with servers, coordinator.ParameterServerStrategy(servers.resolver) as strategy:
            with strategy.scope():
                models, _ = load_and_check(folder, "/job:ps")
            for how, model in models.items():
                step = make_step(model)
                for _ in range(3):
                    strategy.schedule(step, args=BATCH)
                strategy.join(100)
                assert len({variable.value.device for variable in model.variables}) == 3, how
                assert int(model.optimizer.iterations) == STEPS + 3, how
        """,
        folder,
        fresh=True,
        timeout=240,
    )
