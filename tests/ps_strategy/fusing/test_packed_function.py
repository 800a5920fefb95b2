"""Tests of functions that are called often without fusing: they do the same with packed messages."""

import collections
import logging

import pytest
import tensorflow as tf

from coordinator.build_turns import BuildTurns
from coordinator.ps_strategy.calls import traced_function
from coordinator.ps_strategy.fusing import graph_copies
from coordinator.ps_strategy.fusing.graph_copies import PackedFunction
from coordinator.ps_strategy.tensorflow_internals.calls import call_concrete

TIMEOUT = 120.0
Pair = collections.namedtuple("Pair", ["sum", "more"])


@pytest.fixture(autouse=True)
def soon(monkeypatch):
    """Makes the messages of a function be packed when it is called for the third time."""
    monkeypatch.setattr(graph_copies, "_CALLS_BEFORE_PACKING", 3)


@pytest.fixture
def called(monkeypatch):
    """A list with, for each call so far, whether it was of the packed function; without those that create datasets."""
    called = []

    def noted(concrete, *args, stands_for=None):
        if all(output.dtype != tf.variant for output in concrete.outputs):
            called.append(stands_for not in (None, concrete))
        return call_concrete(concrete, *args, stands_for=stands_for)

    monkeypatch.setattr(traced_function, "call_concrete", noted)
    return called


@pytest.fixture
def pair(strategy):
    """Two variables on one parameter server, whose messages can be packed."""
    with strategy.scope():
        first = tf.Variable([1.0, 2.0])
        while True:
            second = tf.Variable([[3.0]])
            if second.device == first.device:
                return first, second


def one_by_one(strategy, fn, *arguments):
    return [strategy.schedule(fn, args).result(TIMEOUT) for args in arguments]


def test_a_packed_function_has_the_effects_and_results_of_the_original(strategy, pair, called):
    first, second = pair

    @tf.function
    def step(x):
        total = tf.reduce_sum(first) * x + second
        first.assign_add([1.0, 1.0])
        second.assign_sub(total * 0.5)
        return {"pair": Pair(total, None), "rows": tf.RaggedTensor.from_row_lengths(first + x, [2, 0])}

    xs = [float(x) for x in range(6)]
    found = one_by_one(strategy, step, *[[tf.constant(x)] for x in xs])
    assert called == [False] * 2 + [True] * 4
    a, b = [1.0, 2.0], 3.0
    for x, result in zip(xs, found, strict=True):
        total = sum(a) * x + b
        a, b = [each + 1 for each in a], b - total * 0.5
        assert type(result["pair"]) is Pair
        assert result["pair"].more is None
        assert result["pair"].sum == pytest.approx(total)
        assert result["rows"].to_list() == [pytest.approx([each + x for each in a]), []]
    assert second.numpy().item() == pytest.approx(b)


def test_a_packed_function_reads_finite_data_to_its_end(strategy, pair, called):
    # Data of unknown size is not fused.
    data = tf.data.Dataset.range(4).repeat(2).filter(lambda _: True)
    iterator = iter(strategy.experimental_distribute_dataset(data))
    first, second = pair

    @tf.function
    def step(iterator):
        first.assign_add([0.0, 1.0])
        return tf.cast(next(iterator), tf.float32) * second[0, 0] * first[0]

    # One worker has packed it by then. Others use it when they have their turn.
    seen = one_by_one(strategy, step, *[[iterator]] * 3)
    workers = len(strategy.cluster.workers)
    futures = [strategy.schedule(step, (iterator,)) for _ in range(9 * workers)]
    with pytest.raises(tf.errors.OutOfRangeError):
        strategy.join(TIMEOUT)
    assert called[2]
    seen += [future.result(TIMEOUT) for future in futures if future.exception(TIMEOUT) is None]
    # Each worker gets each element twice, unless it got no step for the last of them.
    assert set(seen) <= {0.0, 3.0, 6.0, 9.0}
    assert max(map(seen.count, seen)) <= 2 * workers


def test_an_error_names_the_line_in_the_users_code(strategy, pair, called):
    first, second = pair

    @tf.function
    def divide(x):
        total = tf.reduce_sum(first) + second
        return tf.math.floordiv(tf.cast(total, tf.int32), x)

    assert one_by_one(strategy, divide, *[[tf.constant(2)]] * 4)[-1] == [[3]]
    with pytest.raises(tf.errors.InvalidArgumentError) as caught:
        strategy.schedule(divide, [tf.constant(0)]).result(TIMEOUT)
    assert called[-1]
    assert "Detected at node floordiv" in str(caught.value)
    assert f'File "{__file__}", line {divide.python_function.__code__.co_firstlineno + 3}, in divide' in str(
        caught.value
    )
    with pytest.raises(tf.errors.InvalidArgumentError):
        strategy.join(TIMEOUT)


def test_a_function_without_messages_to_pack_runs_unchanged(strategy, pair, called):
    first, second = pair

    @tf.function
    def on_one(x):
        return first + x

    @tf.function
    def on_two(x):
        second.assign_add([[1.0]], read_value=False)
        return first + x

    for fn in (on_one, on_two):
        one_by_one(strategy, fn, *[[tf.constant(1.0)]] * 5)
    assert not any(called)


