"""Tests of what may be scheduled, with which arguments, for which worker and how often."""

import concurrent.futures
import functools
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

import coordinator
from coordinator.updates.rule_state import pause
from tests.ps_strategy.every_worker import on_every_worker
from tests.ps_strategy.failure_programs import queue_lock
from tests.ps_strategy.fusing.fused_calls import FusedCalls
from tests.ps_strategy.gate import Gate

TIMEOUT, STEPS = 120.0, 40


@tf.function
def add(x, y=10, *, z=100):
    return x + y + z


def result(strategy, fn, *args, **kwargs):
    return strategy.schedule(fn, args=args, kwargs=kwargs).result(TIMEOUT)


def test_a_process_has_one_strategy_at_a_time(strategy, shared_cluster):  # row 5
    with pytest.raises(RuntimeError, match="one strategy at a time"):
        coordinator.ParameterServerStrategy(shared_cluster.resolver)
    assert result(strategy, add, tf.constant(1)) == 111


def test_the_cluster_and_its_workers_take_functions_as_the_strategy_does(strategy):
    where = tf.function(lambda x: x + coordinator.get_current_worker_index())
    one = tf.constant(1, tf.int64)
    assert [worker.schedule(where, (one,)).result(TIMEOUT) for worker in strategy.cluster.workers] == [1, 2]
    assert strategy.cluster.schedule(where, args=(one,), worker=1).result(TIMEOUT) == 2
    assert strategy.cluster.schedule(add, (one,), {"z": 0}).result(TIMEOUT) == 11


def test_only_tensorflow_functions_can_be_scheduled(strategy):  # row 6
    for schedule in (strategy.schedule, strategy.cluster.schedule, strategy.cluster.workers[0].schedule):
        for fn in (len, lambda: 1, "add", None):
            with pytest.raises(TypeError, match=r"takes a tf\.function or a concrete function"):
                schedule(fn)
    with pytest.raises(TypeError, match="args must be a list or tuple"):
        strategy.schedule(add, args=1)
    with pytest.raises(TypeError, match="kwargs must be a dict"):
        strategy.schedule(add, args=(1,), kwargs=[2])
    assert result(strategy, add, tf.constant(1)) == 111, "a refused function is no error of a later call"


def test_variables_with_unknown_dimensions_are_for_the_client(strategy):
    with strategy.scope():
        variable = tf.Variable(tf.ones([2, 3]), shape=tf.TensorShape([None, 3]), name="growing")
    words = r"uses the variable 'growing:0' on a parameter server, whose shape .* has unknown dimensions"
    for fn, args in ((tf.function(lambda: tf.shape(variable)), ()), (tf.function(tf.shape), (variable,))):
        with pytest.raises(ValueError, match=words):
            strategy.schedule(fn, args=args)
    variable.assign(tf.ones([5, 3]))
    assert variable.numpy().shape == (5, 3)


def test_arguments_may_be_anything_that_a_tf_function_takes(strategy, counter):
    @tf.function
    def f(variable, x, ragged, sparse, *rest, **named):
        variable.assign_add(5)
        sums = tf.reduce_sum(ragged, axis=1), tf.sparse.reduce_sum(sparse)
        return {"sum": x["a"][0] + sum(rest), "named": named["scale"] * x["b"], "sums": sums}

    tensors = tf.ragged.constant([[1], [2, 3]]), tf.sparse.from_dense([[0, 7], [5, 0]])
    structure = {"a": [np.arange(3)], "b": 2.5}
    value = result(strategy, f, counter, structure, *tensors, 1, np.int64(2), scale=tf.constant(4.0))
    np.testing.assert_array_equal(value["sum"], [3, 4, 5])
    np.testing.assert_array_equal(value["sums"][0], [1, 5])
    assert (value["named"], value["sums"][1], counter.numpy()) == (10, 12, 5)


def test_concrete_functions_can_be_scheduled(strategy):
    concrete = add.get_concrete_function(tf.TensorSpec([], tf.int32), z=tf.TensorSpec([], tf.int32))
    assert result(strategy, concrete, tf.constant(1), z=tf.constant(2)) == 13
    assert result(strategy, concrete, tf.constant(1), 10, z=tf.constant(2)) == 13
    concrete = add.get_concrete_function(tf.TensorSpec([], tf.int32))
    with pytest.raises(TypeError, match="too many positional arguments"):
        strategy.schedule(concrete, args=(1, 10, 100, 1000))
    with pytest.raises(TypeError, match="string"):
        result(strategy, concrete, tf.constant("text"))
    with pytest.raises(TypeError, match="string"):
        strategy.join(TIMEOUT)


