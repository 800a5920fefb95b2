"""Tests of TensorFlow's names: scheduling, results, errors and datasets, with the meaning of TensorFlow's tests."""

import numpy as np
import pytest
import tensorflow as tf

from coordinator.compat import ClosureInputError, ClusterCoordinator, PerWorkerValues, RemoteValue
from coordinator.errors import ClosureCancelledError, ParameterServerLost
from coordinator.future import Future
from tests.ps_strategy.gate import Gate


@pytest.fixture
def counter(strategy):
    with strategy.scope():
        return tf.Variable(0)


def test_a_strategy_has_one_coordinator(strategy, cluster_coordinator):
    assert ClusterCoordinator(strategy) is cluster_coordinator
    assert ClusterCoordinator(strategy=strategy) is cluster_coordinator
    assert cluster_coordinator.strategy is strategy
    assert cluster_coordinator.cluster is strategy.cluster


def test_another_strategy_is_refused_in_words():
    with pytest.raises(ValueError, match="Import both names from"):
        ClusterCoordinator(tf.distribute.get_strategy())


def test_results_come_back_in_the_functions_structure(cluster_coordinator, counter):
    @tf.function
    def nested():
        by = counter.assign_add(1, read_value=False) and None
        return ONE + 1, (ONE + 2, ONE + 3), [ONE + 4], {"v": ONE}, by

    # Joining with nothing scheduled returns at once, and so does joining again.
    cluster_coordinator.join()
    wanted = 2, (3, 4), [5], {"v": 1}, None
    for total in (5, 10):
        value, *others = [cluster_coordinator.schedule(nested) for _ in range(5)]
        for _ in range(3):
            cluster_coordinator.join()
        assert cluster_coordinator.done()
        assert counter.numpy() == total
    assert isinstance(value, RemoteValue)
    assert value.fetch() == wanted
    assert cluster_coordinator.fetch(value) == wanted
    assert tf.nest.map_structure(tf.is_tensor, value.get()) == (True, (True, True), [True], {"v": True}, False)
    values = {"a": [value, others[0]], "plain": 7, "text": "x"}
    assert cluster_coordinator.fetch(values) == {"a": [wanted, wanted], "plain": 7, "text": "x"}


def test_anything_but_a_tensorflow_function_is_refused(cluster_coordinator):
    words = r"`tf.distribute.experimental.coordinator.ClusterCoordinator.schedule` only accepts a `tf.function` or a"
    for fn in (lambda: 1, None):
        with pytest.raises(TypeError, match=words):
            cluster_coordinator.schedule(fn)


def test_a_remote_value_is_no_argument_also_within_a_structure(cluster_coordinator):
    double = tf.function(lambda x: 2 * x)
    value = cluster_coordinator.schedule(double, args=(tf.constant(1),))
    for args, kwargs in [((value,), None), (([value],), None), ((), {"x": {"y": value}})]:
        with pytest.raises(ValueError, match="used as an input to scheduled function is not supported"):
            cluster_coordinator.schedule(double, args, kwargs)
    assert cluster_coordinator.schedule(double, args=(value.fetch(),)).fetch() == 4


def test_run_reduce_and_gather_work_whether_scheduled_in_the_scope_or_not(strategy, cluster_coordinator):
    with strategy.scope():
        assert tf.distribute.in_cross_replica_context()
        variable = tf.Variable(1.0)
        total = tf.Variable(0.0, aggregation=tf.VariableAggregation.ONLY_FIRST_REPLICA)

        @tf.function
        def step(x):
            def replica_fn(x):
                assert not tf.distribute.in_cross_replica_context()
                total.assign_add(x)
                return x + variable, x - variable

            results = strategy.run(replica_fn, args=(x,))
            gathered = strategy.gather(results[0][tf.newaxis], axis=0)
            return strategy.reduce("SUM", results, axis=None), gathered, strategy.experimental_local_results(results[1])

        first = cluster_coordinator.schedule(step, args=(tf.constant(3.0),)).fetch()
    assert first == cluster_coordinator.schedule(step, args=(tf.constant(3.0),)).fetch() == ((4, 2), [4], (2,))
    assert total.numpy() == 6


