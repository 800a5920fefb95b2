"""Tests of model averaging: local models, and their mean, which is computed at the same time as gradients."""

import numpy as np
import pytest
import tensorflow as tf

from coordinator.updates import Asynchronous
from tests.deadline import wait_until
from tests.ps_strategy.every_worker import TIMEOUT
from tests.updates.descent import new_rule, pushing_step
from tests.updates.descent import run as run_on
from tests.updates.parts_of_rules import means_of, own_model_of
from tests.updates.rules.averaging_steps import MAX_POLLS, NEVER, ascent, make_rule, own_models, poll_until, run

# The algorithm.


def test_what_a_worker_has_changed_moves_the_mean_where_its_model_then_begins(strategy, weights, turn):
    """Workers take turns inside one function each, so that none is idle; compared with the same on plain numbers."""
    order = [0, 1, 0, 0, 1, 1, 0, 1]
    rule = make_rule(strategy, weights)

    @tf.function(reduce_retracing=True)
    def steps(turns):
        for number in turns:
            polls = poll_until(lambda number=number: turn.read_value() == number)
            with tf.control_dependencies([polls]), rule.pull() as version:
                gradient = -tf.cast(number + 1, tf.float32)
            with tf.control_dependencies([rule.push([tf.fill([2], gradient), gradient], version)]):
                turn.assign_add(1)
        poll_until(lambda: turn.read_value() == len(order))

    turns = [tf.constant(np.flatnonzero(np.equal(order, worker)), tf.int64) for worker in range(2)]
    futures = [strategy.schedule(steps, (turns[worker],), worker=worker) for worker in range(2)]
    [future.result(TIMEOUT) for future in futures]

    own, base, shared, seen, staleness = {}, {}, 0.0, {}, []
    for version, worker in enumerate(order):
        seen.setdefault(worker, version)
        change = own.setdefault(worker, shared) - base.setdefault(worker, shared)
        shared += change / len(own)
        base[worker], own[worker] = shared, shared + version + 1
        staleness.append(version - seen[worker])
        seen[worker] = version + 1
    np.testing.assert_allclose(own_models(rule), [own[worker] for worker in range(2)], rtol=1e-6)
    np.testing.assert_allclose(weights[0].numpy(), [shared] * 2, rtol=1e-6)
    statistics = rule.statistics()
    assert statistics.updates == statistics.pushes == len(order)
    assert statistics.staleness.histogram == tuple(np.bincount(staleness).tolist())
    assert statistics.clocks == {worker: order.count(worker) for worker in range(2)}
    # Each has pulled the shared model once.
    assert statistics.pulls == len(order) + 2


@pytest.mark.long
def test_a_worker_that_joins_late_or_idles_changes_nothing_by_that(strategy, weights):
    rule = make_rule(strategy, weights)
    step = ascent(rule, weights)
    run(strategy, step, 0, 8.0)
    run(strategy, step, 0, 0.0)
    assert weights[1].numpy() == 8
    assert run(strategy, step, 1, 0.0) == 8
    assert weights[1].numpy() == 8
    # Each is idle while the other one trains, and nothing that it has learned is averaged away.
    for number in range(8):
        run(strategy, step, number % 2)
    rule.abort()
    np.testing.assert_allclose(weights[1].numpy(), 12, rtol=1e-6)
    np.testing.assert_allclose(weights[0].numpy(), [12, 12], rtol=1e-6)


# In parallel with the computation.


@pytest.mark.long
def test_gradients_are_computed_while_averaging_is_delayed(strategy, weights, turn):
    rule = make_rule(strategy, weights)
    model_mean = means_of(rule)[0]

    @tf.function(autograph=False)
    def hold_up():
        """Holds the lock of a server until the other worker has computed its gradients."""
        with model_mean.lock.hold():
            turn.assign(1, read_value=False)
            with tf.device(None):
                return poll_until(lambda: turn.read_value() == 2)

    @tf.function
    def step():
        with rule.pull() as version:
            gradients = [tf.ones_like(weight) + weight for weight in weights]
        with tf.control_dependencies(gradients):
            # The lock is held until here at least, and the push waits for the averaging.
            turn.assign(2)
        rule.push(gradients, version)

    # The first step of a worker takes the mean before it computes anything.
    run_on(strategy, step, 0)
    turn.assign(0)
    held = strategy.schedule(hold_up, worker=1)
    wait_until(lambda: turn.numpy() == 1)
    run_on(strategy, step, 0)
    assert held.result(TIMEOUT) < MAX_POLLS
    assert rule.version.numpy() == 2


