"""Tests that optimizers of Keras 3 change a sharded variable and its slots as they change a plain one."""

import numpy as np
import pytest
import tensorflow as tf

from tests.ps_strategy.keras.internals.test_row_updates import BY_ROWS, GRADIENTS, IDS, OTHERS, ROWS, TOUCHED, WIDTH
from tests.ps_strategy.keras.internals.test_row_updates import Training as _Training
from tests.ps_strategy.keras.test_optimizers import CHANGE_WHOLE_VARIABLES, OPTIMIZERS

TIMEOUT = 240.0
PARTITIONER = tf.distribute.experimental.partitioners.FixedShardsPartitioner(3)
ALL = {**BY_ROWS, **{name: OPTIMIZERS[name] for name in sorted(CHANGE_WHOLE_VARIABLES)}}
# One for each way to change a variable.
DEFAULT = ("SGD, Nesterov's", "AdamW", "Adam, global_clipnorm", "Nadam in a LossScaleOptimizer", "Lamb")
DENSE = np.random.default_rng(2).normal(size=(len(GRADIENTS), ROWS, WIDTH)).astype(np.float32)


class Training(_Training):
    """A table and a vector, both in parts under the strategy, and an optimizer for both."""

    def steps(self, gradient, dense):
        """Applies a gradient of some rows, and one of all."""
        self.step(gradient, tf.constant(IDS))
        self.step(dense)


@pytest.fixture(scope="module", params=[DEFAULT, pytest.param(tuple(ALL), marks=pytest.mark.long)], ids=["some", "all"])
def trainings(strategy, sharded_scope, request):
    """Trainings on the cluster after some steps, by the names of their optimizers."""
    with sharded_scope(PARTITIONER):
        trainings = {name: Training(ALL[name]) for name in request.param}

    @tf.function
    def step(gradient, dense):
        for training in trainings.values():
            training.steps(gradient, dense)

    for gradient, dense in zip(GRADIENTS, DENSE, strict=True):
        strategy.schedule(step, args=(gradient, dense)).result(TIMEOUT)
    return trainings


def summed(gradient):
    """Returns the gradient as a dense one, with rows of the same index summed."""
    found = np.zeros([ROWS, WIDTH], np.float32)
    np.add.at(found, IDS, gradient)
    return tf.constant(found)


def test_rows_and_slots_change_as_those_of_plain_variables_and_have_their_servers(trainings):
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
        slots = [each.value for each in training.optimizer.variables if each.shape == (ROWS, WIDTH)]
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
        if variable.shape[:1] == (ROWS,):
            np.testing.assert_array_equal(np.asarray(variable)[OTHERS], value[OTHERS])
            assert not np.any(np.isclose(np.asarray(variable)[TOUCHED], value[TOUCHED]))

    graph = step.get_concrete_function(tf.constant(GRADIENTS[0]), tf.constant(IDS)).graph
    tables = [each.value for each in training.state() if each.shape[:1] == (ROWS,)]
    parts = {part.handle.ref() for table in tables for part in table.parts}
    inside = {inner.ref() for outer, inner in graph.captures if outer.ref() in parts}
    used = [each for each in graph.get_operations() if each.inputs and each.inputs[0].ref() in inside]
    assert "ReadVariableOp" not in {each.type for each in used}
    assert len({each.device for each in used if each.type == "ResourceScatterNdAdd"}) == 2