def test_methods_partial_functions_and_input_signatures_work(strategy):
    class Scale:
        factor = 3

        @tf.function
        def apply(self, x, offset=1):
            return self.factor * x + offset

    scale = Scale()
    assert result(strategy, scale.apply, tf.constant(2)) == 7
    assert result(strategy, tf.function(functools.partial(scale.apply, offset=5)), tf.constant(2)) == 11
    total = tf.function(tf.reduce_sum, input_signature=[tf.TensorSpec([None], tf.float32)])
    assert [result(strategy, total, [1, 2]), result(strategy, total, np.ones(5))] == [3, 5]
    assert total.experimental_get_tracing_count() == 1
    with pytest.raises(TypeError, match=r"\(2, 2\)"):
        strategy.schedule(total, args=(tf.ones((2, 2)),))


def test_a_function_may_create_its_variables_on_its_first_call(strategy):
    class Lazy:
        variable = None

        @tf.function
        def __call__(self):
            if self.variable is None:
                self.variable = tf.Variable(10.0)
            return self.variable.assign_add(1.0)

    lazy = Lazy()
    assert [result(strategy, lazy.__call__) for _ in range(2)] == [11, 12]
    assert "/job:ps" in lazy.variable.device


def test_scheduling_works_inside_and_outside_of_the_scope(strategy, count, counter):  # row 11
    with strategy.scope():
        strategy.schedule(count)
        strategy.join(TIMEOUT)
    strategy.schedule(count)
    strategy.join(TIMEOUT)
    assert counter.numpy() == 2


def test_thousands_of_functions_complete(strategy, counted):  # row 15
    double = tf.function(lambda x: x * 2)
    tensors = [tf.constant(x) for x in range(10)]
    futures = [strategy.schedule(double, args=(tensors[number % 10],)) for number in range(5_000)]
    strategy.join(timeout=2 * TIMEOUT)
    assert [future.result(timeout=0) for future in futures] == [number % 10 * 2 for number in range(5_000)]
    assert (counted().finished, counted().waiting, counted().running) == (5_000, 0, 0)


def test_each_output_is_stacked_in_the_order_of_the_runs(strategy, monkeypatch, counted):
    fused = FusedCalls(strategy, monkeypatch)
    with strategy.scope():
        counter = tf.Variable(0)

    @tf.function
    def step(scale):
        # Read once: each use of what `assign_add` returns is a read of its own, and other workers add meanwhile.
        number = tf.identity(counter.assign_add(1))
        row = tf.cast(tf.range(3), tf.float32) * scale
        text = tf.strings.as_string(number)
        return {"number": number, "row": row, "text": (text, tf.fill([2], text)), "nothing": None, "empty": row[:0]}

    future = strategy.schedule(step, args=(2.0,), steps=STEPS)
    result = future.result(TIMEOUT)
    assert counter.numpy() == counted().finished == future.completed == STEPS
    assert (result["number"].shape, result["number"].dtype) == ((STEPS,), np.int32)
    np.testing.assert_array_equal(result["row"], np.tile([0.0, 2.0, 4.0], [STEPS, 1]))
    assert result["row"].dtype == np.float32
    assert [int(text) for text in result["text"][0]] == list(result["number"])
    assert (result["text"][1].shape, result["nothing"], result["empty"].shape) == ((STEPS, 2), None, (STEPS, 0))
    assert max(fused.sizes) > 1


def test_runs_take_the_elements_of_an_iterator_until_it_has_ended_everywhere(strategy):
    def dataset_fn(context):
        start = 100 * context.input_pipeline_id
        return tf.data.Dataset.range(start, start + 10)

    iterator = iter(strategy.experimental_distribute_datasets_from_function(dataset_fn))

    @tf.function
    def step(iterator):
        return next(iterator)

    workers = len(strategy.cluster.workers)
    future = strategy.schedule(step, args=(iterator,), steps=10 * workers)
    expected = [100 * worker + number for worker in range(workers) for number in range(10)]
    assert sorted(future.result(TIMEOUT)) == expected
    more = strategy.schedule(step, args=(iterator,), steps=5)
    with pytest.raises(tf.errors.OutOfRangeError):
        strategy.join(TIMEOUT)
    assert isinstance(more.exception(TIMEOUT), tf.errors.OutOfRangeError)


