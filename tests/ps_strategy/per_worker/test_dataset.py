"""Tests of per-worker datasets: what is traced, sent and refused, their shares, caches and deletion."""

import functools
import gc
import os
import weakref
from pathlib import Path

import numpy as np
import psutil
import pytest
import tensorflow as tf

import coordinator
from coordinator.ps_strategy.per_worker.dataset import PerWorkerDataset
from coordinator.ps_strategy.per_worker.dataset_distribution import (
    DatasetDistribution,
    InputShares,
    divided_among_replicas,
    one_for_each_replica,
    warn_of_random_order,
)
from tests.deadline import wait_until
from tests.ps_strategy.every_worker import TIMEOUT, on_every_worker
from tests.ps_strategy.failure_programs import resharded_inputs
from tests.ps_strategy.local_context import local_context
from tests.ps_strategy.per_worker.elements import first, total
from tests.ps_strategy.tensorflow_internals.private_names import functions_converted


@pytest.fixture
def numbers(strategy):
    """0 to 9 on each worker."""
    return strategy.experimental_distribute_datasets_from_function(lambda _: tf.data.Dataset.range(10))


@pytest.fixture
def tens(strategy):
    """0 to 90 on each worker."""
    return strategy.experimental_distribute_dataset(tf.data.Dataset.range(0, 100, 10))


def test_several_iterators_are_arguments_of_one_function(strategy, numbers, tens):  # row 52
    @tf.function
    def add(features, *, label):
        return next(features["left"]) + next(features["others"][0]) + next(label)

    def added(left, right, label):
        args = ({"left": left, "others": [right]},)
        futures = [strategy.schedule(add, args, {"label": label}, worker=worker) for worker in range(2)]
        return [future.result(TIMEOUT) for future in futures]

    left, right, label = iter(numbers), iter(tens), iter(numbers)
    assert [added(left, right, label) for _ in range(2)] == [[0, 0], [12, 12]]
    later = iter(numbers)
    assert [added(later, right, label), added(right, left, later)] == [[22, 22], [33, 33]]


def test_a_dataset_may_be_an_argument_itself(strategy, numbers):  # rows 58, 60
    element = tf.TensorSpec([], tf.int64)
    seen = []

    @tf.function
    def total_of_both(dataset, iterator):
        seen.append((tf.data.DatasetSpec.from_value(dataset), iterator.element_spec))
        return total(dataset) + next(iter(dataset)) + next(iterator)

    for _ in range(2):
        assert on_every_worker(strategy, total_of_both, numbers, iter(numbers)) == [45, 45]
    assert seen == [(tf.data.DatasetSpec(element), element)]


def test_a_step_can_be_traced_from_the_iterators_type_alone(strategy, tens):  # row 59
    traces = []

    @tf.function
    def step(iterator):
        traces.append(iterator)
        return next(iterator)

    concrete = step.get_concrete_function(iter(tens))
    assert concrete is step.get_concrete_function(tf.data.IteratorSpec(tens.element_spec))
    for fn in (concrete, step):
        assert strategy.schedule(fn, args=(iter(tens),)).result(TIMEOUT) == 0
    assert len(traces) == 1
    floats = strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensors(1.5))
    assert strategy.schedule(step, args=(iter(floats),)).result(TIMEOUT) == 1.5


def test_dropped_iterators_are_freed_on_the_client_without_garbage_collection(strategy):  # row 53
    dataset = strategy.experimental_distribute_datasets_from_function(lambda _: tf.data.Dataset.range(10))
    iterator, left = iter(dataset), iter(dataset)
    dropped, dropped_dataset = weakref.ref(iterator), weakref.ref(dataset)
    gc.collect()
    gc.disable()
    try:
        assert on_every_worker(strategy, first, iterator) == [0, 0]
        del iterator
        # A worker's thread releases a call just after its result is set.
        wait_until(lambda: dropped() is None)
    finally:
        gc.enable()
    del dataset
    gc.collect()
    assert on_every_worker(strategy, first, left) == [0, 0], "it works after its dataset was deleted"
    del left
    gc.collect()
    wait_until(lambda: dropped_dataset() is None)


