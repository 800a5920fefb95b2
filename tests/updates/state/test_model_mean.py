"""Tests of what counts in the mean of models, what moves it, and that a worker gets the one of a moment."""

import numpy as np
import pytest
import tensorflow as tf

from coordinator.ps_strategy.tensorflow_internals.shared_variable import ServerMutex
from coordinator.updates.rules.model_average import PATIENCE, AveragingControl, ModelMean
from tests.updates.parts_of_rules import forget_generation, variables_of_control

GENERATION = 1


class Control:
    """What decides which changes count; its first generation is `GENERATION`."""

    def __init__(self):
        control = AveragingControl(tf.Variable(0), "tests/averaging")
        self._count, self.remove = tf.function(control.count, autograph=False), control.remove
        self._first = [(variable, variable.numpy()) for variable in variables_of_control(control)]

    def begin_again(self):
        for variable, value in self._first:
            variable.assign(value)

    def count(self, ids, *, is_stored=True):
        """Returns what is counted now, whether the change was counted by this call, and whether it is counted."""
        counted, is_new, is_counted = self._count(ids, [tf.constant(is_stored)])
        return counted, bool(is_new), bool(is_counted)


class Server:
    """A server with some variables, and the mean of models of them."""

    def __init__(self, variables, name):
        self.mean = ModelMean(range(len(variables)), variables, ServerMutex(f"tests/mean/{name}", variables[0].device))
        self._store = tf.function(self.mean.store, autograph=False)
        self._advance = tf.function(self.mean.advance, autograph=False)

    def begin_again(self, variable):
        variable.assign([10.0])
        forget_generation(self.mean)

    def store(self, change, ids):
        """Returns whether it has stored a change."""
        return bool(self._store([tf.constant(part) for part in change], ids))

    def advance(self, counted):
        """Returns the mean, and whether it is of the moment of `counted`."""
        parts, is_of_moment = self._advance(counted)
        return [part.numpy().tolist() for part in parts], bool(is_of_moment)


def ids_of(worker, number, connection=1, generation=GENERATION):
    """Returns what a worker says of itself and its change."""
    return tf.constant([worker, connection, generation, number], tf.int64)


@pytest.fixture
def divisor(control):
    """`divisor(worker, number, connection=1)` counts a change, and returns what it is divided by."""

    def call(worker, number, connection=1):
        counted, is_new, _ = control.count(ids_of(worker, number, connection))
        assert is_new
        (_, *numbers), (_, *divisors) = counted.numpy().tolist()
        assert numbers[worker] == number
        return divisors[worker]

    return call


def test_a_change_is_counted_once_with_the_workers_at_that_time(control, divisor):
    assert divisor(3, 1) == 1
    assert divisor(0, 1) == 2
    counted, is_new, is_counted = control.count(ids_of(3, 1))
    assert (is_new, is_counted) == (False, True)
    known = counted.numpy()
    assert known[0, 0] == GENERATION
    assert known[:, 1:][:, [0, 3]].tolist() == [[1, 1], [2, 1]]
    assert np.count_nonzero(known[0, 1:]) == 2


def test_what_comes_late_from_a_lost_worker_or_generation_does_not_count(control, divisor):
    divisor(0, 1, connection=3)
    divisor(1, 1)
    control.remove(0, True)
    assert control.count(ids_of(0, 2, connection=3))[1:] == (False, False)
    assert divisor(1, 2) == 1
    assert divisor(0, 2, connection=4) == 2
    assert control.count(ids_of(0, 3, connection=3))[1:] == (False, False)
    # Of an older generation.
    assert control.count(ids_of(0, 3, connection=4, generation=GENERATION + 1))[1:] == (False, False)


def test_an_idle_worker_counts_until_the_others_have_averaged_often_without_it(control, divisor):
    divisor(0, 1)
    divisor(1, 1)
    control.remove(0, False)
    divisors = [divisor(1, 2 + number) for number in range(2 * PATIENCE + 2)]
    assert divisors == [2] * (2 * PATIENCE + 1) + [1]
    # It trains again.
    assert divisor(0, 2) == 2
    # For a moment.
    for number in range(3 * PATIENCE):
        control.remove(0, False)
        assert divisor(0, 3 + number) == 2
        assert divisor(1, 100 + number) == 2


@pytest.fixture(scope="module")
def traced():
    """A control, a variable and its server, whose functions are traced once for all tests."""
    variable = tf.Variable([10.0])
    return Control(), variable, Server([variable], "shared")


@pytest.fixture
def control(traced):
    traced[0].begin_again()
    return traced[0]


@pytest.fixture
def variable(traced):
    return traced[1]


@pytest.fixture
def server(traced, variable):
    traced[2].begin_again(variable)
    return traced[2]


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


def test_models_are_averaged_in_the_widest_dtype_without_rounding_small_changes(request, control):
    wide, single, narrow = (tf.Variable(tf.ones([1], dtype)) for dtype in (tf.float64, tf.float32, tf.bfloat16))
    server = Server([wide, single, narrow], request.node.name)
    for number in range(32):
        ids = ids_of(0, number + 1)
        assert server.store([[2.0**-50], [2.0**-50], [2.0**-9]], ids)
        server.advance(control.count(ids)[0])
    assert wide.numpy().tolist() == [1 + 32 * 2.0**-50]
    assert single.numpy().tolist() == [1.0]
    assert narrow.numpy().tolist() == [1 + 32 * 2.0**-9]
    with pytest.raises(ValueError, match="known shape"):
        Server([tf.Variable(tf.zeros([1]), shape=[None])], "refused")