def test_workers_that_wait_for_each_other_do_not_deadlock(strategy, pair, called):
    first, second = pair

    def exchange(own, other):
        # If this were one message with the variables, neither function could ever put its value.
        with tf.device(first.device):
            queues = [
                tf.raw_ops.FIFOQueueV2(component_types=[tf.float32], shapes=[[]], shared_name=name)
                for name in (own, other)
            ]
            [taken] = tf.raw_ops.QueueDequeueV2(handle=queues[1], component_types=[tf.float32])
            there = tf.ensure_shape(taken, []) + 1.0
        put = first[0] * second[0, 0]
        with tf.device(first.device):
            tf.raw_ops.QueueEnqueueV2(handle=queues[0], components=[put])
        return there + 1.0

    left = tf.function(lambda: exchange("left", "right"), autograph=False)
    right = tf.function(lambda: exchange("right", "left"), autograph=False)
    for _ in range(5):
        futures = [strategy.schedule(fn) for fn in (left, right)]
        assert [future.result(TIMEOUT) for future in futures] == [5.0, 5.0]
    # Not the last one, perhaps: a worker that has no turn makes the call as before.
    assert any(called)


def test_a_function_that_cannot_be_copied_runs_unchanged(strategy, pair, called, monkeypatch, caplog):
    first, second = pair

    def broken(*_):
        raise ValueError("no copies today")

    monkeypatch.setattr(graph_copies, "packed_function", broken)

    @tf.function
    def step(x):
        return first[0] * second[0, 0] * x

    with caplog.at_level(logging.WARNING):
        assert one_by_one(strategy, step, *[[tf.constant(2.0)]] * 5) == [6.0] * 5
    assert not any(called)
    [record] = caplog.records
    assert "could not be packed; it runs unchanged" in record.message
    assert "no copies today" in caplog.text


def functions_called(packed, turns, workers, connection=0):
    return [packed.call_on(worker, connection, turns, lambda function: function) for worker in workers]


def test_one_worker_packs_the_function_while_others_run_the_original(monkeypatch):
    made = []
    monkeypatch.setattr(graph_copies, "servers_of_resources", lambda _: {"a": "there", "b": "there"})
    monkeypatch.setattr(graph_copies.hoisted_reads, "has_loops", lambda _: False)

    def make(concrete):
        # Another worker gets the original function meanwhile.
        made.extend(functions_called(packed, turns, [1]))
        return "packed"

    monkeypatch.setattr(graph_copies, "packed_function", make)
    packed, turns = PackedFunction("itself", may_be_copied=True), BuildTurns()
    assert functions_called(packed, turns, [0] * 5) == ["itself"] * 2 + ["packed"] * 3
    assert made == ["itself"]


def test_a_worker_first_runs_a_packed_function_when_it_has_its_turn(monkeypatch):
    monkeypatch.setattr(graph_copies, "servers_of_resources", lambda _: {"a": "there", "b": "there"})
    monkeypatch.setattr(graph_copies.hoisted_reads, "has_loops", lambda _: False)
    monkeypatch.setattr(graph_copies, "packed_function", lambda _: "packed")
    packed, turns = PackedFunction("itself", may_be_copied=True), BuildTurns()
    assert functions_called(packed, turns, [0] * 3) == ["itself"] * 2 + ["packed"]
    assert turns.take(2)
    assert functions_called(packed, turns, [0, 1]) == ["packed", "itself"]
    # A worker that was connected again is another process.
    assert functions_called(packed, turns, [0], connection=1) == ["itself"]
    turns.give_back(2)
    assert functions_called(packed, turns, [0, 1], connection=1) == ["packed", "packed"]


def test_a_failed_call_gives_its_turn_back(monkeypatch):
    monkeypatch.setattr(graph_copies, "servers_of_resources", lambda _: {"a": "there", "b": "there"})
    monkeypatch.setattr(graph_copies.hoisted_reads, "has_loops", lambda _: False)
    monkeypatch.setattr(graph_copies, "packed_function", lambda _: "packed")
    packed, turns = PackedFunction("itself", may_be_copied=True), BuildTurns()
    functions_called(packed, turns, [0] * 2)

    def fail(function):
        raise OSError(function)

    with pytest.raises(OSError, match="packed"):
        packed.call_on(0, 0, turns, fail)
    assert turns.take(1)


def test_a_function_with_loops_is_built_again_at_its_second_call(monkeypatch):
    monkeypatch.setattr(graph_copies.hoisted_reads, "has_loops", lambda _: True)
    monkeypatch.setattr(graph_copies, "packed_function", lambda _: "packed")
    monkeypatch.setattr(graph_copies, "servers_of_resources", lambda _: {"a": "there"})
    packed = PackedFunction("itself", may_be_copied=True)
    assert functions_called(packed, BuildTurns(), [0] * 3) == ["itself", "packed", "packed"]