def test_iterators_that_are_dropped_are_freed_on_the_workers(strategy, shared_cluster):  # row 53
    """An iterator with a buffer has a thread on its worker, so threads are a count of the iterators there."""
    count, slack = 20, 10
    buffered = strategy.experimental_distribute_dataset(tf.data.Dataset.range(100).prefetch(2))
    servers = [psutil.Process(shared_cluster.pid("worker", index)) for index in range(2)]
    # The pools of a server, which keep their threads, fill with the first calls.
    warm = [iter(buffered) for _ in range(3)]
    for iterator in warm:
        on_every_worker(strategy, first, iterator)
    before = [server.num_threads() for server in servers]

    held = [iter(buffered) for _ in range(count)]
    for iterator in held:
        on_every_worker(strategy, first, iterator)
    assert all(server.num_threads() >= start + count for server, start in zip(servers, before, strict=True))
    del iterator
    held.clear()
    wait_until(lambda: all(server.num_threads() < start + slack for server, start in zip(servers, before, strict=True)))


def test_an_iterator_or_dataset_cannot_be_read_on_the_client_or_captured(strategy, numbers):  # rows 63, 67
    captured = iter(numbers)
    for take in (
        lambda: next(captured),
        captured.get_next,
        lambda: list(captured),
        lambda: list(numbers),
        tf.function(lambda: next(captured)),
    ):
        with pytest.raises(RuntimeError, match=r"strategy\.schedule\(step, args=\(iterator,\)\)"):
            take()
    for call in (lambda: first(captured), lambda: total(numbers)):
        with pytest.raises(AttributeError, match=r"represents one on each worker.* must be scheduled"):
            call()
    for take, words in (
        (lambda: next(captured), "Pass it as an argument"),
        (lambda: next(iter(numbers)), "Make the iterator outside of the function"),
    ):
        with pytest.raises(RuntimeError, match=words):
            strategy.schedule(tf.function(take))


@tf.function
def ten(iterator):
    return tf.stack([next(iterator) for _ in range(10)])


def by_function(strategy, make, options=None):
    return strategy.experimental_distribute_datasets_from_function(lambda _: make(), options)


def ready(strategy, make, options=None):
    return strategy.experimental_distribute_dataset(make(), options)


BOTH = pytest.mark.parametrize("distribute", [by_function, ready])


@BOTH
def test_every_worker_has_a_dataset_and_every_iterator_starts_from_the_beginning(
    strategy, distribute
):  # rows 47, 51, 55
    dataset = distribute(strategy, lambda: tf.data.Dataset.range(5))
    for _ in range(2):
        iterator = iter(dataset)
        assert on_every_worker(strategy, first, iterator) == [0, 0]
        assert on_every_worker(strategy, first, iterator) == [1, 1]
        assert on_every_worker(strategy, total, iterator) == [9, 9]


@BOTH
def test_a_map_function_is_traced_once_for_all_workers(strategy, distribute):  # rows 48, 57
    traces = []

    def double(x):
        traces.append(x)
        return x * 2

    # With an option that concerns each worker.
    options = tf.distribute.InputOptions(experimental_per_replica_buffer_size=2)
    dataset = distribute(strategy, lambda: tf.data.Dataset.range(3).map(double), options)
    for _ in range(2):
        assert on_every_worker(strategy, total, iter(dataset)) == [6, 6]
    assert len(traces) == 1


def test_the_input_context_has_the_workers_number_as_a_python_int(strategy):  # row 56
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


def test_without_a_seed_workers_and_iterators_shuffle_differently(strategy):  # row 50
    dataset = by_function(strategy, lambda: tf.data.Dataset.range(10).shuffle(10))
    orders = [order.tolist() for _ in range(2) for order in on_every_worker(strategy, ten, iter(dataset))]
    assert all(sorted(order) == list(range(10)) for order in orders)
    assert len({tuple(order) for order in orders}) == 4


