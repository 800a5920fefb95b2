"""Tests of the stale synchronous rule: pulls, local models between them, and the lead over the slowest worker."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from coordinator.updates import StaleSynchronous
from tests.deadline import wait_until
from tests.ps_strategy.every_worker import TIMEOUT
from tests.updates.descent import (
    FREE,
    descend,
    descending_step,
    gated_step,
    held,
    new_rule,
    regression,
    regression_step,
    run,
)


def test_a_worker_pulls_once_in_get_model_frequency_steps(strategy, weights):
    frequency, steps, pulls = 4, 13, 4
    rule = new_rule(strategy, StaleSynchronous, weights, get_model_frequency=frequency)
    step = descending_step(rule, weights)
    found = [run(strategy, step, 0) for _ in range(steps)]
    assert [int(version) for version, _ in found] == [number - number % frequency for number in range(steps)]
    # Its copy changes like the shared model, since no other worker pushes.
    assert [float(weight) for _, weight in found] == [-float(number) for number in range(steps)]
    assert weights[1].numpy() == -steps
    statistics = rule.statistics()
    assert statistics.pulls == pulls
    assert statistics.bytes_pulled == pulls * 3 * 4
    assert statistics.pushes == statistics.updates == steps
    assert statistics.staleness.histogram == (4, 3, 3, 3)


def test_the_pushes_of_others_are_seen_only_with_the_next_pull(strategy, weights):
    rule = new_rule(strategy, StaleSynchronous, weights, get_model_frequency=3)
    step = descending_step(rule, weights)
    found = [run(strategy, step, worker) for worker in (0, 1, 0, 1, 0, 1, 0, 1)]
    of_first, of_second = ([tuple(map(float, result)) for result in found[worker::2]] for worker in (0, 1))
    assert of_first == [(0, 0), (0, -1), (0, -2), (6, -6)]
    assert of_second == [(1, -1), (1, -2), (1, -3), (7, -7)]
    assert weights[1].numpy() == -8


def test_embeddings_are_looked_up_on_their_server_in_every_step(strategy, weights):
    with strategy.scope():
        table = tf.Variable(tf.zeros([6, 2]))
    rule = new_rule(strategy, StaleSynchronous, [table, weights[1]], get_model_frequency=100, embeddings=[table])

    @tf.function
    def step():
        with rule.pull() as version, tf.GradientTape() as tape:
            found = tf.gather(table, [4, 1])
            loss = tf.reduce_sum(found) + weights[1]
        gradients = tape.gradient(loss, [table, weights[1]])
        assert isinstance(gradients[0], tf.IndexedSlices)
        rule.push(gradients, version)
        return found[0, 0], loss - tf.reduce_sum(found)

    found = [tuple(map(float, run(strategy, step, worker))) for worker in (0, 1, 0, 1, 0)]
    assert [row for row, _ in found] == [0.0, -1.0, -2.0, -3.0, -4.0]
    assert [weight for _, weight in found] == [0.0, -1.0, -1.0, -2.0, -2.0]
    assert table.numpy().tolist() == [[0, 0], [-5, -5], [0, 0], [0, 0], [-5, -5], [0, 0]]
    # Of the table, two rows of two numbers in each step.
    assert rule.statistics().bytes_pulled == 2 * 4 + 5 * 4 * 4


def test_one_worker_trains_as_one_process_however_seldom_it_pulls(strategy):
    def new():
        rate = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
        optimizer = keras.optimizers.AdamW(rate, weight_decay=0.5)
        variables = [keras.Variable([0.1, 0.2, 0.3]), keras.Variable(0.0)]
        optimizer.exclude_from_weight_decay(var_list=variables[1:])
        return variables, optimizer

    with strategy.scope():
        variables, optimizer = new()
    rule = new_rule(strategy, StaleSynchronous, variables, optimizer=optimizer, get_model_frequency=4)

    @tf.function
    def step(x, y):
        with rule.pull() as version:
            loss, gradients = regression_step(variables, x, y)
        rule.push(gradients, version)
        return loss

    here, own_optimizer = new()
    for x, y in zip(*regression(9, 8), strict=True):
        expected, gradients = regression_step(here, x, y)
        np.testing.assert_allclose(run(strategy, step, 0, x, y), expected, rtol=1e-4, atol=1e-6)
        own_optimizer.apply(gradients, here)
    for variable, expected in zip(variables, here, strict=True):
        np.testing.assert_allclose(variable.numpy(), expected.numpy(), rtol=1e-4, atol=1e-6)
    assert optimizer.iterations == 9


def test_workers_use_a_changed_learning_rate_between_pulls(strategy, weights):
    with strategy.scope():
        rate, sgd = tf.Variable(0.5), keras.optimizers.SGD(0.5)
    for optimizer, options, change in (
        (descend, {"learning_rate": rate}, lambda: rate.assign(1.0)),
        (sgd, {}, lambda: setattr(sgd, "learning_rate", 1.0)),
    ):
        weights[1].assign(0.0)
        rule = new_rule(strategy, StaleSynchronous, weights, optimizer, get_model_frequency=9, **options)
        step = descending_step(rule, weights)
        found = [float(run(strategy, step, 0)[1]) for _ in range(2)]
        change()
        found += [float(run(strategy, step, 0)[1]) for _ in range(2)]
        assert found == [0.0, -0.5, -1.0, -2.0]


@pytest.mark.release
def test_a_worker_that_was_restarted_pulls_first(strategy, shared_cluster, weights):
    rule = new_rule(strategy, StaleSynchronous, weights, get_model_frequency=100)
    step = descending_step(rule, weights)
    for worker in (0, 1, 1, 0):
        run(strategy, step, worker)
    shared_cluster.kill("worker", 1)
    run(strategy, step, 0)
    shared_cluster.restart("worker", 1)
    assert tuple(map(float, run(strategy, step, 1))) == (5, -5)
    assert tuple(map(float, run(strategy, step, 1))) == (5, -6)
    assert tuple(map(float, run(strategy, step, 0))) == (0, -3)
    assert rule.statistics().pulls == 3


@pytest.mark.long
def test_stale_synchronous_continues_after_another_rule_and_saves_no_copies(strategy, weights, tmp_path):
    rule = new_rule(strategy, "asynchronous", weights)
    following = new_rule(strategy, StaleSynchronous, weights, get_model_frequency=3, max_lead=1)
    step = descending_step(rule, weights)
    found = [run(strategy, step, 0) for _ in range(2)]
    rule.switch_to(following)
    found += [run(strategy, step, 0) for _ in range(4)]
    assert [tuple(map(float, result)) for result in found] == [(0, 0), (1, -1), (2, -2), (2, -3), (2, -4), (5, -5)]
    statistics = rule.statistics()
    assert (statistics.pulls, statistics.updates, statistics.clocks) == (4, 6, {0: 6})
    path = tf.train.Checkpoint(rule=following).save(str(tmp_path / "rule"))
    keys = {name.partition("/.ATTRIBUTES")[0] for name, _ in tf.train.list_variables(path)}
    kept = {f"rule/state/{name}" for name in ("version", "counts", "clocks", "seconds")}
    assert keys == kept | {"save_counter", "_CHECKPOINTABLE_OBJECT_GRAPH"}


def test_the_shared_model_gets_the_mean_of_grads_to_wait_gradients(strategy, weights):
    before = set(strategy.extended.services.rules)
    rule = new_rule(strategy, StaleSynchronous, weights, get_model_frequency=3, grads_to_wait=2)
    # The dashboard shows it once.
    assert set(strategy.extended.services.rules) - before == {rule}
    step = descending_step(rule, weights)
    found = [run(strategy, step, 0) for _ in range(5)]
    # The worker's copy takes each of its gradients, the shared model one for two.
    assert [tuple(map(float, result)) for result in found] == [(0, 0), (0, -1), (0, -2), (1, -1), (1, -2)]
    assert (weights[1].numpy(), rule.version.numpy()) == (-2.0, 2)
    assert rule.flush() == 1
    assert (weights[1].numpy(), rule.version.numpy(), rule.flush()) == (-3.0, 3, 0)
    statistics = rule.statistics()
    assert (statistics.pushes, statistics.updates, statistics.rejected) == (5, 3, 0)


def test_wrong_arguments_are_refused(strategy, weights):
    of_frequency, of_lead = "get_model_frequency must be an integer of at least 1, got", "max_lead must be an integer"
    for options, error, message in (
        ({"grads_to_wait": 2, "lr_staleness_modulation": True}, ValueError, "must be False with grads_to_wait above 1"),
        ({"get_model_frequency": 0}, ValueError, f"{of_frequency} 0"),
        ({"get_model_frequency": True}, TypeError, f"{of_frequency} True"),
        ({"max_lead": -1}, ValueError, f"{of_lead} of at least 1 .*got -1"),
        ({"max_lead": 0}, ValueError, r"at least 1 \(with 1 the workers run in lockstep\), got 0"),
        ({"max_lead": 1.0}, TypeError, rf"{of_lead} .*, got 1\.0"),
        ({"lr_staleness_modulation": 3}, TypeError, "lr_staleness_modulation must be"),
    ):
        with pytest.raises(error, match=message):
            new_rule(strategy, StaleSynchronous, weights, **{"get_model_frequency": 2} | options)


WORKERS = 2


@pytest.fixture(scope="module")
def gated(strategy):
    """A rule that lets workers lead by two steps, its gated step, and what ends a held one; for two tests."""
    with strategy.scope():
        weights, may_end = [tf.Variable([0.0, 0.0]), tf.Variable(0.0)], tf.Variable(False, trainable=False)
    rule = new_rule(strategy, StaleSynchronous, weights, get_model_frequency=2, max_lead=2)
    return rule, gated_step(rule, weights, may_end), may_end


def clocks(rule):
    return rule.state.clocks.numpy()[:WORKERS].tolist()


def waiting(rule):
    return rule.state.workers.is_waiting.numpy()[:WORKERS].tolist()


def test_workers_wait_at_max_lead_steps_ahead_of_the_slowest(strategy, gated):
    rule, step, may_end = gated
    may_end.assign(False)
    rule.state.clocks.assign(tf.zeros_like(rule.state.clocks))
    held(strategy, rule, step)
    for _ in range(6):
        strategy.schedule(step, (FREE,), worker=1)
    wait_until(lambda: clocks(rule) == [0, 2] and waiting(rule) == [False, True])
    may_end.assign(True)
    strategy.join(TIMEOUT)
    # Worker 0 is idle, so no worker waits for it any longer.
    assert clocks(rule) == [1, 6]
    idle = rule.statistics().idle_shares
    assert idle[0] == 0 < idle[1]


@pytest.mark.long
def test_quiet_lets_a_worker_that_waits_for_a_slower_one_finish_its_step(strategy, weights, may_end):
    rule = new_rule(strategy, StaleSynchronous, weights, get_model_frequency=2, max_lead=1)
    step = gated_step(rule, weights, may_end)
    held(strategy, rule, step)
    ahead = [strategy.schedule(step, (FREE,), worker=1) for _ in range(3)]
    wait_until(lambda: waiting(rule) == [False, True])
    may_end.assign(True)
    with strategy.quiet(TIMEOUT):
        # Worker 1 has ended the step at whose beginning it waited, and possibly the one after, but began no other.
        assert sum(clocks(rule)) == -weights[1].numpy()
        assert waiting(rule) == [False, False]
        with pytest.raises(RuntimeError, match="join was called inside"):
            strategy.join()
    strategy.join(TIMEOUT)
    assert all(future.done() for future in ahead)
    assert weights[1].numpy() == -4


def test_no_worker_waits_for_the_clock_of_one_that_joins_first(strategy, gated):
    before, first, second = [10, 12, 11], 0, 1
    rule, step, may_end = gated
    may_end.assign(False)
    # As after a restored checkpoint, or the end of an epoch: all are idle.
    rule.state.clocks.assign(before + [0] * (len(rule.state.clocks.numpy()) - len(before)))
    stopped = held(strategy, rule, step, first)
    future = strategy.schedule(step, (FREE,), worker=second)
    try:
        wait_until(lambda: future.done() or waiting(rule)[second])
        assert not waiting(rule)[second]
    finally:
        may_end.assign(True)
    future.result(TIMEOUT)
    stopped.result(TIMEOUT)
    assert clocks(rule) == [max(before) + 1] * 2
