"""The variables of a strategy are recreated in the same Python objects, on servers that keep running.

Each test has a separate store, so that it renews only the variables that it created.
"""

import gc
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

from coordinator.ps_strategy.recovery.variable_store import VariableStore

TIMEOUT = 60.0


@pytest.fixture
def store(strategy, monkeypatch, recorded_functions) -> VariableStore:
    store = VariableStore(recorded_functions)
    monkeypatch.setattr(strategy.extended, "_variables", store)
    return store


def make_again(store: VariableStore) -> None:
    store.renew()
    store.initialize_rest()


def test_variables_on_parameter_servers_are_known_until_they_are_deleted(strategy, store):
    with strategy.scope():
        first, second = tf.Variable(1), tf.Variable(2)
        with strategy.extended.colocate_vars_with(second):
            beside = tf.Variable(3)
        tf.Variable(4, per_worker_variable=True)
        layer = keras.layers.Dense(3)
        layer.build((None, 2))
    client = tf.Variable(6)
    store.add(client, 6)
    assert len(store.variables()) == 5
    references = [weakref.ref(beside), weakref.ref(layer.kernel.value)]
    del beside, layer
    gc.collect()
    assert [reference() for reference in references] == [None, None]
    assert [id(variable) for variable in store.variables()] == [id(first), id(second)]


def test_a_recreated_variable_is_uninitialized_until_it_is_assigned(strategy, store):
    with strategy.scope():
        variables = [tf.Variable(value) for value in (1, 2, 3)]
    devices = [variable.device for variable in variables]
    store.renew()
    assert [bool(variable.is_initialized()) for variable in variables] == [False] * 3
    variables[1].assign(7)
    store.initialize_rest()
    assert [int(variable.numpy()) for variable in variables] == [1, 7, 3]
    assert [variable.device for variable in variables] == devices


def test_the_initial_value_is_restored(strategy, store, caplog):
    given = np.array([1.0, 2.0])
    values = [1.5, [1, 2], True, ["a", "b"], np.int8([[1, 2]]), np.array(2 + 3j), lambda: tf.range(4), given]
    with strategy.scope():
        variables = [tf.Variable(value) for value in values]
        large = tf.Variable(tf.ones([600, 600]), name="large")
    initial = [variable.numpy() for variable in variables]
    given[:] = 9
    for variable in variables:
        variable.assign(tf.zeros_like(variable))
    make_again(store)
    for variable, value in zip(variables, initial, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)
        assert variable.numpy().dtype == value.dtype
    # A large one is not copied.
    assert not large.numpy().any()
    assert "'large:0' is not in the checkpoint" in caplog.text


def test_a_variable_of_unknown_shape_keeps_its_unknown_shape(strategy, store):
    with strategy.scope():
        small = tf.Variable(tf.ones([3, 2]), shape=tf.TensorShape(None))
        large = tf.Variable(tf.ones([400_000, 2]), shape=[None, 2])
    make_again(store)
    assert (small.shape.rank, large.shape.as_list()) == (None, [None, 2])
    assert small.numpy().sum() == 6
    assert not large.numpy().any()
    large.assign(tf.ones([4, 2]))
    assert large.numpy().sum() == 8


def test_an_initial_value_that_fails_again_names_its_variable(strategy, store):
    attempts = iter([tf.ones([2])])
    with strategy.scope():
        variable = tf.Variable(lambda: next(attempts), name="once")
    store.renew()
    with pytest.raises(StopIteration) as caught:
        store.initialize_rest()
    assert variable.name in caught.value.__notes__[0]


def test_functions_are_not_retraced(strategy, store):
    with strategy.scope():
        counts = [tf.Variable(0), tf.Variable(0)]
    traces = []

    @tf.function
    def inner(amount):
        traces.append("inner")
        return counts[0].assign_add(amount)

    @tf.function
    def step(amount):
        traces.append("step")
        if amount > 0:
            counts[1].assign_add(amount)
        return inner(amount) + counts[1]

    def results():
        amount = tf.constant(1)
        return [int(strategy.schedule(step, args=(amount,)).result(TIMEOUT)), int(step(amount)), int(inner(amount))]

    before = results()
    made = list(traces)
    for _ in range(2):
        make_again(store)
        assert results() == before
    assert traces == made

    @tf.function
    def later():
        return step(tf.constant(1))

    make_again(store)
    assert int(strategy.schedule(later).result(TIMEOUT)) == before[0]
    assert int(later()) == before[1]


def test_loops_branches_and_gradients_of_recreated_variables_work(strategy, store):
    with strategy.scope():
        weight = tf.Variable(3.0)

    @tf.function
    def gradient_of_power(exponent):
        with tf.GradientTape() as tape:
            power = tf.constant(1.0)
            for _ in tf.range(exponent):
                power *= weight if exponent > 1 else 1.0
        return tape.gradient(power, weight)

    @tf.function
    def square():
        return weight**2

    def gradients():
        with tf.GradientTape() as tape:
            value = square()
        scheduled = strategy.schedule(gradient_of_power, args=(tf.constant(2),)).result(TIMEOUT)
        return [float(scheduled), float(tape.gradient(value, weight))]

    assert gradients() == [6.0, 6.0]
    make_again(store)
    assert gradients() == [6.0, 6.0]
    weight.assign(5.0)
    assert gradients() == [10.0, 10.0]


def test_a_loaded_function_still_works(strategy, store, tmp_path):
    module = tf.Module()
    module.scale = tf.Variable(2.0)
    module.apply = tf.function(lambda x: x * module.scale, input_signature=[tf.TensorSpec([])])
    tf.saved_model.save(module, str(tmp_path))
    with strategy.scope():
        loaded = tf.saved_model.load(str(tmp_path))
    assert float(loaded.apply(tf.constant(3.0))) == 6.0
    store.renew()
    loaded.scale.assign(5.0)
    assert float(loaded.apply(tf.constant(3.0))) == 15.0
    assert float(strategy.schedule(loaded.apply, args=(tf.constant(3.0),)).result(TIMEOUT)) == 15.0


def test_a_variable_argument_is_passed_with_its_current_handle(strategy, store):
    with strategy.scope():
        variable = tf.Variable(1)

    @tf.function
    def read(given):
        return given + 0

    assert strategy.schedule(read, args=(variable,)).result(TIMEOUT) == 1
    store.renew()
    variable.assign(5)
    assert strategy.schedule(read, args=(variable,)).result(TIMEOUT) == 5