@BOTH
def test_with_a_seed_all_workers_shuffle_in_the_same_order(strategy, distribute):
    dataset = distribute(strategy, lambda: tf.data.Dataset.range(10).shuffle(10, seed=7))
    iterators = [iter(dataset) for _ in range(3)]
    on_client = tf.data.Dataset.range(10).shuffle(10, seed=7)
    expected = [list(on_client.as_numpy_iterator()) for _ in range(3)]
    # Not the first one first, as on a worker that was restarted.
    for number in (2, 0, 1):
        orders = [order.tolist() for order in on_every_worker(strategy, ten, iterators[number])]
        assert orders == [expected[number]] * 2


def test_element_spec_is_as_general_as_the_workers_datasets_need(strategy):  # row 58
    """A worker is one replica, so an element is never a value per replica."""

    def batches(context):
        ragged = tf.data.Dataset.from_tensors(tf.ragged.constant([[1], [2, 3]]))
        numbers = tf.data.Dataset.range(9).map(lambda x: {"x": x})
        return tf.data.Dataset.zip(ragged, numbers.batch(2 + context.input_pipeline_id, drop_remainder=True))

    dataset = strategy.experimental_distribute_datasets_from_function(batches)
    expected = (tf.RaggedTensorSpec([2, None], tf.int32), {"x": tf.TensorSpec([None], tf.int64)})
    assert dataset.element_spec == iter(dataset).element_spec == expected
    elements = on_every_worker(strategy, first, iter(dataset))
    assert [(ragged.to_list(), each["x"].tolist()) for ragged, each in elements] == [
        ([[1], [2, 3]], [0, 1]),
        ([[1], [2, 3]], [0, 1, 2]),
    ]
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


def test_autograph_converts_the_programs_functions_and_none_of_the_library(strategy):
    class Numbers:
        def __call__(self, context):
            size = tf.constant(4 + context.num_input_pipelines, tf.int64)
            if size > 5:  # on a tensor
                size -= 1
            return tf.data.Dataset.range(size).map(self.odd_ones_are_doubled)

        def odd_ones_are_doubled(self, number):
            if number % 2 == 1:
                number *= 2
            return number

    source = coordinator.data.arrays(np.arange(3))
    source.prepare(strategy)
    positions = np.array([0, 0, 3, 0, -1])
    read = tf.function(lambda iterator: next(iterator) + tf.reduce_sum(source.read(positions)))
    with functions_converted() as converted:
        for make in (Numbers(), functools.partial(Numbers.__call__, Numbers()), tf.function(Numbers())):
            dataset = strategy.experimental_distribute_datasets_from_function(make)
            assert on_every_worker(strategy, total, iter(dataset)) == [14, 14]
        assert on_every_worker(strategy, read, iter(dataset)) == [3, 3]
    names = [each.__qualname__ for each in converted if each.__module__.startswith("coordinator.")]
    assert set(names) <= {"Source.read"}, "which calls `parse` of the program"
    assert any("odd_ones" in each.__name__ for each in converted)


def test_only_datasets_and_functions_that_return_one_can_be_distributed(strategy):  # rows 49, 64
    for value in (3, None, tf.constant(1)):
        with pytest.raises(TypeError, match=r"A dataset function takes a tf\.distribute\.InputContext and returns"):
            strategy.experimental_distribute_datasets_from_function(value)

        def no_dataset_fn(_, value=value):
            return value

        with pytest.raises(TypeError, match=r"'no_dataset_fn' must return a tf\.data\.Dataset, but returned"):
            strategy.experimental_distribute_datasets_from_function(no_dataset_fn)
        with pytest.raises(TypeError, match=r"experimental_distribute_dataset takes a tf\.data\.Dataset, got"):
            strategy.experimental_distribute_dataset(value)

    def make(_):
        offset = tf.Variable(1, dtype=tf.int64, name="offset")
        return tf.data.Dataset.range(2).map(lambda x: x + offset)

    with pytest.raises(ValueError, match=r"must not create variables, but made one named 'offset'"):
        strategy.experimental_distribute_datasets_from_function(make)
    options = tf.distribute.InputOptions(
        experimental_replication_mode=tf.distribute.InputReplicationMode.PER_REPLICA,
        experimental_place_dataset_on_device=True,
        experimental_fetch_to_device=False,
    )
    for distribute in (by_function, ready):
        with pytest.raises(ValueError, match="one dataset for all of its replicas"):
            distribute(strategy, lambda: tf.data.Dataset.range(5), options)


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


