"""Tests of how datasets are distributed to the workers: what is traced, what is sent, and what is refused."""

import pytest
import tensorflow as tf

from tests.deadline import wait_until
from tests.ps_strategy.every_worker import on_every_worker
from tests.ps_strategy.per_worker.elements import first, total


@tf.function
def ten(iterator):
    return tf.stack([next(iterator) for _ in range(10)])


@pytest.fixture(params=["function", "ready"])
def distribute(strategy, request):
    """Distributes the dataset of a function: by the function, or as a dataset that is created on the client."""

    def distributed(make, options=None):
        if request.param == "ready":
            return strategy.experimental_distribute_dataset(make(), options)
        return strategy.experimental_distribute_datasets_from_function(lambda _: make(), options)

    return distributed


def test_every_worker_has_a_dataset_and_every_iterator_starts_from_the_beginning(
    strategy, distribute
):  # rows 47, 51, 55
    dataset = distribute(lambda: tf.data.Dataset.range(5))
    for _ in range(2):
        iterator = iter(dataset)
        assert on_every_worker(strategy, first, iterator) == [0, 0]
        assert on_every_worker(strategy, first, iterator) == [1, 1]
        assert on_every_worker(strategy, total, iterator) == [9, 9]


def test_a_map_function_is_traced_once_for_all_workers(strategy, distribute):  # rows 48, 57
    traces = []

    def double(x):
        traces.append(x)
        return x * 2

    # With an option that concerns each worker.
    options = tf.distribute.InputOptions(experimental_per_replica_buffer_size=2)
    dataset = distribute(lambda: tf.data.Dataset.range(3).map(double), options)
    for _ in range(2):
        assert on_every_worker(strategy, total, iter(dataset)) == [6, 6]
    assert len(traces) == 1


def test_the_input_context_has_the_workers_number_as_a_python_int(strategy):  # row 56
    """A worker is one replica here, so the context splits the data by workers, and a replica's batch is the batch."""
    contexts = []

    def shard(context):
        contexts.append((context.num_input_pipelines, context.input_pipeline_id, context.num_replicas_in_sync))
        batch = context.get_per_replica_batch_size(global_batch_size=4)
        dataset = tf.data.Dataset.range(24).shard(context.num_input_pipelines, context.input_pipeline_id)
        return dataset.batch(batch)

    for dataset_fn in (shard, tf.function(shard)):
        dataset = strategy.distribute_datasets_from_function(dataset_fn)
        shards = on_every_worker(strategy, first, iter(dataset))
        assert [shard.tolist() for shard in shards] == [[0, 2, 4, 6], [1, 3, 5, 7]]
    assert contexts == [(2, 0, 1), (2, 1, 1)] * 2
    assert all(isinstance(number, int) for context in contexts for number in context)


def test_without_a_seed_workers_and_iterators_shuffle_differently(strategy, distribute):  # row 50
    dataset = distribute(lambda: tf.data.Dataset.range(10).shuffle(10))
    orders = [order.tolist() for _ in range(2) for order in on_every_worker(strategy, ten, iter(dataset))]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4


def test_with_a_seed_all_workers_shuffle_in_the_same_order(strategy, distribute):
    dataset = distribute(lambda: tf.data.Dataset.range(10).shuffle(10, seed=7))
    iterators = [iter(dataset) for _ in range(3)]
    on_client = tf.data.Dataset.range(10).shuffle(10, seed=7)
    expected = [list(on_client.as_numpy_iterator()) for _ in range(3)]
    # Not the first one first, as on a worker that was restarted.
    for number in (2, 0, 1):
        orders = [order.tolist() for order in on_every_worker(strategy, ten, iterators[number])]
        assert orders == [expected[number]] * 2


def test_a_returning_worker_makes_an_iterator_without_each_that_was_made_before(strategy, shared_cluster, monkeypatch):
    dataset = strategy.experimental_distribute_dataset(tf.data.Dataset.range(10).shuffle(10, seed=7))
    for _ in range(40):
        iter(dataset)
    iterator = iter(dataset)
    elsewhere = strategy.schedule(ten, (iterator,), worker=0).result()
    made = []
    make = tf.data.Dataset.__iter__
    monkeypatch.setattr(tf.data.Dataset, "__iter__", lambda self: made.append(self) or make(self))
    shared_cluster.restart("worker", 1)
    found = strategy.schedule(ten, (iterator,), worker=1).result()
    # One that the function takes; one that makes those before it, once while it is traced.
    assert len(made) <= 4
    assert found.tolist() == elsewhere.tolist(), "the order of the same iterator on a worker that was not restarted"


