"""Tests of the mean of models on a server: what moves it, when, and that a worker gets the one of a moment."""

import numpy as np
import pytest
import tensorflow as tf

from tests.updates.state.averaging_parts import GENERATION, Control, Server, ids_of


@pytest.fixture
def control(request):
    return Control(request.node.name)


@pytest.fixture
def variable():
    return tf.Variable([10.0])


@pytest.fixture
def server(request, variable):
    return Server([variable], request.node.name)


@pytest.fixture
def average(control, server):
    """`average(worker, number, change)` has a change stored, counted and added; returns the mean."""

    def call(worker, number, change):
        ids = ids_of(worker, number)
        assert server.store([[change]], ids)
        [[found]], is_of_moment = server.advance(control.count(ids)[0])
        assert is_of_moment
        return found

    return call


def test_the_mean_moves_by_each_change_divided_by_the_number_of_workers(average, variable):
    assert average(5, 1, 8.0) == 18
    # There are two workers from now on.
    assert average(0, 1, 2.0) == 19
    assert average(5, 2, -4.0) == 17
    assert average(5, 3, 1.0) == 17.5
    assert variable.numpy() == 17.5


def test_a_change_that_is_not_counted_is_not_added_and_a_counted_one_once(control, server, average, variable):
    assert server.store([[100.0]], ids_of(1, 1))
    for _ in range(2):
        assert average(0, 1, 8.0) == 18
    assert average(0, 2, 1.0) == 19
    assert not server.store([[100.0]], ids_of(0, 1))
    assert variable.numpy() == 19


def test_all_servers_return_the_mean_of_the_moment_at_which_a_worker_asked(control, request):
    servers = [Server([tf.Variable([10.0 * each])], f"{request.node.name}/{each}") for each in (1, 2)]

    def counted(worker, number):
        ids = ids_of(worker, number)
        assert [server.store([[4.0]], ids) for server in servers] == [True, True]
        return control.count(ids)[0]

    first = counted(0, 1)
    second = counted(1, 1)
    # The second server learns of the second change first.
    assert servers[0].advance(first) == ([[14.0]], True)
    assert servers[1].advance(second) == ([[26.0]], True)
    assert servers[1].advance(first) == ([[24.0]], True)
    assert servers[0].advance(second) == ([[16.0]], True)
    # Nothing of a moment is known any more once a worker has changed the mean twice since.
    third = counted(1, 2)
    fourth = counted(1, 3)
    assert servers[0].advance(third)[1]
    assert servers[0].advance(fourth)[1]
    assert servers[0].advance(third) == ([[18.0]], True)
    assert not servers[0].advance(second)[1]


def test_a_newer_generation_begins_with_the_shared_variables(control, server, average, variable):
    average(0, 1, 8.0)
    stale, *_ = control.count(ids_of(0, 1))
    variable.assign([100.0])
    later = GENERATION + 1
    assert server.store([[1.0]], ids_of(1, 1, generation=later))
    assert server.advance(stale) == ([[100.0]], False)
    assert not server.store([[1.0]], ids_of(0, 2))
    assert variable.numpy() == 100


def test_the_mean_follows_what_else_changes_the_shared_variables(server, average, variable):
    average(0, 1, 8.0)

    @tf.function(autograph=False)
    def push():
        with server.mean.lock.hold(), server.mean.following():
            variable.assign_add([5.0], read_value=False)

    push()
    assert average(0, 2, 1.0) == 24


def test_the_mean_does_not_drift_however_many_changes_are_added(average):
    changes = np.random.default_rng(1).normal(size=200).astype(np.float32) * 1e3
    for number, change in enumerate(changes):
        found = average(0, number + 1, change)
    np.testing.assert_allclose(found, 10 + changes.astype(np.float64).sum(), rtol=2e-7)


def test_models_of_several_dtypes_are_averaged_in_the_widest(request, control):
    variables = [tf.Variable(tf.zeros([1, 2], dtype)) for dtype in (tf.float64, tf.float32)]
    server = Server([*variables, tf.Variable(tf.ones([1], tf.bfloat16))], request.node.name)
    for worker, change in enumerate((1.0, 2.0**-50)):
        ids = ids_of(worker, 1)
        assert server.store([*[np.full([1, 2], change)] * 2, [0.0]], ids)
        counted, *_ = control.count(ids)
    server.advance(counted)
    assert variables[0].numpy().tolist() == [[1 + 2.0**-51] * 2]
    assert variables[1].numpy().tolist() == [[1] * 2]


def test_a_small_change_of_a_narrow_variable_is_not_rounded_away(request, control):
    variable = tf.Variable(tf.ones([1], tf.bfloat16))
    server = Server([variable], request.node.name)
    for number in range(64):
        ids = ids_of(0, number + 1)
        assert server.store([[2.0**-10]], ids)
        server.advance(control.count(ids)[0])
    assert variable.numpy().tolist() == [1 + 64 * 2.0**-10]
    with pytest.raises(ValueError, match="known shape"):
        Server([tf.Variable(tf.zeros([1]), shape=[None])], "refused")
