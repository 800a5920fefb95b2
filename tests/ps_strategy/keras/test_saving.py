"""Tests that saved models load completely: without a strategy, under it, in parts, and on another cluster."""

import contextlib

import numpy as np
import pytest
import tensorflow as tf

from tests.ps_strategy.every_worker import on_every_worker
from tests.ps_strategy.keras.saved_keras_model import STEPS, inputs, load_and_check, make_model, save, train
from tests.ps_strategy.sharded.partitioners import partitioned

# Warnings of Keras itself.
pytestmark = [
    pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning"),
    pytest.mark.long,
]


def saved(strategy, folder, is_sharded):
    """Saves a model while it is trained under the strategy."""
    with strategy.scope(), partitioned(3) if is_sharded else contextlib.nullcontext():
        model = make_model()
    train(model)
    assert int(model.optimizer.iterations) == STEPS
    assert any(getattr(variable.value, "parts", ()) for variable in model.optimizer.variables) == is_sharded
    save(model, folder)
    train(model)
    # What was exported keeps its values.
    served = tf.saved_model.load(str(folder / "exported"))
    np.testing.assert_allclose(served.serve(inputs()), np.load(folder / "output.npy"), rtol=1e-5)
    assert not np.allclose(model(inputs()), np.load(folder / "output.npy"))


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_saved_model_loads_on_the_client_and_onto_parameter_servers_and_is_trained(strategy, tmp_path, is_sharded):
    saved(strategy, tmp_path, is_sharded)
    models, _ = load_and_check(tmp_path, "/job:chief")
    train(models["save"])
    assert int(models["save"].optimizer.iterations) == 2 * STEPS
    with strategy.scope(), partitioned(1 if is_sharded else 2):
        models, served = load_and_check(tmp_path, "/job:ps")
    for how, model in models.items():
        kernels = [variable.value for variable in model.trainable_variables if len(variable.shape) == 2]
        assert {len(getattr(kernel, "parts", [kernel])) for kernel in kernels} == {1 if is_sharded else 2}, how
        train(model)
        assert int(model.optimizer.iterations) == 2 * STEPS, how
    # Every worker can run the exported model.
    for answer in on_every_worker(strategy, served.serve, inputs()):
        np.testing.assert_allclose(answer, np.load(tmp_path / "output.npy"), rtol=1e-5)


def test_a_saved_model_loads_without_this_library_and_into_another_cluster(strategy, tmp_path, run_program):
    saved(strategy, tmp_path, is_sharded=True)
    run_program(
        """
        import pathlib
        import sys

        from tests.ps_strategy.keras.saved_keras_model import STEPS, load_and_check, train

        folder = pathlib.Path(sys.argv[1])
        load_and_check(folder, "/job:localhost")
        assert "coordinator" not in sys.modules

        import coordinator
        from coordinator.testing import LocalCluster

        servers = LocalCluster(workers=1, ps=3)
        with servers, coordinator.ParameterServerStrategy(servers.resolver) as strategy:
            with strategy.scope():
                models, _ = load_and_check(folder, "/job:ps")
            assert len({variable.value.device for variable in models["save"].variables}) == 3
            train(models["save"])
            assert int(models["save"].optimizer.iterations) == 2 * STEPS
        """,
        tmp_path,
        fresh=True,
        timeout=240,
    )
