"""Tests that sharded models of Keras 3 are saved as plain ones, and load into plain and sharded models."""

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

PARTITIONER = tf.distribute.experimental.partitioners.FixedShardsPartitioner(3)


@pytest.fixture(scope="module")
def model(strategy, sharded_scope):
    """A sharded model, trained."""
    with sharded_scope(PARTITIONER):
        model = make_model()
    train(strategy, model)
    return model


@pytest.fixture(scope="module")
def folder(model, tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    save(model, folder)
    return folder


@pytest.mark.long
def test_a_saved_sharded_model_loads_into_plain_ones(model, folder):
    assert any(hasattr(variable.value, "parts") for variable in model.optimizer.variables)
    models, _ = load_and_check(folder, "/job:chief")
    for loaded in models.values():
        assert not any(hasattr(variable.value, "parts") for variable in loaded.variables)
        make_step(loaded)(*map(tf.constant, BATCH))
        assert int(loaded.optimizer.iterations) == STEPS + 1


@pytest.mark.long
def test_a_saved_sharded_model_loads_into_other_shards_and_continues_training(strategy, sharded_scope, folder):
    with sharded_scope(tf.distribute.experimental.partitioners.FixedShardsPartitioner(2)):
        models, served = load_and_check(folder, "/job:ps")
    for how, loaded in models.items():
        kernels = [variable.value for variable in loaded.trainable_variables if variable.shape[0] > 1]
        assert {len(kernel.variables) for kernel in kernels} == {2}, how
        train(strategy, loaded)
        assert int(loaded.optimizer.iterations) == 2 * STEPS, how
    # Every worker can run the exported model.
    for answer in on_every_worker(strategy, served.serve, inputs()):
        np.testing.assert_allclose(answer, np.load(folder / "output.npy"), rtol=1e-5)


@pytest.mark.long
def test_a_plain_saved_model_loads_into_sharded_ones(strategy, sharded_scope, tmp_path):
    plain = make_model()
    make_step(plain)(*map(tf.constant, BATCH))
    save(plain, tmp_path)
    with sharded_scope(PARTITIONER):
        models, _ = load_and_check(tmp_path, "/job:ps")
    for loaded in models.values():
        assert any(hasattr(variable.value, "parts") for variable in loaded.variables)
        train(strategy, loaded, steps=1)


@pytest.mark.long
def test_training_goes_on_after_an_export_which_keeps_its_values(strategy, model, folder):
    before = int(model.optimizer.iterations)
    train(strategy, model, steps=2)
    assert int(model.optimizer.iterations) == before + 2
    served = tf.saved_model.load(str(folder / "exported"))
    np.testing.assert_allclose(served.serve(inputs()), np.load(folder / "output.npy"), rtol=1e-5)
    assert not np.allclose(model(inputs()), np.load(folder / "output.npy"))


@pytest.mark.long
def test_a_saved_sharded_model_loads_in_a_program_without_this_library(folder, run_program):
    program = run_program(
        """
        import sys

        import keras
        import numpy as np
        import tensorflow as tf

        folder = sys.argv[1]
        words, numbers = [["a", "b"], ["c", "a"], ["?", "c"]], [[1.0], [5.0], [3.0]]
        given = {"words": tf.constant(words), "numbers": tf.constant(numbers)}
        expected = np.load(folder + "/output.npy")
        exported, loaded = tf.saved_model.load(folder + "/exported"), keras.models.load_model(folder + "/model.keras")
        for call in (exported.serve, loaded):
            np.testing.assert_allclose(call(given), expected, rtol=1e-5)
        assert "coordinator" not in sys.modules
        print("all the same")
        """,
        folder,
        fresh=True,
    )
    assert program.stdout.endswith("all the same\n")