class Traced:
    """Replaces a traced function: it is called on the client."""

    uses_client_dataset = False

    def __init__(self, make_dataset):
        self.concrete = tf.function(make_dataset).get_concrete_function()

    def call_on(self, _):
        return self.concrete()


class NoCopies:
    def create(self, resource): ...


@pytest.fixture
def workers():
    return [0, 1]


@pytest.fixture
def distribution(workers):
    return DatasetDistribution(InputShares([0, 1], lambda: workers), Traced, NoCopies())


def of_worker(dataset: PerWorkerDataset, worker: int) -> list[int]:
    return list(dataset.value_on(local_context(worker)).take(12).as_numpy_iterator())


def next_of(iterator, worker: int) -> int:
    return next(iterator.value_on(local_context(worker))).numpy()


def test_a_worker_that_joins_has_a_share_of_its_own_and_the_others_keep_theirs():
    shares = InputShares([0, 1])
    assert [shares.of(worker) for worker in range(4)] == [(2, 0), (2, 1), (3, 2), (4, 3)]
    # Indices may have gaps from the beginning.
    gaps = InputShares([0, 2])
    assert [gaps.of(worker) for worker in (0, 2, 1, 3)] == [(2, 0), (2, 1), (3, 2), (4, 3)]


def test_all_present_workers_share_the_data_when_that_is_asked_for(workers):
    shares = InputShares([0, 1], lambda: workers)
    workers.append(2)
    assert [shares.of(worker) for worker in workers] == [(3, 0), (3, 1), (3, 2)]
    workers.remove(0)
    assert [shares.of(worker) for worker in workers] == [(2, 0), (2, 1)]
    assert shares.of(0) == (3, 2), "one that is leaving may still run something"


def sharded(context):
    return tf.data.Dataset.range(12).shard(context.num_input_pipelines, context.input_pipeline_id)


def test_a_dataset_is_made_again_when_its_share_changes(workers, distribution):
    # It may be made while there is no worker.
    workers.clear()
    dataset = distribution.from_function(sharded)
    workers += [0, 1]
    assert [of_worker(dataset, worker) for worker in workers] == [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]]
    workers.append(2)
    assert [of_worker(dataset, worker) for worker in workers] == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]


def test_endless_iterators_begin_again_with_new_shares_and_others_with_the_next_iter(workers, distribution):
    endless = iter(distribution.from_function(lambda context: sharded(context).repeat()))
    finite = distribution.from_function(sharded)
    iterator = iter(finite)
    for each in (endless, iterator):
        assert [next_of(each, worker) for worker in (0, 0, 1)] == [0, 2, 1]
    workers.append(2)
    assert [next_of(endless, worker) for worker in (0, 0, 1, 1, 2)] == [0, 3, 1, 4, 2]
    assert [next_of(iterator, worker) for worker in (0, 1)] == [4, 3], "this epoch goes on as it began"
    again = iter(finite)
    assert [next_of(again, worker) for worker in (0, 0, 1, 2, 2)] == [0, 3, 1, 2, 5]


@pytest.mark.long
@pytest.mark.cluster
def test_real_workers_that_join_and_leave_have_shares(run_program):
    run_program(Path(resharded_inputs.__file__).read_text(), timeout=280)


def cached_lines(lines, cache):
    return tf.data.TextLineDataset(str(lines)).map(lambda line: tf.strings.to_number(line, tf.int64)).cache(str(cache))


def complete(folder) -> list[int]:
    """The workers with a complete cache, as the names of its files say; there is no other file."""
    names = [name.partition("worker-")[2] for name in os.listdir(folder)]
    files = [tuple(name.split(".")[:2]) for name in names if name.endswith(".index")]
    assert {tuple(name.split(".")[:2]) for name in names} == set(files), names
    return sorted(int(owner) for owner, _ in files)


@pytest.fixture
def lines(tmp_path):
    """A file that the datasets read: the numbers 1, 2 and 3."""
    path = tmp_path / "lines"
    path.write_text("1\n2\n3\n")
    return path