def test_what_cannot_be_stacked_is_refused(strategy):
    with pytest.raises(ValueError, match="Ragged"):
        strategy.schedule(tf.function(lambda: tf.ragged.constant([[1], [2, 3]])), steps=2)
    with strategy.scope():
        counter = tf.Variable(0)
    varying = tf.function(lambda: tf.range(counter.assign_add(1, read_value=True)))
    future = strategy.schedule(varying, steps=3)
    with pytest.raises(ValueError, match="shapes"):
        future.result(TIMEOUT)
    strategy.join(TIMEOUT)
    # Nor is a range of examples one of each run.
    epochs = coordinator.data.Epochs(coordinator.data.client(np.arange(8)), batch_size=2)
    positions = next(iter(epochs.on(strategy)))
    with pytest.raises(ValueError, match="each run"):
        strategy.schedule(tf.function(lambda positions: positions), args=(positions,), steps=2)


def test_map_returns_futures_in_the_order_of_the_arguments(strategy):
    double = tf.function(lambda x, y: 2 * x + tf.reduce_sum(y))
    stacked = strategy.schedule(tf.function(lambda: tf.constant(1)), steps=4)
    futures = strategy.map(double, ((tf.constant(number), stacked) for number in range(20)))
    assert strategy.local_results(futures) == [2 * number + 4 for number in range(20)]


@tf.function
def where():
    return coordinator.get_current_worker_index()


def test_a_function_that_takes_too_long_is_run_on_another_worker_as_well(strategy):
    with strategy.scope():
        started = tf.Variable(0)

    @tf.function
    def step():
        # Never ends in its first attempt.
        first, iterations = started.assign_add(1, read_value=True) == 1, 0
        while first:
            iterations += 1 + pause(tf.constant(1e-2, tf.float64))
        return coordinator.get_current_worker_index()

    assert strategy.schedule(step, timeout=0.1).result(TIMEOUT) in (0, 1)
    assert started.numpy() >= 2
    strategy.join(TIMEOUT)
    # The straggler was cancelled: its worker is free, although the function would have run for ever.
    assert on_every_worker(strategy, where) == [0, 1]


def test_a_future_may_be_an_argument_also_inside_of_structures(strategy):  # row 7
    @tf.function
    def make(n):
        return {"range": tf.range(n), "ragged": tf.ragged.constant([[1], [2, 3]]), "nothing": None}

    @tf.function
    def total(made, factor):
        return factor * (tf.reduce_sum(made["range"]) + tf.reduce_sum(made["ragged"]))

    gate = Gate(strategy)
    [held] = gate.occupy()
    made = strategy.schedule(make, args=(4,))
    doubled = strategy.schedule(total, args=(made, 2))
    nested = strategy.schedule(total, args=({"range": doubled, "ragged": doubled},), kwargs={"factor": held})
    traces = total.experimental_get_tracing_count()
    assert not nested.done()
    gate.open()
    strategy.join(TIMEOUT)
    assert (int(doubled.result()), int(nested.result())) == (24, int(held.result()) * (24 + 24))
    again = strategy.schedule(total, args=(strategy.schedule(make, args=(4,)), 2))
    assert int(again.result(TIMEOUT)) == 24
    assert total.experimental_get_tracing_count() == traces


def test_a_foreign_future_is_refused(strategy):  # row 7
    for foreign in (coordinator.Future("step", 1, lambda: False), concurrent.futures.Future()):
        with pytest.raises(ValueError, match="not a future of this strategy"):
            strategy.schedule(add, args=(foreign,))


def test_a_function_for_one_worker_runs_there(strategy):
    assert strategy.local_results([strategy.schedule(where, worker=index) for index in (1, 0, 1)]) == [1, 0, 1]
    with pytest.raises(ValueError, match="There is no worker 9"):
        strategy.schedule(where, worker=9)
    with pytest.raises(ValueError, match="timeout must be a positive number"):
        strategy.schedule(where, timeout=0)


FEATURES = np.array([[1.0, 2.0], [3.0, 4.0]], np.float32)


def test_a_scheduled_function_is_not_compiled_as_a_whole(strategy):
    whole = tf.function(lambda x: x + 1.0, jit_compile=True)
    for function in (whole, whole.get_concrete_function(FEATURES)):
        with pytest.raises(ValueError, match=r"(?s)was scheduled and has jit_compile=True.*Leave jit_compile"):
            strategy.schedule(function, args=(FEATURES,))
    assert strategy.done()