@pytest.fixture
def future():
    return Future("step", 0)


def test_it_is_one_of_tensorflows_remote_values(future):
    assert isinstance(RemoteValue(future), tf.distribute.coordinator.RemoteValue)
    assert isinstance(RemoteValue(future), tf.distribute.experimental.coordinator.RemoteValue)


def test_fetch_gives_numpy_values_and_get_gives_tensors_of_the_same_types(future):
    result = {"a": (np.float16(2), np.arange(3)), "b": [b"text", None, np.array([b"x"], object)]}
    future.set_result(result)
    assert RemoteValue(future).fetch() == result
    got = RemoteValue(future).get()
    tf.nest.assert_same_structure(got, result)
    assert [part.dtype for part in (*got["a"], got["b"][0], got["b"][2])] == [tf.float16, tf.int64] + 2 * [tf.string]
    assert all(tf.is_tensor(part) for part in (*got["a"], got["b"][0], got["b"][2]))
    assert got["b"][1] is None
    assert got["a"][1].numpy().tolist() == [0, 1, 2]


def test_fetch_turns_ragged_results_into_numpy_and_leaves_sparse_ones(future):
    ragged, sparse = tf.ragged.constant([[1], [2, 3]]), tf.sparse.from_dense([[0, 7]])
    future.set_result((ragged, sparse))
    assert RemoteValue(future).get() == (ragged, sparse)
    rows, same = RemoteValue(future).fetch()
    assert [list(row) for row in rows] == [[1], [2, 3]]
    assert same is sparse


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ClosureCancelledError("another one failed"), tf.errors.CancelledError),
        (ParameterServerLost("/job:ps/task:0", "The server is gone."), tf.errors.UnavailableError),
        (tf.errors.OutOfRangeError(None, None, "End of sequence"), tf.errors.OutOfRangeError),
        (ClosureInputError("no data"), ClosureInputError),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_fetch_and_get_raise_the_errors_that_tensorflow_documents(future, error, kind):
    future.set_exception(error)
    for verb in (RemoteValue(future).fetch, RemoteValue(future).get):
        with pytest.raises(kind) as caught:
            verb()
        assert caught.value is error or caught.value.__cause__ is error
        assert str(error) in str(caught.value)


@tf.function
def succeed(x):
    return 2 * x


@tf.function
def fail(x):
    tf.debugging.assert_equal(x, 0, "must be zero")
    return x


@tf.function
def take(iterator):
    return next(iterator)


ONE = tf.constant(1)


def schedule(cluster_coordinator, fn, count=1):
    return [cluster_coordinator.schedule(fn, args=(ONE,)) for _ in range(count)]


@pytest.mark.parametrize("verb", ["join", "schedule"])
def test_join_and_a_later_schedule_raise_the_error_of_a_function_and_then_are_clean(cluster_coordinator, verb):
    def wait():
        while verb == "schedule":
            schedule(cluster_coordinator, succeed)
        cluster_coordinator.join()

    for _ in range(2):
        schedule(cluster_coordinator, succeed, 3)
        [failed] = schedule(cluster_coordinator, fail)
        with pytest.raises(tf.errors.InvalidArgumentError, match="must be zero"):
            wait()
        cluster_coordinator.join()
        assert cluster_coordinator.done()
        with pytest.raises(tf.errors.InvalidArgumentError, match="must be zero"):
            failed.fetch()


def test_a_cancelled_function_raises_tensorflows_cancelled_error(strategy, cluster_coordinator):
    gate = Gate(strategy, failure="must not pass")
    gate.occupy(len(strategy.cluster.workers))
    waiting = schedule(cluster_coordinator, succeed, 2)
    gate.open()
    with pytest.raises(tf.errors.InvalidArgumentError, match="must not pass"):
        cluster_coordinator.join()
    # A free worker may have run the last of them before the error was known.
    outcomes = [error_of(value) for value in waiting]
    cancelled = [error for error in outcomes if isinstance(error, tf.errors.CancelledError)]
    assert cancelled
    assert all("Please reschedule the function" in str(error) for error in cancelled)
    assert schedule(cluster_coordinator, succeed)[0].fetch() == 2