@pytest.mark.long
def test_a_change_reaches_all_servers_if_the_step_that_had_it_counted_fails(strategy, weights, turn, monkeypatch):
    rule = make_rule(strategy, weights)
    step = ascent(rule, weights)
    run(strategy, step, 0, 4.0)
    # On the server that does not count.
    [other] = [mean for mean in means_of(rule) if mean.device != rule.version.device]
    advance = other.advance

    def fail_later(counted):
        polls = poll_until(lambda: turn.read_value() == 1)
        with tf.control_dependencies([tf.debugging.Assert(polls < 0, ["as planned"])]):
            return advance(tf.identity(counted))

    monkeypatch.setattr(other, "advance", tf.function(fail_later, autograph=False))
    failing = strategy.schedule(ascent(rule, weights), (tf.constant(1.0),), worker=0)
    # The change is counted, and this server does not add it yet.
    wait_until(lambda: rule.version.numpy() == 2)
    turn.assign(1)
    for raises in (lambda: failing.result(TIMEOUT), lambda: strategy.join(TIMEOUT)):
        with pytest.raises(tf.errors.InvalidArgumentError, match="as planned"):
            raises()
    monkeypatch.undo()
    for _ in range(3):
        run(strategy, step, 0, 0.0)
    rule.abort()
    assert weights[0].numpy().tolist() == [4, 4]
    assert weights[1].numpy() == 4


# Period, warm-up, abort and resume.


@pytest.mark.long
def test_the_shared_model_is_trained_until_a_worker_has_finished_its_warm_up(strategy, weights):
    rule = make_rule(strategy, weights, warmup_steps=3, period=NEVER)
    step = ascent(rule, weights)
    assert [run(strategy, step, worker) for worker in (0, 1, 0, 0)] == [0, 1, 2, 3]
    assert weights[1].numpy() == rule.version.numpy() == 4
    # From now on each worker has its own model, also one with fewer steps. It transfers nothing before the next
    # averaging but the shared model.
    before = rule.statistics()
    assert [run(strategy, step, worker) for worker in (0, 1, 0, 1)] == [4, 4, 5, 5]
    assert weights[1].numpy() == rule.version.numpy() == 4
    assert own_models(rule) == [6, 6]
    statistics = rule.statistics()
    assert (statistics.pulls - before.pulls, statistics.bytes_pulled - before.bytes_pulled) == (2, 24)
    assert (statistics.pushes, statistics.bytes_pushed) == (before.pushes, before.bytes_pushed)


def test_models_stay_separate_between_abort_and_resume(strategy, weights, tmp_path):
    rule = make_rule(strategy, weights)
    step = ascent(rule, weights)
    rule.abort()
    assert (rule.version.numpy(), weights[1].numpy()) == (0, 0)
    run(strategy, step, 0, 4.0)
    rule.abort()
    rule.abort()
    # A worker that has trained nothing does not count.
    assert weights[1].numpy() == 4
    version = int(rule.version.numpy())
    assert [run(strategy, step, worker, by) for worker, by in ((0, 1.0), (0, 1.0), (1, 6.0))] == [4, 5, 4]
    assert weights[1].numpy() == 4
    assert rule.version.numpy() == version
    rule.abort()
    assert weights[1].numpy() == (6 + 10) / 2
    assert rule.version.numpy() == version + 1
    checkpoint = tf.train.Checkpoint(weights=weights, rule=rule)
    path = checkpoint.write(str(tmp_path / "saved"))
    rule.resume()
    rule.resume()
    assert [run(strategy, step, 0) for _ in range(3)] == [8, 9, 10]
    assert rule.version.numpy() == version + 4
    assert weights[1].numpy() == 10
    # What is restored between abort and resume reaches all workers.
    rule.abort()
    checkpoint.read(path).assert_consumed()
    rule.resume()
    assert [run(strategy, step, worker, 0.0) for worker in range(2)] == [8, 8]