def test_each_worker_caches_in_a_file_of_its_own_and_reads_it_again(strategy, lines, tmp_path):
    def distribute():
        return strategy.experimental_distribute_datasets_from_function(
            lambda _: cached_lines(lines, folder / "odd *?[ü]")
        )

    stock, folder = tf.data.Dataset.cache, tmp_path / "caches"
    folder.mkdir()
    dataset = distribute()
    left = iter(dataset)
    assert on_every_worker(strategy, first, left) == [1, 1]
    assert on_every_worker(strategy, total, iter(dataset)) == [6, 6], "while another one is in the middle"
    assert on_every_worker(strategy, total, left) == [5, 5]
    lines.write_text("7\n")
    assert on_every_worker(strategy, total, iter(distribute())) == [6, 6], "as if the program had started again"
    assert set(complete(folder)) == {0, 1}
    assert tf.data.Dataset.cache is stock
    # Caches of the client, and those in memory, stay as they are.
    assert list(tf.data.Dataset.range(2).cache(str(tmp_path / "own")).as_numpy_iterator()) == [0, 1]
    assert {"own.data-00000-of-00001", "own.index"} <= {*os.listdir(tmp_path)}


@pytest.mark.long
def test_a_worker_that_dies_while_it_writes_begins_a_new_file(strategy, shared_cluster, lines, tmp_path, caplog):
    (tmp_path / "caches").mkdir()
    iterator = iter(
        strategy.experimental_distribute_dataset(cached_lines(lines, tmp_path / "caches" / "file").repeat(2))
    )
    assert on_every_worker(strategy, first, iterator) == [1, 1]
    iterator.serialize()
    shared_cluster.restart("worker", 0)
    assert strategy.schedule(total, (iterator,), worker=0).result(TIMEOUT) == 12
    assert "worker/replica:0/task:0/device:CPU:0 begins at the beginning of its data" in caplog.text
    assert strategy.schedule(total, (iterator,), worker=1).result(TIMEOUT) == 11
    assert complete(tmp_path / "caches") == [0, 1], "what it had begun is deleted"
    iterator.serialize()
    shared_cluster.restart("worker", 0)
    assert strategy.schedule(total, (iterator,), worker=0).result(TIMEOUT) == 0, "the file is complete"


def test_files_of_other_shares_and_of_each_element_are_not_read(strategy, tmp_path):
    def shard(context):
        def cached(number):
            return tf.data.Dataset.range(number).cache(
                tf.strings.join([str(tmp_path / "elements"), tf.strings.as_string(number)])
            )

        data = tf.data.Dataset.range(6).shard(context.num_input_pipelines, context.input_pipeline_id)
        return data.cache(str(tmp_path / "file")).concatenate(tf.data.Dataset.range(2, 4).flat_map(cached))

    dataset = strategy.experimental_distribute_datasets_from_function(shard)
    for _ in range(2):
        assert on_every_worker(strategy, total, iter(dataset)) == [10, 13]
    names = {name.rpartition(".worker-")[0] for name in os.listdir(tmp_path)}
    shares = [f"share-{worker}-of-2" for worker in range(2)]
    assert names == {f"{name}.{share}" for name in ("file", "elements2", "elements3") for share in shares}


Dataset = tf.data.Dataset


@pytest.fixture
def files(tmp_path) -> str:
    for name in "abcd":
        (tmp_path / name).write_text(name)
    return str(tmp_path / "*")


RANDOM = {
    "files": lambda files: Dataset.list_files(files).shard(2, 0),
    "shuffle": lambda _: Dataset.range(9).shuffle(9).shard(2, 0),
    "captured": lambda files: in_each(Dataset.list_files(files)),
    "a random filter": lambda _: Dataset.range(9).filter(lambda x: tf.random.uniform([]) < 0.5).shard(2, 0),
    "as they come": lambda _: (
        Dataset.range(9).interleave(Dataset.range, num_parallel_calls=2, deterministic=False).shard(2, 0)
    ),
}
IN_ORDER = {
    "files": lambda files: Dataset.list_files(files, shuffle=False).shard(2, 0).shuffle(9),
    "with a seed": lambda files: Dataset.list_files(files, seed=3).shard(2, 0),
    "no share": Dataset.list_files,
    "a share of each": lambda files: Dataset.list_files(files).flat_map(lambda _: Dataset.range(4).shard(2, 0)),
    "random values": lambda _: Dataset.range(9).map(lambda x: x + tf.random.uniform([], 0, 5, tf.int64)).shard(2, 0),
}


