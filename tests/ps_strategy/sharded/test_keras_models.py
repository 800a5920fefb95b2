"""Tests of Keras 3 models and optimizers whose variables are sharded: they train as in one process."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.ps_strategy.keras.internals.test_row_updates import BY_ROWS, GRADIENTS, IDS, OTHERS, TOUCHED, WIDTH
from tests.ps_strategy.keras.internals.test_row_updates import ROWS as FEW_ROWS
from tests.ps_strategy.keras.internals.test_row_updates import Training as _Training
from tests.ps_strategy.keras.test_optimizers import CHANGE_WHOLE_VARIABLES, OPTIMIZERS

# Warnings of Keras itself.
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")

TIMEOUT = 240.0
ROWS = 50
RANDOM = np.random.default_rng(0)
PARTITIONER = tf.distribute.experimental.partitioners.FixedShardsPartitioner(3)


ALL = {**BY_ROWS, **{name: OPTIMIZERS[name] for name in sorted(CHANGE_WHOLE_VARIABLES)}}
# One for each way to change a variable.
DEFAULT = ("SGD, Nesterov's", "Adam, global_clipnorm", "Lamb")
DENSE = np.random.default_rng(2).normal(size=(len(GRADIENTS), FEW_ROWS, WIDTH)).astype(np.float32)


def make_model(**embedding):
    """Returns a model in which every matrix and most vectors have several rows."""
    table = keras.layers.Embedding(ROWS, 4, name="table", **embedding)
    layers = [
        keras.layers.Flatten(),
        keras.layers.Dense(8, "relu", name="hidden"),
        keras.layers.Dense(1, name="output"),
    ]
    model = keras.Sequential([keras.Input((3,), dtype="int64"), table, *layers])
    model.compile(keras.optimizers.Adam(0.02), "mse", metrics=["mae"])
    model.optimizer.build(model.trainable_variables)
    return model


def make_step(model, is_dense=False):
    @tf.function
    def step(ids, labels):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((model(ids, training=True) - labels) ** 2) + sum(model.losses)
        gradients = tape.gradient(loss, model.trainable_variables)
        # Of rows of the same index Keras itself adds up the squares, not the square of the sum.
        gradients = [tf.convert_to_tensor(each) if is_dense else each for each in gradients]
        model.optimizer.apply(gradients, model.trainable_variables)
        return loss

    return step


def test_layers_regularizers_and_constraints_are_as_in_one_process(strategy, sharded_scope):
    constraint = keras.constraints.MaxNorm(0.05, axis=0)
    with sharded_scope(PARTITIONER):
        model = make_model(embeddings_regularizer="l2", embeddings_constraint=constraint)
    plain = make_model(embeddings_regularizer="l2", embeddings_constraint=constraint)
    plain.set_weights(model.get_weights())
    parts = {each.path.partition("/")[2]: len(getattr(each.value, "variables", [1])) for each in model.variables}
    names = ("table/embeddings", "hidden/kernel", "hidden/bias", "output/kernel")
    assert parts == {**dict.fromkeys(names, 3), "output/bias": 1}
    # Both are trained on the same batches, one at a time, which have all rows of the table.
    step, here = make_step(model), make_step(plain, is_dense=True)
    for _ in range(2):
        ids = np.concatenate([RANDOM.permutation(ROWS), RANDOM.integers(0, ROWS, size=10)]).reshape([-1, 3])
        labels = RANDOM.normal(size=(len(ids), 1)).astype(np.float32)
        found = strategy.schedule(step, args=(ids, labels)).result(TIMEOUT)
        np.testing.assert_allclose(found, here(tf.constant(ids), tf.constant(labels)), rtol=1e-4)
    for variable, expected in zip(
        [*model.variables, *model.optimizer.variables], [*plain.variables, *plain.optimizer.variables], strict=True
    ):
        np.testing.assert_allclose(variable.numpy(), expected.numpy(), rtol=1e-4, atol=1e-5, err_msg=variable.path)
    plain.set_weights(model.get_weights())
    ids = RANDOM.integers(0, ROWS, size=(64, 3))
    np.testing.assert_allclose(model.predict(ids, verbose=0), plain(ids), rtol=1e-4, atol=1e-6)
    assert model.count_params() == plain.count_params()
    # The norms are of the whole variable.
    assert np.all(np.linalg.norm(model.layers[0].get_weights()[0], axis=0) <= 0.05 + 1e-5)


class Training(_Training):
    """A table and a vector, both in parts under the strategy, and an optimizer for both."""

    def steps(self, gradient, dense):
        """Applies a gradient of some rows, and one of all."""
        self.step(gradient, tf.constant(IDS))
        self.step(dense)


def summed(gradient):
    """Returns the gradient as a dense one, with rows of the same index summed."""
    found = np.zeros([FEW_ROWS, WIDTH], np.float32)
    np.add.at(found, IDS, gradient)
    return tf.constant(found)


@pytest.mark.parametrize("names", [DEFAULT, pytest.param(tuple(ALL), marks=pytest.mark.release)], ids=["some", "all"])
def test_rows_and_slots_change_as_those_of_plain_variables_and_have_their_servers(strategy, sharded_scope, names):
    with sharded_scope(PARTITIONER):
        trainings = {name: Training(ALL[name]) for name in names}

    @tf.function
    def step(gradient, dense):
        for training in trainings.values():
            training.steps(gradient, dense)

    for gradient, dense in zip(GRADIENTS, DENSE, strict=True):
        strategy.schedule(step, args=(gradient, dense)).result(TIMEOUT)
    for name, training in trainings.items():
        here = Training(ALL[name])
        for gradient, dense in zip(GRADIENTS, DENSE, strict=True):
            # These are given sparse gradients as they are, with repeated indices.
            here.step(*((gradient, tf.constant(IDS)) if name in CHANGE_WHOLE_VARIABLES else (summed(gradient),)))
            here.step(tf.constant(dense))
        for value, expected in zip(training.values(), here.values(), strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-6, err_msg=name)
        table = training.variables[0].value
        assert [part.shape[0] for part in table.variables] == [3, 3, 3]
        slots = [each.value for each in training.optimizer.variables if each.shape == (FEW_ROWS, WIDTH)]
        assert slots or name not in ("AdamW", "Ftrl", "use_ema", "Lamb")
        for slot in slots:
            assert [part.device for part in slot.variables] == [part.device for part in table.variables], name


def test_a_gradient_of_rows_reads_and_changes_these_rows_alone(strategy, sharded_scope):
    with sharded_scope(PARTITIONER):
        training = Training(BY_ROWS["AdamW"])
    before = [np.asarray(each) for each in training.state()]
    step = tf.function(training.step)
    strategy.schedule(step, args=(GRADIENTS[0], IDS)).result(TIMEOUT)
    for variable, value in zip(training.state(), before, strict=True):
        if variable.shape[:1] == (FEW_ROWS,):
            np.testing.assert_array_equal(np.asarray(variable)[OTHERS], value[OTHERS])
            assert not np.any(np.isclose(np.asarray(variable)[TOUCHED], value[TOUCHED]))

    graph = step.get_concrete_function(tf.constant(GRADIENTS[0]), tf.constant(IDS)).graph
    tables = [each.value for each in training.state() if each.shape[:1] == (FEW_ROWS,)]
    parts = {part.handle.ref() for table in tables for part in table.parts}
    inside = {inner.ref() for outer, inner in graph.captures if outer.ref() in parts}
    used = [each for each in graph.get_operations() if each.inputs and each.inputs[0].ref() in inside]
    assert "ReadVariableOp" not in {each.type for each in used}
    assert len({each.device for each in used if each.type == "ResourceScatterNdAdd"}) == 2