@pytest.mark.long
def test_abort_gives_all_workers_the_exact_mean_of_variables_of_all_dtypes(strategy):
    dtypes = [tf.float32, tf.float16, tf.bfloat16, tf.float64]
    with strategy.scope():
        weights = [tf.Variable(tf.zeros([3], dtype)) for dtype in dtypes]
    assert len({weight.device for weight in weights}) == 2
    rule = make_rule(strategy, weights, period=NEVER)
    step = pushing_step(rule, lambda by: [tf.cast(tf.fill([3], -by), dtype) for dtype in dtypes])
    for worker, by in ((0, 0.1), (1, 0.5), (1, 3.0)):
        run_on(strategy, step, worker, tf.constant(by))
    models = [np.array(variable.read_all()) for variable in own_model_of(rule).variables]
    rule.abort()
    assert rule.version.numpy() == rule.statistics().updates == 1
    for weight, values in zip(weights, models, strict=True):
        mean = values.astype(np.float64).mean(0)
        np.testing.assert_array_equal(weight.numpy(), mean.astype(values.dtype))


@pytest.mark.release
def test_abort_does_not_wait_for_a_worker_that_is_dead(strategy, shared_cluster, weights):
    rule = make_rule(strategy, weights, period=NEVER)
    step = ascent(rule, weights)
    for worker, by in enumerate((2.0, 50.0)):
        run(strategy, step, worker, by)
    shared_cluster.kill("worker", 1)
    try:
        wait_until(lambda: strategy.cluster.statistics().workers[1].state == "lost")
        rule.abort(TIMEOUT)
        assert weights[1].numpy() == 2
    finally:
        shared_cluster.restart("worker", 1)
    assert run(strategy, step, 1) == 2


# Embeddings and other rules.


@pytest.mark.long
def test_gradients_of_embeddings_are_sent_to_the_servers_at_once(strategy, weights):
    with strategy.scope():
        table = tf.Variable(tf.zeros([4, 2]))
    rule = make_rule(strategy, [*weights, table], embeddings=[table], period=NEVER)

    @tf.function
    def step(index):
        with rule.pull() as version:
            rows = tf.nn.embedding_lookup(table, [index, index])
            slices = tf.IndexedSlices(-tf.ones([2, 2]), [index, index], [4, 2])
        # In a nested function of its pull.
        tf.function(lambda: rule.push([*(-tf.ones_like(weight) for weight in weights), slices], version))()
        return rows

    def found(worker, index):
        return run_on(strategy, step, worker, tf.constant(index))[0].tolist()

    assert [found(0, 1), found(1, 1), found(1, 3), found(0, 3)] == [[0, 0], [2, 2], [0, 0], [2, 2]]
    assert table.numpy()[:, 0].tolist() == [0, 4, 0, 4]
    assert weights[1].numpy() == 0
    assert own_models(rule) == [2, 2]
    assert rule.version.numpy() == rule.statistics().pushes == 4
    rule.abort()
    assert weights[1].numpy() == 2
    assert table.numpy()[:, 0].tolist() == [0, 4, 0, 4]


@pytest.mark.long
def test_model_averaging_may_follow_and_precede_another_rule(strategy, weights):
    first, third = (make_rule(strategy, weights, period=NEVER) for _ in range(2))
    second = new_rule(strategy, Asynchronous, weights)
    step = ascent(first, weights)
    run(strategy, step, 0, 2.0)
    run(strategy, step, 1, 4.0)
    first.switch_to(second)
    assert [run(strategy, step, worker) for worker in (0, 1)] == [3, 4]
    first.switch_to(third)
    assert [run(strategy, step, worker, by) for worker, by in ((0, 1.0), (1, 3.0))] == [5, 5]
    assert weights[1].numpy() == 5
    # Methods of the first rule act on the rule that is in use.
    first.abort()
    assert weights[1].numpy() == 7
    assert third.version.numpy() == 4


def test_invalid_arguments_are_refused(strategy, weights):
    for options, error, message in (
        ({"period": -0.1}, ValueError, "period"),
        ({"period": float("nan")}, ValueError, "period"),
        ({"period": "1"}, TypeError, "period"),
        ({"warmup_steps": -1}, ValueError, "warmup_steps"),
        ({"warmup_steps": True}, TypeError, "warmup_steps"),
        ({"embeddings": weights}, ValueError, "nothing to average"),
    ):
        with pytest.raises(error, match=message):
            make_rule(strategy, weights, **options)
    beside = make_rule(strategy, weights)
    push = tf.function(lambda version: beside.push([tf.ones_like(weight) for weight in weights], version))
    with pytest.raises(ValueError, match="another function"):
        strategy.schedule(push, args=(tf.constant(0, tf.int64),))
