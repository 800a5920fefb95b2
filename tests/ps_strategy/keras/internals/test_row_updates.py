"""Tests that a sparse gradient changes the rows that it has as Keras changes them for a dense one, and no others."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from coordinator.embeddings import RowwiseAdagrad
from coordinator.ps_strategy.keras.internals.patches import numpy_operations, row_lookups, structured_inputs
from coordinator.ps_strategy.keras.internals.row_updates import row_updates, table_updates
from coordinator.ps_strategy.tensorflow_internals.unstored_variable import TableVariable
from tests.ps_strategy.keras.test_optimizers import CHANGE_WHOLE_VARIABLES, DENSE_ONLY, OPTIMIZERS
from tests.ps_strategy.tensorflow_internals.private_names import row_update_hooks, table_update_hooks

TIMEOUT = 240.0
ROWS, WIDTH, STEPS = 9, 3, 3
# Of each step: with repeats, and never the other rows.
IDS = np.array([1, 5, 1, 7, 5, 1])
TOUCHED, OTHERS = [1, 5, 7], [0, 2, 3, 4, 6, 8]
TABLE = np.random.default_rng(0).normal(size=(ROWS, WIDTH)).astype(np.float32)
GRADIENTS = np.random.default_rng(1).normal(size=(STEPS, len(IDS), WIDTH)).astype(np.float32)

optimizers = keras.optimizers
BY_ROWS = {
    **{name: make for name, make in OPTIMIZERS.items() if name not in {*CHANGE_WHOLE_VARIABLES, *DENSE_ONLY}},
    "weight_decay of Adagrad": lambda: optimizers.Adagrad(0.1, weight_decay=0.1),
    "weight_decay of Ftrl": lambda: optimizers.Ftrl(0.1, weight_decay=0.1, l2_shrinkage_regularization_strength=0.01),
    "Adam, clipnorm": lambda: optimizers.Adam(0.02, clipnorm=0.3),
    "Adam, clipvalue": lambda: optimizers.Adam(0.02, clipvalue=0.2),
    "Adam, global_clipnorm": lambda: optimizers.Adam(0.02, global_clipnorm=0.3),
    "Nadam in a LossScaleOptimizer": lambda: optimizers.LossScaleOptimizer(optimizers.Nadam(0.02), 8.0, 2),
    "RowwiseAdagrad": lambda: RowwiseAdagrad(0.1, weight_decay=0.01),
}
# One for each way to change a variable, and each option that is not per element.
DEFAULT = (
    *("SGD, Nesterov's", "AdamW", "Ftrl", "use_ema", "Adam, global_clipnorm"),
    *("Nadam in a LossScaleOptimizer", "RowwiseAdagrad"),
)


class Training:
    """A table, a vector, and an optimizer for both."""

    def __init__(self, make):
        self.variables = [keras.Variable(TABLE), keras.Variable(np.ones(2, np.float32))]
        self.optimizer = make()
        self.optimizer.build(self.variables)

    def step(self, gradient, ids=None):
        """Applies a gradient of the table, dense or of some rows, and one of the vector."""
        sparse = gradient if ids is None else tf.IndexedSlices(gradient, ids, tf.constant([ROWS, WIDTH]))
        total = tf.reduce_sum(gradient) * tf.ones(2)
        self.optimizer.apply([sparse, total], self.variables)

    def values(self):
        """Returns the values of the variables and of the optimizer's, those of the table without the other rows."""
        return [np.asarray(each)[TOUCHED] if each.shape[:1] == (ROWS,) else np.asarray(each) for each in self.state()]

    def state(self):
        return [*self.variables, *self.optimizer.variables]


@pytest.fixture(scope="module", params=[DEFAULT, pytest.param(BY_ROWS, marks=pytest.mark.long)], ids=["some", "all"])
def trainings(strategy, request):
    """Trainings on the cluster after some steps of the same rows, by the names of their optimizers."""
    with strategy.scope():
        trainings = {name: Training(BY_ROWS[name]) for name in request.param}

    @tf.function
    def step(gradient, ids):
        for training in trainings.values():
            training.step(gradient, ids)

    for gradient in GRADIENTS:
        strategy.schedule(step, args=(gradient, IDS)).result(TIMEOUT)
    return trainings


def dense(gradient):
    found = np.zeros_like(TABLE)
    np.add.at(found, IDS, gradient)
    return tf.constant(found)


def test_rows_change_as_with_a_dense_gradient_and_so_do_their_slots(trainings):
    for name, training in trainings.items():
        here = Training(BY_ROWS[name])
        for gradient in GRADIENTS:
            here.step(dense(gradient))
        for value, expected in zip(training.values(), here.values(), strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-6, err_msg=name)
        assert not np.allclose(training.values()[0], TABLE[TOUCHED]), name
        # The other rows stay.
        for variable, before in zip(training.state(), Training(BY_ROWS[name]).state(), strict=True):
            if variable.shape[:1] == (ROWS,) and not variable.path.endswith("average"):
                np.testing.assert_array_equal(np.asarray(variable)[OTHERS], np.asarray(before)[OTHERS], err_msg=name)


def test_fit_changes_only_the_rows_that_it_looked_up(strategy):
    with strategy.scope():
        model = keras.Sequential([keras.layers.Embedding(ROWS, WIDTH, weights=TABLE), keras.layers.Dense(1)])
        model.compile(optimizers.Adam(0.1), "mse")
    model.fit(np.array([[1], [5], [7], [1]] * 4), np.ones([16, 1, 1]), batch_size=4, epochs=2, verbose=0)
    table = np.asarray(model.layers[0].embeddings)
    np.testing.assert_array_equal(table[OTHERS], TABLE[OTHERS])
    assert not np.any(np.isclose(table[TOUCHED], TABLE[TOUCHED]))
    assert int(model.optimizer.iterations) == 8