def test_a_compiled_function_that_uses_a_variable_on_a_server_raises_wherever_called(strategy):
    with strategy.scope():
        weight = tf.Variable(2.0, name="weight")

    @tf.function(jit_compile=True)
    def scaled(x):
        return x * weight

    def in_condition(x):
        return tf.cond(x[0, 0] > 0, lambda: tf.function(scaled)(x), lambda: x)

    def in_a_dataset(x):
        dataset = tf.data.Dataset.from_tensor_slices(([1.0, 2.0], [3.0, 4.0]))
        return next(iter(dataset.map(lambda one, other: scaled(one + other), num_parallel_calls=2).batch(2)))

    # Not compiled, it works.
    assert strategy.schedule(tf.function(scaled.python_function), args=(FEATURES,)).result()[0, 0] == 2.0
    for step in (in_condition, in_a_dataset):
        with pytest.raises(ValueError, match=r"'scaled'.*variable 'weight:0' on /job:ps.*pass its value") as raised:
            strategy.schedule(tf.function(step), args=(FEATURES,))
        assert step.__name__ in str(raised.value)


PROGRAM = """
    import pytest, tensorflow as tf
    import coordinator
    from coordinator.testing import LocalCluster

    x, variable, numbers = tf.ones([8, 2]), tf.Variable(1.0), tf.data.Dataset.range(3)
    table = tf.lookup.StaticHashTable(tf.lookup.KeyValueTensorInitializer(["a"], [1.0]), -1.0)
    add = tf.function(lambda: variable + 1.0)
    init = tf.errors.InvalidArgumentError.__init__
    with LocalCluster(workers=1, ps=1) as cluster, coordinator.ParameterServerStrategy(cluster.resolver) as strategy:
        for kind, use in [
            (tf.errors.InvalidArgumentError, lambda: strategy.experimental_distribute_dataset(numbers)),
            (tf.errors.InvalidArgumentError, lambda: coordinator.data.client(numbers)),
            (tf.errors.InvalidArgumentError, lambda: variable.numpy()),
            (tf.errors.InvalidArgumentError, add),
            (ValueError, lambda: strategy.schedule(add)),
            (ValueError, lambda: strategy.schedule(tf.function(lambda: table.lookup(tf.constant("a"))))),
            (ValueError, lambda: strategy.schedule(tf.function(lambda: numbers.reduce(0, lambda a, _: a)))),
        ]:
            with pytest.raises(kind, match="made before the strategy") as caught:
                use()
            assert "make it after the strategy" in str(caught.value)
        assert strategy.schedule(tf.function(lambda x: tf.reduce_sum(x + x)), (x,)).result(60) == 32.0
        assert strategy.schedule(tf.function(lambda: tf.reduce_sum(x))).result(60) == 16.0
    assert tf.errors.InvalidArgumentError.__init__ is init
"""


@pytest.mark.long
@pytest.mark.cluster
def test_what_was_made_before_the_strategy_is_refused_in_a_sentence_or_works(run_program):
    run_program(PROGRAM)


CORE = ("__main__", *(f"coordinator.{name}" for name in ("clock", "future", "queueing", "statistics", "workers.")))


@pytest.mark.long
@pytest.mark.cluster
def test_only_the_core_and_the_standard_library_run_under_the_queues_lock(run_program):
    program = run_program(Path(queue_lock.__file__).read_text(), timeout=280)
    modules = program.stdout.strip().splitlines()[-1].split()
    others = [name for name in modules if name.partition(".")[0] not in sys.stdlib_module_names]
    assert "coordinator.queueing.queue_state" in others
    assert [name for name in others if not name.startswith(CORE)] == []


def test_a_function_that_reads_a_dataset_of_the_client_is_refused_when_traced(strategy):
    data = tf.data.Dataset.range(5)

    def in_a_loop():
        found = tf.constant(0, tf.int64)
        for number in data:
            found += number
        return found

    reduced = tf.function(lambda: data.reduce(tf.constant(0, tf.int64), lambda a, b: a + b))
    for read in (tf.function(in_a_loop), reduced, tf.function(lambda: reduced() + 1)):
        with pytest.raises(ValueError, match=r"reads a tf\.data\.Dataset of the client.*distribute_dataset"):
            strategy.schedule(read)
