"""Tests of the server on which a variable is placed, by where in the program it is created."""

import logging

import keras
import pytest
import tensorflow as tf

CLIENT = "/job:chief/replica:0/task:0/device:CPU:0"
SERVERS = ["/job:ps/replica:0/task:0/device:CPU:0", "/job:ps/replica:0/task:1/device:CPU:0"]


def on_client(next_creator, **kwargs):
    with tf.device(CLIENT):
        return next_creator(**kwargs)


@pytest.fixture
def next_server(strategy):
    """Yields the device of the next variable in the scope, and of each one after it."""
    with strategy.scope():
        last = SERVERS.index(tf.Variable(0).device)
    return lambda number: SERVERS[(last + 1 + number) % len(SERVERS)]


def test_in_the_scope_variables_go_round_robin_over_the_parameter_servers(strategy, next_server):  # row 129
    with strategy.scope():
        devices = [tf.Variable([1.0] * size).device for size in range(5)]
    assert devices == [next_server(number) for number in range(5)]
    assert tf.Variable(1.0).device == CLIENT


def test_keras_models_and_optimizers_have_their_variables_on_the_parameter_servers(strategy):  # row 129
    with strategy.scope():
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(3), keras.layers.BatchNormalization()])
        optimizer = keras.optimizers.Adam()
        optimizer.build(model.trainable_variables)
    variables = [variable.value for variable in [*model.variables, *optimizer.variables]]
    assert len(variables) > 10
    assert {variable.device for variable in variables} == set(SERVERS)


def test_variables_made_in_a_function_go_to_the_parameter_servers_too(strategy, next_server):
    made = []

    @tf.function
    def make():
        if not made:
            made.extend(tf.Variable(number) for number in range(3))
        return tf.constant(0)

    strategy.schedule(make).result(60)
    assert [variable.device for variable in made] == [next_server(number) for number in range(3)]


def test_the_scope_overrides_tf_device_inside_and_outside_of_it(strategy, next_server):  # row 130
    for device in ("/job:worker/replica:0/task:0", CLIENT, SERVERS[0], "/device:CPU:0"):
        with tf.device(device), strategy.scope():
            inner_scope = tf.Variable(1.0)
        with strategy.scope(), tf.device(device):
            inner_device = tf.Variable(1.0)
        assert [inner_scope.device, inner_device.device] == [next_server(0), next_server(1)], device


def test_an_outer_variable_creator_overrides_the_placement_and_an_inner_one_cannot(strategy, next_server):  # row 131
    with strategy.scope(), tf.variable_creator_scope(on_client):
        assert tf.Variable(1.0).device == next_server(0)
    with tf.variable_creator_scope(on_client), strategy.scope():
        assert tf.Variable(1.0).device == CLIENT


def test_a_colocated_variable_is_on_the_same_server(strategy, next_server):  # row 131
    outside = tf.Variable(0.0)
    with strategy.scope():
        first, second = tf.Variable(1.0), tf.Variable(2.0)
        for neighbour in (first, second, second, outside):
            with strategy.extended.colocate_vars_with(neighbour):
                assert tf.Variable(3.0).device == neighbour.device
        # Colocated variables are not counted.
        assert tf.Variable(4.0).device == next_server(2)
    refused = pytest.raises(ValueError, match=r"colocate_vars_with takes a tf\.Variable")
    with strategy.scope(), refused, strategy.extended.colocate_vars_with("ps"):
        pass


def test_an_outer_variable_creator_is_told_of_the_colocation(strategy, next_server):
    seen = []

    def beside_or_on_client(next_creator, **kwargs):
        seen.append(kwargs.get("colocate_with"))
        return next_creator(**kwargs) if seen[-1] is not None else on_client(next_creator, **kwargs)

    with strategy.scope():
        first = tf.Variable(1.0)
    with tf.variable_creator_scope(beside_or_on_client), strategy.scope():
        assert tf.Variable(2.0).device == CLIENT
        with strategy.extended.colocate_vars_with(first):
            assert tf.Variable(3.0).device == first.device
            tf.Variable(4.0, per_worker_variable=True)
    assert [each is first for each in seen] == [False, True, True]


def test_run_and_reduce_on_the_client_work_and_warn_but_not_in_a_scheduled_function(strategy, caplog):  # row 132
    @tf.function
    def step():
        return strategy.reduce("SUM", strategy.run(lambda: tf.constant(5)), axis=None)

    with strategy.scope():
        variable = tf.Variable(1.0)
    with caplog.at_level(logging.WARNING, "coordinator"):
        assert strategy.schedule(step).result(60) == 5
        assert caplog.records == []
        increased = strategy.run(variable.assign_add, args=(tf.constant(2.0),))
        assert strategy.reduce("SUM", increased, axis=None).numpy() == 3.0
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "strategy.run was called outside of a scheduled function" in caplog.text
    assert "strategy.reduce was called outside of a scheduled function" in caplog.text