def in_each(data):
    return Dataset.range(2).flat_map(lambda _: data.shard(2, 0))


def warnings(make, files, caplog):
    caplog.clear()
    warn_of_random_order("make", tf.function(lambda: make(files), autograph=False).get_concrete_function())
    return [each for each in caplog.messages if "'make' takes a shard of data in a random order" in each]


def test_only_a_shard_of_data_in_a_random_order_is_reported(files, caplog):
    assert {case: len(warnings(make, files, caplog)) for case, make in RANDOM.items()} == dict.fromkeys(RANDOM, 1)
    assert {case for case, make in IN_ORDER.items() if warnings(make, files, caplog)} == set()
    tf.random.set_seed(5)
    assert not warnings(RANDOM["files"], files, caplog), "a global seed is a seed"
    assert not warnings(RANDOM["shuffle"], files, caplog)


def test_it_is_reported_once_when_the_function_is_distributed(strategy, caplog):
    strategy.experimental_distribute_datasets_from_function(RANDOM["shuffle"])
    assert len([each for each in caplog.messages if "takes a shard of data in a random order" in each]) == 1


def elements(dataset):
    """Returns the elements of a dataset with a list of parts for each of their tensors."""
    return [
        tf.nest.map_structure(lambda each: [part.numpy().tolist() for part in each.values], element)
        for element in dataset
    ]


def test_consecutive_elements_of_any_shape_are_one_element_for_all_replicas():
    numbers = tf.data.Dataset.from_generator(
        lambda: ([0] * n for n in range(4)), output_signature=tf.TensorSpec([None])
    )
    words = tf.data.Dataset.from_tensor_slices([b"a", b"b", b"c", b"d"]).batch(1)
    grouped = one_for_each_replica(tf.data.Dataset.zip(numbers, {"word": words}), 2)
    assert elements(grouped) == [
        ([[], [0.0]], {"word": [[b"a"], [b"b"]]}),
        ([[0.0] * 2, [0.0] * 3], {"word": [[b"c"], [b"d"]]}),
    ]


def test_the_last_elements_are_filled_up_with_no_rows_or_left_out():
    grouped = one_for_each_replica(tf.data.Dataset.from_tensor_slices(np.ones([5, 2])).batch(2), 2)
    assert int(grouped.cardinality()) == 2
    assert elements(grouped)[1] == [[[1.0, 1.0]], []]
    assert grouped.element_spec.value_type.__name__ == "PerReplica"
    of_fixed_batches = one_for_each_replica(tf.data.Dataset.range(7).batch(2, drop_remainder=True), 2)
    assert elements(of_fixed_batches) == [[[0, 1], [2, 3]]]
    assert int(of_fixed_batches.cardinality()) == 1


def test_batches_of_any_kind_are_divided_by_rows():
    dense = tf.data.Dataset.from_tensor_slices(np.arange(5))
    ragged = tf.data.Dataset.from_tensor_slices(tf.ragged.constant([[1], [], [2, 3], [4], [5]]))
    sparse = tf.data.Dataset.from_tensor_slices(tf.sparse.from_dense(np.eye(5, dtype=np.int64)))
    divided = [*divided_among_replicas(tf.data.Dataset.zip(dense, ragged, sparse).batch(3), 2)]
    numbers, lists, _ = (each.values for each in divided[0])
    assert [each.numpy().tolist() for each in numbers] == [[0, 1], [2]]
    assert [each.to_list() for each in lists] == [[[1], []], [[2, 3]]]
    rows = [tf.sparse.to_dense(each).numpy() for element in divided for each in element[2].values]
    np.testing.assert_array_equal(np.concatenate(rows), np.eye(5))
    with pytest.raises(ValueError, match="divided among the 2 devices of a worker"):
        divided_among_replicas(tf.data.Dataset.range(4), 2)