def test_element_spec_is_that_of_the_dataset(strategy, distribute):  # row 58
    """A worker is one replica, so an element is never a value per replica."""
    given = {"ragged": tf.ragged.constant([[1], [2, 3]]), "tuple": (tf.constant(1.0),)}
    expected = {"ragged": tf.RaggedTensorSpec([2, None], tf.int32), "tuple": (tf.TensorSpec([], tf.float32),)}
    dataset = distribute(lambda: tf.data.Dataset.from_tensors(given))
    assert dataset.element_spec == iter(dataset).element_spec == expected
    for element in on_every_worker(strategy, first, iter(dataset)):
        assert (element["ragged"].to_list(), element["tuple"]) == ([[1], [2, 3]], (1.0,))


def test_element_spec_is_as_general_as_the_workers_datasets_need(strategy):  # row 58
    def batches(context):
        number = context.input_pipeline_id
        return tf.data.Dataset.range(9).map(lambda x: {"x": x}).batch(2 + number, drop_remainder=True)

    dataset = strategy.experimental_distribute_datasets_from_function(batches)
    assert dataset.element_spec == {"x": tf.TensorSpec([None], tf.int64)}
    elements = on_every_worker(strategy, first, iter(dataset))
    assert [element["x"].tolist() for element in elements] == [[0, 1], [0, 1, 2]]
    for other in ("words", (1, 2)):

        def different_types(context, other=other):
            return tf.data.Dataset.from_tensors(other if context.input_pipeline_id == 1 else 1)

        with pytest.raises(ValueError, match="'different_types' must give elements of one type on all workers"):
            strategy.experimental_distribute_datasets_from_function(different_types)


def test_datasets_may_be_distributed_inside_of_the_function(strategy):  # row 54
    traces = []

    @tf.function
    def step():
        traces.append(1)
        by_function = strategy.experimental_distribute_datasets_from_function(lambda _: tf.data.Dataset.range(4))
        ready = strategy.experimental_distribute_dataset(tf.data.Dataset.range(3))
        return total(by_function), total(ready), next(iter(ready))

    assert on_every_worker(strategy, step) == [(6, 3, 0)] * 2
    assert len(traces) == 1


def test_variables_may_be_read_and_changed_in_a_dataset_function(strategy):
    with strategy.scope():
        made = tf.Variable(0, dtype=tf.int64)

    def counted(_=None):
        return tf.data.Dataset.range(4).map(lambda x: made.assign_add(1) * 0 + x)

    dataset = strategy.experimental_distribute_datasets_from_function(counted)
    assert on_every_worker(strategy, total, iter(dataset)) == [6, 6]
    assert made.numpy() == 8
    with pytest.raises(ValueError, match=r"cannot be sent to the workers.* must be made by a function"):
        strategy.experimental_distribute_dataset(counted())


def test_a_dataset_function_that_creates_a_variable_is_refused(strategy):  # row 49
    def make(_):
        offset = tf.Variable(1, dtype=tf.int64, name="offset")
        return tf.data.Dataset.range(2).map(lambda x: x + offset)

    with pytest.raises(ValueError, match=r"must not create variables, but made one named 'offset'"):
        strategy.experimental_distribute_datasets_from_function(make)


def test_only_datasets_and_functions_that_return_one_can_be_distributed(strategy, distribute):  # row 64
    for value in (3, None, tf.constant(1)):
        with pytest.raises(TypeError, match=r"A dataset function takes a tf\.distribute\.InputContext and returns"):
            strategy.experimental_distribute_datasets_from_function(value)

        def no_dataset_fn(_, value=value):
            return value

        with pytest.raises(TypeError, match=r"'no_dataset_fn' must return a tf\.data\.Dataset, but returned"):
            strategy.experimental_distribute_datasets_from_function(no_dataset_fn)
        with pytest.raises(TypeError, match=r"experimental_distribute_dataset takes a tf\.data\.Dataset, got"):
            strategy.experimental_distribute_dataset(value)
    options = tf.distribute.InputOptions(
        experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA,
        experimental_place_dataset_on_device=True,
        experimental_fetch_to_device=False,
    )
    with pytest.raises(ValueError, match="one dataset for all of its replicas"):
        distribute(lambda: tf.data.Dataset.range(5), options)


def test_input_options_enable_prefetching_on_each_worker(strategy):  # row 66
    with strategy.scope():
        made = tf.Variable(0, dtype=tf.int64)
    without_injected_prefetch = tf.data.Options()
    without_injected_prefetch.experimental_optimization.inject_prefetch = False

    def counted(_):
        dataset = tf.data.Dataset.range(100).map(lambda x: made.assign_add(1) * 0 + x)
        return dataset.with_options(without_injected_prefetch)

    for buffer_size in (0, 4):
        made.assign(0)
        options = tf.distribute.InputOptions(experimental_per_replica_buffer_size=buffer_size)
        iterator = iter(strategy.experimental_distribute_datasets_from_function(counted, options))
        assert on_every_worker(strategy, first, iterator) == [0, 0]
        wait_until(lambda expected=(1 + buffer_size) * 2: made.numpy() == expected)
