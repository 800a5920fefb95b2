"""Tests that optimizers of Keras 3 change a sharded variable and its slots as they change a plain one."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from tests.ps_strategy.keras.internals.test_row_updates import BY_ROWS, GRADIENTS, IDS, OTHERS, ROWS, TOUCHED, WIDTH
from tests.ps_strategy.keras.internals.test_row_updates import Training as _Training
from tests.ps_strategy.keras.test_optimizers import CHANGE_WHOLE_VARIABLES, OPTIMIZERS

TIMEOUT = 240.0
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
    with sharded_scope(tf.distribute.experimental.partitioners.FixedShardsPartitioner(3)):
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


def test_rows_and_slots_change_as_those_of_plain_variables(trainings):
    for name, training in trainings.items():
        here = Training(ALL[name])
        for gradient, dense in zip(GRADIENTS, DENSE, strict=True):
            # These are given sparse gradients as they are, with repeated indices.
            here.step(*((gradient, tf.constant(IDS)) if name in CHANGE_WHOLE_VARIABLES else (summed(gradient),)))
            here.step(tf.constant(dense))
        for value, expected in zip(training.values(), here.values(), strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-6, err_msg=name)


def test_slots_are_in_parts_beside_those_of_their_variable(trainings):
    with_slots = set()
    for name, training in trainings.items():
        table = training.variables[0].value
        assert [part.shape[0] for part in table.variables] == [3, 3, 3]
        slots = [each.value for each in training.optimizer.variables if each.shape == (ROWS, WIDTH)]
        with_slots |= {name for _ in slots}
        for slot in slots:
            assert [part.device for part in slot.variables] == [part.device for part in table.variables], name
    expected = {"Adam, AMSGrad", "AdamW", "Ftrl", "use_ema", "Lamb", "gradient_accumulation_steps"}
    assert with_slots >= expected.intersection(trainings)


def test_a_gradient_of_rows_leaves_the_other_rows_and_their_slots(strategy, sharded_scope):
    with sharded_scope(tf.distribute.experimental.partitioners.FixedShardsPartitioner(3)):
        training = Training(BY_ROWS["AdamW"])
    before = [np.asarray(each) for each in training.state()]
    step = tf.function(lambda gradient: training.step(gradient, IDS))
    strategy.schedule(step, args=(GRADIENTS[0],)).result(TIMEOUT)
    for variable, value in zip(training.state(), before, strict=True):
        if variable.shape[:1] == (ROWS,):
            np.testing.assert_array_equal(np.asarray(variable)[OTHERS], value[OTHERS])
            assert not np.any(np.isclose(np.asarray(variable)[TOUCHED], value[TOUCHED]))


def test_an_update_by_rows_reads_no_part_as_a_whole(sharded_scope):
    with sharded_scope(tf.distribute.experimental.partitioners.FixedShardsPartitioner(3)):
        table = keras.Variable(np.ones([ROWS, WIDTH], np.float32))
        optimizer = keras.optimizers.Adam(0.1)
        optimizer.build([table])

    @tf.function
    def step(values, indices):
        optimizer.apply([tf.IndexedSlices(values, indices, tf.constant([ROWS, WIDTH]))], [table])

    graph = step.get_concrete_function(tf.constant(GRADIENTS[0]), tf.constant(IDS)).graph
    parts = {part.handle.ref() for slot in [table, *optimizer.variables] for part in getattr(slot.value, "parts", ())}
    inside = {inner.ref() for outer, inner in graph.captures if outer.ref() in parts}
    reads = [each.type for each in graph.get_operations() if each.inputs and each.inputs[0].ref() in inside]
    assert len(parts) == 9
    assert "ReadVariableOp" not in reads
    assert reads.count("ResourceGather") >= 6
    devices = {each.device for each in graph.get_operations() if each.type == "ResourceScatterNdAdd"}
    assert len(devices) == 2


def test_racing_workers_lose_no_addition_to_slots(strategy, sharded_scope):
    rows, width, in_a_step, steps = 60, 64, 4, 20
    with sharded_scope(tf.distribute.experimental.partitioners.FixedShardsPartitioner(3)):
        table = keras.Variable(initializer="zeros", shape=(rows, width))
        adagrad = keras.optimizers.Adagrad(0.1, initial_accumulator_value=0.0)
        adagrad.build([table])
    ones = tf.IndexedSlices(tf.ones([2 * rows, width]), tf.concat([tf.range(rows)] * 2, 0), tf.constant([rows, width]))

    @tf.function
    def step():
        for _ in range(in_a_step):
            adagrad.apply([ones], [table])

    for _ in range(steps):
        strategy.schedule(step)
    strategy.join(TIMEOUT)
    accumulator = next(each for each in adagrad.variables if each.path.endswith("accumulator"))
    # Each row occurs twice in a gradient: the square of the sum is added.
    np.testing.assert_array_equal(accumulator, np.full([rows, width], 4 * in_a_step * steps))
    assert int(adagrad.iterations) == in_a_step * steps