def error_of(value):
    try:
        value.fetch()
    except tf.errors.OpError as error:
        return error
    return None


def test_an_input_that_fails_fails_the_functions_that_use_it(cluster_coordinator):
    def make_dataset():
        return tf.data.Dataset.from_tensors(tf.io.read_file("/no/such/file"))

    unreadable = iter(cluster_coordinator.create_per_worker_dataset(make_dataset))
    # If it is not used, it does no harm.
    assert schedule(cluster_coordinator, succeed)[0].fetch() == 2
    value = cluster_coordinator.schedule(take, args=(unreadable,))
    with pytest.raises(ClosureInputError, match="iterator of make_dataset could not be created"):
        cluster_coordinator.join()
    with pytest.raises(ClosureInputError, match="/no/such/file") as caught:
        value.fetch()
    assert isinstance(caught.value.original_exception, tf.errors.NotFoundError)


def test_iterators_can_be_used_after_an_error_and_their_end_is_out_of_range(cluster_coordinator):
    iterator = iter(cluster_coordinator.create_per_worker_dataset(tf.data.Dataset.range(2)))
    schedule(cluster_coordinator, fail)
    with pytest.raises(tf.errors.InvalidArgumentError, match="must be zero"):
        cluster_coordinator.join()
    assert cluster_coordinator.schedule(take, args=(iterator,)).fetch() < 2

    def schedule_forever():
        while True:
            cluster_coordinator.schedule(take, args=(iterator,))

    with pytest.raises(tf.errors.OutOfRangeError):
        schedule_forever()
    cluster_coordinator.join()


def make_batches(_=None):
    return tf.data.Dataset.range(1, 11).batch(4)


@tf.function
def traced_batches():
    return make_batches()


FORMS = {
    "tf.function": lambda strategy: traced_batches,
    "concrete function": lambda strategy: traced_batches.get_concrete_function(),
    "dataset": lambda strategy: make_batches(),
    "distributing function": lambda strategy: lambda: strategy.distribute_datasets_from_function(make_batches),
    "distributed dataset": lambda strategy: strategy.experimental_distribute_dataset(make_batches()),
}


def test_every_form_of_a_dataset_gives_the_same_elements(strategy, cluster_coordinator):
    for form, make in FORMS.items():
        dataset = cluster_coordinator.create_per_worker_dataset(make(strategy))
        value = cluster_coordinator.schedule(take, args=(iter(dataset),))
        assert value.fetch().tolist() == [1, 2, 3, 4], form
        assert dataset.element_spec == tf.TensorSpec([None], tf.int64), form


def test_an_iterator_is_one_of_tensorflows_per_worker_values(cluster_coordinator):
    iterator = iter(cluster_coordinator.create_per_worker_dataset(make_batches))
    assert isinstance(iterator, PerWorkerValues)
    assert isinstance(iterator, tf.distribute.experimental.coordinator.PerWorkerValues)
    assert cluster_coordinator.fetch([iterator, 1]) == [iterator, 1]
    with pytest.raises(RuntimeError, match="inside `step`"):
        next(iterator)


def test_an_input_signature_may_name_the_iterators_type(cluster_coordinator):
    iterator = iter(cluster_coordinator.create_per_worker_dataset(make_batches))
    for signature in (iterator._type_spec, tf.data.IteratorSpec(iterator.element_spec)):
        take_signed = tf.function(lambda it: tf.reduce_max(next(it)), input_signature=[signature])
        assert cluster_coordinator.schedule(take_signed, args=(iterator,)).fetch() in (4, 8, 10)


def test_what_is_no_dataset_is_refused_in_words(cluster_coordinator):
    with pytest.raises(ValueError, match="takes a dataset or a function that returns one, got 3"):
        cluster_coordinator.create_per_worker_dataset(3)
    with pytest.raises(TypeError, match="'make_three' must return a"):
        cluster_coordinator.create_per_worker_dataset(make_three)


def make_three():
    return 3
