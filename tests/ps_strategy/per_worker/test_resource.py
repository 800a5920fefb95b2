"""Tests of resources, variables and numbers of each worker."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import tensorflow as tf

import coordinator
from coordinator import ClosureCancelledError, ClosureInputError
from coordinator.ps_strategy.per_worker.resource import PerWorkerResource, WorkerCopies
from coordinator.testing.fake_runtime import FakeRuntime, Gate
from tests.deadline import LIMIT
from tests.fake_cluster import OPTIONS, running_scheduler
from tests.ps_strategy.every_worker import has_copies_on_workers, on_every_worker
from tests.ps_strategy.fusing.fused_calls import COUNT, STEPS, FusedCalls
from tests.ps_strategy.local_context import local_context

TIMEOUT, WORKERS = 60.0, 2


class Workshop:
    """Builds copies, and records for which worker and connection."""

    def __init__(self):
        self.built_for = []
        self.error = None

    def build(self, worker_context):
        self.built_for.append((worker_context.index, worker_context.connection_number))
        if self.error is not None:
            raise self.error
        return f"copy {len(self.built_for)}"


@pytest.fixture
def workshop():
    return Workshop()


@pytest.fixture
def resource(workshop):
    return PerWorkerResource("vocabulary", workshop.build)


def test_a_copy_is_created_once_per_worker_and_connection_when_it_is_used(workshop, resource):
    assert workshop.built_for == []
    found = [resource.value_on(local_context(*where)) for where in ((0, 1), (1, 1), (0, 1), (1, 1), (0, 2), (0, 2))]
    assert found == ["copy 1", "copy 2", "copy 1", "copy 2", "copy 3", "copy 3"]
    assert workshop.built_for == [(0, 1), (1, 1), (0, 2)]
    constant = PerWorkerResource("constant", lambda _: tf.constant(1))
    assert constant.value_on(local_context()).device.endswith("/device:CPU:0"), "in the device scope of its worker"


def test_a_copy_is_created_again_after_it_was_reset(workshop, resource):
    resource.value_on(local_context(0))
    resource.recreate_on(local_context(1))
    assert workshop.built_for == [(0, 1)], "there is none to be created again"
    resource.recreate()
    assert [resource.value_on(local_context(0)) for _ in range(2)] == ["copy 2", "copy 2"]
    resource.recreate_on(local_context(0))
    assert resource.value_on(local_context(0)) == "copy 3"


def test_a_copy_that_cannot_be_created_is_an_input_error_with_its_cause(workshop, resource):
    workshop.error = tf.errors.NotFoundError(None, None, "no such file")
    with pytest.raises(
        ClosureInputError, match=r"vocabulary could not be created on /device:CPU:0: NotFoundError: no such file"
    ) as caught:
        resource.value_on(local_context())
    assert caught.value.__cause__ is workshop.error
    # Errors of this library are passed on as they are.
    for workshop.error in (ClosureCancelledError("stop"), ClosureInputError("table could not be made")):
        with pytest.raises(type(workshop.error)) as caught:
            resource.value_on(local_context())
        assert caught.value is workshop.error
    workshop.error = None
    assert resource.value_on(local_context()) == "copy 4", "it is tried again"


def test_work_on_all_workers_ends_when_a_parameter_server_is_lost():
    runtime = FakeRuntime(workers=2)
    with running_scheduler(runtime) as scheduler, ThreadPoolExecutor(1) as pool:
        scheduler.recovery.recover_with(lambda: False)
        gate = Gate(runtime)
        saving = pool.submit(WorkerCopies(scheduler, OPTIONS).run_on_live, gate, "save their positions")
        gate.wait_arrived()
        runtime.lose_parameter_server()
        # The caller holds what the recovery needs.
        with pytest.raises(tf.errors.UnavailableError, match="before every worker could save their positions"):
            saving.result(LIMIT)


def new_queue():
    return tf.queue.FIFOQueue(10, [tf.int64], [[]])


def test_each_worker_has_a_queue_of_its_own(strategy, shared_cluster):
    with strategy.scope():
        queue = strategy.create_per_worker_resource(new_queue)

    @tf.function
    def put(value):
        queue.enqueue(value)
        return queue.size()

    assert on_every_worker(strategy, put, tf.constant(3, tf.int64)) == [1, 1]
    assert strategy.schedule(put, (tf.constant(4, tf.int64),), worker=1).result(TIMEOUT) == 2
    assert on_every_worker(strategy, tf.function(queue.dequeue)) == [3, 3]
    assert on_every_worker(strategy, tf.function(queue.size)) == [0, 1]
    assert queue.size().numpy() == 0, "the client has one, too"
    # A worker that was restarted creates its own again.
    shared_cluster.kill("worker", 1)
    shared_cluster.restart("worker", 1)
    assert on_every_worker(strategy, put, tf.constant(3, tf.int64)) == [1, 1]


def test_a_module_of_a_variable_a_table_and_a_generator_is_one_resource(strategy):
    class Counter(tf.Module):
        def __init__(self):
            super().__init__()
            self.count = tf.Variable(0, dtype=tf.int64)
            self.seen = tf.lookup.experimental.MutableHashTable(tf.int64, tf.int64, default_value=-1)
            self.generator = tf.random.Generator.from_seed(7)

        def __call__(self, key):
            self.count.assign_add(1)
            self.seen.insert(key, self.count)
            return self.count.read_value(), self.seen.size(), self.generator.normal([])

    with strategy.scope():
        counter = strategy.create_per_worker_resource(Counter)
    step = tf.function(counter)
    first = on_every_worker(strategy, step, tf.constant(5, tf.int64))
    assert [(count, size) for count, size, _ in first] == [(1, 1)] * 2
    assert len({float(number) for *_, number in first}) == 1, "they began with the same seed"
    again = strategy.schedule(step, (tf.constant(6, tf.int64),), worker=1).result(TIMEOUT)
    assert again[:2] == (2, 2)
    assert again[2] != first[0][2]
    assert counter.count.numpy() == 0
    assert counter.count.device.startswith("/job:chief")


def test_resources_of_the_client_but_a_summary_writer_are_refused_by_words(strategy, tmp_path):
    with strategy.scope():
        queue = new_queue()
    iterator = iter(tf.data.Dataset.range(3))
    for fn in (queue.dequeue, lambda: next(iterator)):
        with pytest.raises(ValueError, match=r"resource of the client .* strategy\.create_per_worker_resource"):
            strategy.schedule(tf.function(fn))
    writer = tf.summary.create_file_writer(str(tmp_path))

    @tf.function
    def step():
        with writer.as_default():
            tf.summary.scalar("loss", 1.0, step=1)

    strategy.schedule(step).result(TIMEOUT)
    writer.close()
    assert list(tmp_path.glob("*tfevents*"))


@pytest.fixture
def counter(strategy):
    with strategy.scope():
        return tf.Variable(0, dtype=tf.int64, per_worker_variable=True)


def test_every_worker_has_its_own_copy_and_read_all_reads_them(strategy, counter):  # row 62
    count = tf.function(lambda: counter.assign_add(1))
    assert counter.read_all() == [0, 0]
    for rounds in (1, 2):
        on_every_worker(strategy, count)
        assert counter.read_all() == [rounds] * WORKERS
    strategy.schedule(count).result(TIMEOUT)
    assert sorted(counter.read_all()) == [2, 3]
    assert has_copies_on_workers(strategy, counter.handle)
    with strategy.scope():
        variables = [tf.Variable(value, per_worker_variable=True) for value in ([1.5, 2.0], ["a"], True)]
    for variable, expected in zip(variables, ([1.5, 2.0], [b"a"], True), strict=True):
        for value in variable.read_all():
            assert (value.dtype, value.shape, value.device) == (variable.dtype, variable.shape, variable.device)
            assert value.numpy().tolist() == expected


def test_a_per_worker_variable_as_an_argument_is_the_workers_copy(strategy, counter):  # row 61
    traces = []

    @tf.function
    def count(variable, *, by):
        traces.append(variable)
        variable.assign_add(by)
        counter.assign_add(1)

    for _ in range(20):
        strategy.schedule(count, args=(counter,), kwargs={"by": tf.constant(2, tf.int64)})
    strategy.join(TIMEOUT)
    assert (sum(counter.read_all()), counter.numpy(), len(traces)) == (60, 0, 1)


def test_the_workers_copy_is_used_in_nested_functions_and_datasets_too(strategy, counter):
    @tf.function
    def inner(by):
        return counter.assign_add(by)

    @tf.function
    def step():
        for by in tf.range(3, dtype=tf.int64):
            if by > 0:
                inner(by)
        return tf.data.Dataset.range(4).map(inner).reduce(tf.constant(0, tf.int64), lambda _, value: value)

    def counted(_):
        return tf.data.Dataset.range(2).map(lambda x: counter.assign_add(1) * 10 + x)

    iterator = iter(strategy.experimental_distribute_datasets_from_function(counted))
    assert on_every_worker(strategy, tf.function(lambda it: (next(it), next(it))), iterator) == [(10, 21)] * WORKERS
    assert on_every_worker(strategy, step) == [11] * WORKERS
    assert counter.read_all() == [11, 11]
    # Outside of scheduled functions, it is an ordinary variable on the client.
    tf.function(lambda: counter.assign_add(1))()
    assert (counter.numpy(), counter.device) == (1, "/job:chief/replica:0/task:0/device:CPU:0")
    assert counter.read_all() == [11, 11]


def test_evaluation_over_shards_is_exact_although_all_workers_are_killed(strategy, shared_cluster):  # row 71
    """Each shard returns what it counted in scratch variables of its worker, which are zero when it returns.

    A shard is counted by whichever attempt returned it, so nothing is lost with a worker and nothing counts twice.
    """
    shards, values = 128, np.arange(256, dtype=np.float32)
    data = tf.constant(values)
    with strategy.scope():
        total = tf.Variable(0.0, per_worker_variable=True)
        count = tf.Variable(0.0, per_worker_variable=True)

    @tf.function
    def evaluate(shard):
        total.assign(0.0)
        count.assign(0.0)
        for value in tf.data.Dataset.from_tensor_slices(data).shard(shards, shard):
            total.assign_add(value)
            count.assign_add(1.0)
        return total.read_value(), count.read_value()

    futures = [strategy.schedule(evaluate, args=(tf.constant(shard, tf.int64),)) for shard in range(shards)]
    for index in range(WORKERS):
        futures[8 + 64 * index].result(TIMEOUT)
        shared_cluster.kill("worker", index)
        shared_cluster.restart("worker", index, wait=False)
    results = [future.result(TIMEOUT) for future in futures]
    assert sum(total for total, _ in results) / sum(count for _, count in results) == values.mean()
    for index in range(WORKERS):
        shared_cluster.wait_ready("worker", index)
    on_every_worker(strategy, evaluate, tf.constant(0, tf.int64))
    assert count.read_all() == [2.0] * WORKERS


def test_every_function_sees_the_index_of_its_worker_also_by_tensorflows_own_name(strategy, monkeypatch):  # row 13
    tensorflows = tf.distribute.coordinator.experimental_get_current_worker_index

    def dataset_fn(_):
        # Disjoint shards.
        dataset = tf.data.Dataset.range(WORKERS).shard(WORKERS, tensorflows())
        return dataset.map(lambda element: 10 * element + coordinator.get_current_worker_index()).repeat()

    @tf.function
    def inner():
        return coordinator.get_current_worker_index()

    @tf.function
    def step(iterator):
        index = coordinator.get_current_worker_index()
        assert (index.dtype, index.shape) == (tf.int64, ())
        in_loop = tf.constant(0, tf.int64)
        for _ in tf.range(2):
            in_loop += inner() * tensorflows()
        tf.debugging.assert_equal(index, tensorflows())
        return next(iterator), index, in_loop

    iterator = iter(strategy.experimental_distribute_datasets_from_function(dataset_fn))
    expected = [(11 * index, index, 2 * index**2) for index in range(WORKERS)]
    assert on_every_worker(strategy, step, iterator) == expected
    fused = FusedCalls(strategy, monkeypatch)
    assert {future.result() for future in fused.run(step, [(iterator,)] * COUNT)} == set(expected)
    assert STEPS in fused.sizes


def test_the_index_raises_outside_of_scheduled_functions(strategy):
    tensorflows = tf.distribute.coordinator.experimental_get_current_worker_index
    traced = tf.function(tensorflows).get_concrete_function()
    assert on_every_worker(strategy, traced) == list(range(WORKERS))
    for read in (traced, tensorflows):
        with pytest.raises(RuntimeError, match="Cannot retrieve the worker index"):
            read()
    with strategy.scope(), pytest.raises(RuntimeError, match="known only inside a function that is scheduled"):
        coordinator.get_current_worker_index()
    for read in (coordinator.get_current_worker_index, tf.function(coordinator.get_current_worker_index)):
        with pytest.raises(RuntimeError, match="known only inside a function that is scheduled"):
            read()