def test_what_needs_whole_variables_is_left_to_keras_and_the_log_says_so_once(strategy, caplog):
    # Classes of which the log has said nothing yet.
    bases = {"Layerwise": optimizers.Lamb, "Summing": optimizers.SGD, "Averaging": optimizers.SGD}
    layerwise, accumulating, averaging = (type(name, (base,), {}) for name, base in bases.items())
    makes = [
        lambda: layerwise(0.1),
        lambda: accumulating(0.1, gradient_accumulation_steps=2),
        lambda: averaging(0.1, use_ema=True),
    ]
    with strategy.scope():
        trainings = [Training(make) for make in [*makes, *makes]]

    @tf.function
    def step(gradient, ids):
        for training in trainings:
            training.step(gradient, ids)

    strategy.schedule(step, args=(GRADIENTS[0], IDS)).result(TIMEOUT)
    said = [record.getMessage() for record in caplog.records if "computes with whole variables" in record.getMessage()]
    assert [each.partition(" computes")[0] for each in said] == [
        *("Layerwise", "Summing with gradient_accumulation_steps", "Averaging, for the averages of use_ema,"),
    ]


def test_only_optimizers_that_are_known_to_change_each_row_by_itself_do(strategy):
    class Normalized(optimizers.SGD):
        def update_step(self, gradient, variable, learning_rate):
            super().update_step(keras.ops.divide(gradient, keras.ops.norm(gradient)), variable, learning_rate)

    class Own(optimizers.Optimizer):
        updates_rows = True

        def build(self, variables):
            super().build(variables)
            self.slots = self.add_optimizer_variables(variables, "slot")
            self.counts = [self.add_variable((), name="count") for _ in variables]

        def update_step(self, gradient, variable, learning_rate):
            number = self._get_variable_index(variable)
            slot, count = self.slots[number], self.counts[number]
            count.assign_add(1.0)
            slot.assign(0.5 * slot + gradient)
            variable.assign_sub((1.0 - (-slot)) / (2.0 + slot**2) + count / (1.0 / (3.0 + slot**2)))

    with strategy.scope():
        trainings = [Training(lambda: Normalized(1.0)), Training(lambda: Own(0.1))]
    here = [Training(lambda: Normalized(1.0)), Training(lambda: Own(0.1))]

    @tf.function
    def step(gradient, ids):
        for training in trainings:
            training.step(gradient, ids)

    for gradient in GRADIENTS[:2]:
        strategy.schedule(step, args=(gradient, IDS)).result(TIMEOUT)
        for training in here:
            training.step(dense(gradient))
    for found, training in zip(trainings, here, strict=True):
        for value, expected in zip(found.values(), training.values(), strict=True):
            np.testing.assert_allclose(value, expected, rtol=1e-6, atol=1e-6)


TABLE_SHAPE = (1000, 2)


def test_the_patches_are_undone_and_unknown_keras_versions_are_not_patched(monkeypatch, caplog):
    for patch, hooks in (
        (table_updates, table_update_hooks),
        (row_updates, row_update_hooks),
        (row_lookups, lambda: [numpy_operations.take]),
    ):
        known = hooks()
        with patch():
            assert not {*known} & {*hooks()}
        assert hooks() == known

    def other(self, grads):
        return grads

    monkeypatch.setattr(optimizers.Optimizer, row_update_hooks()[0].__name__, other)
    monkeypatch.setattr(numpy_operations, "take", other)
    with row_updates(), row_lookups():
        assert (row_update_hooks()[0], numpy_operations.take) == (other, other)
    assert caplog.text.count("is not known") == 2


def test_optimizers_clip_a_tables_gradient_with_the_others_and_leave_it_to_the_table():
    given = []
    table = TableVariable("table", list(TABLE_SHAPE), tf.float32, given.append, lambda: None)
    weight = keras.Variable(np.zeros(2, np.float32))
    keys = tf.constant([10**15, 7, 10**15], tf.int64)
    rows = tf.IndexedSlices(tf.constant([[1.0, 0.0], [0.0, 4.0], [2.0, 0.0]]), keys, tf.constant(TABLE_SHAPE))
    with table_updates():
        for optimizer in (
            keras.optimizers.SGD(1.0, global_clipnorm=6.5, momentum=0.9),
            keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD(1.0, global_clipnorm=6.5 / 8.0), 8.0),
        ):
            weight.assign([0.0, 0.0])
            optimizer.apply([rows, tf.constant([12.0, 0.0])], [table, weight])
            # The norm of all is 13, with the two rows of one key summed first.
            scale = 8.0 if hasattr(optimizer, "inner_optimizer") else 1.0
            np.testing.assert_allclose(weight, [-6.0 / scale, 0.0], rtol=1e-6)
            np.testing.assert_array_equal(given[-1].indices, [10**15, 7])
            np.testing.assert_allclose(given[-1].values, np.array([[1.5, 0.0], [0.0, 2.0]]) / scale, rtol=1e-6)
            assert all(each.shape != TABLE_SHAPE for each in optimizer.variables)
    assert len(given) == 2


def test_the_inputs_of_a_model_are_nested_as_it_is_called():
    inputs = {"a": keras.Input((1,), name="a"), "b": keras.Input((1,), name="b")}
    functional = keras.Model(inputs, keras.layers.Add()(list(inputs.values())))
    assert {key: each.name for key, each in structured_inputs(functional).items()} == {"a": "a", "b": "b"}
    sequential = keras.Sequential([keras.Input((3,), name="z"), keras.layers.Dense(1)])
    assert [each.name for each in tf.nest.flatten(structured_inputs(sequential))] == ["z"]
    assert structured_inputs(keras.Model()) is None
