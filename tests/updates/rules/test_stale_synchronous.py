"""Tests of the stale synchronous rule: the number of pulls, and local models between them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from coordinator.updates import StaleSynchronous
from tests.updates.descent import descending_step, new_rule, run


def make_rule(strategy, variables, **options):
    return new_rule(strategy, StaleSynchronous, variables, **options)


# Pulls, and the local models between them.


def test_a_worker_pulls_once_in_get_model_frequency_steps(strategy, weights):
    frequency, steps, pulls = 4, 13, 4
    rule = make_rule(strategy, weights, get_model_frequency=frequency)
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
    rule = make_rule(strategy, weights, get_model_frequency=3)
    step = descending_step(rule, weights)
    found = [run(strategy, step, worker) for worker in (0, 1, 0, 1, 0, 1, 0, 1)]
    of_first, of_second = ([tuple(map(float, result)) for result in found[worker::2]] for worker in (0, 1))
    assert of_first == [(0, 0), (0, -1), (0, -2), (6, -6)]
    assert of_second == [(1, -1), (1, -2), (1, -3), (7, -7)]
    assert weights[1].numpy() == -8


def test_embeddings_are_looked_up_on_their_server_in_every_step(strategy, weights):
    with strategy.scope():
        table = tf.Variable(tf.zeros([6, 2]))
    rule = make_rule(strategy, [table, weights[1]], get_model_frequency=100, embeddings=[table])

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


# One worker equals one process: its copies and the shared model change together.


FEATURES = np.random.default_rng(1).normal(size=[9, 8, 3]).astype(np.float32)
LABELS = FEATURES @ np.array([1.0, -2.0, 0.5], np.float32) + 0.3


def loss_and_gradients(variables, x, y):
    with tf.GradientTape() as tape:
        kernel, bias = (tf.convert_to_tensor(variable) for variable in variables)
        loss = tf.reduce_mean((tf.linalg.matvec(x, kernel) + bias - y) ** 2)
    return loss, tape.gradient(loss, [variable.value for variable in variables])


def test_one_worker_trains_as_one_process_however_seldom_it_pulls(strategy):
    def new():
        rate = keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)
        return [keras.Variable([0.1, 0.2, 0.3]), keras.Variable(0.0)], keras.optimizers.SGD(rate, momentum=0.9)

    with strategy.scope():
        variables, optimizer = new()
    rule = make_rule(strategy, variables, optimizer=optimizer, get_model_frequency=4)

    @tf.function
    def step(x, y):
        with rule.pull() as version:
            loss, gradients = loss_and_gradients(variables, x, y)
        rule.push(gradients, version)
        return loss

    here, own_optimizer = new()
    for x, y in zip(FEATURES, LABELS, strict=True):
        expected, gradients = loss_and_gradients(here, x, y)
        np.testing.assert_allclose(run(strategy, step, 0, x, y), expected, rtol=1e-4, atol=1e-6)
        own_optimizer.apply(gradients, here)
    for variable, expected in zip(variables, here, strict=True):
        np.testing.assert_allclose(variable.numpy(), expected.numpy(), rtol=1e-4, atol=1e-6)
    assert optimizer.iterations == len(FEATURES)


# Workers that die, checkpoints, and other rules before it.


@pytest.mark.release
def test_a_worker_that_was_restarted_pulls_first(strategy, shared_cluster, weights):
    rule = make_rule(strategy, weights, get_model_frequency=100)
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


@pytest.mark.parametrize("max_lead", [1, pytest.param(None, marks=pytest.mark.long)])
def test_stale_synchronous_continues_after_another_rule_and_saves_no_copies(strategy, weights, max_lead, tmp_path):
    rule = new_rule(strategy, "asynchronous", weights)
    following = make_rule(strategy, weights, get_model_frequency=3, max_lead=max_lead)
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
    rule = make_rule(strategy, weights, get_model_frequency=3, grads_to_wait=2)
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
            make_rule(strategy, weights, **{"get_model_frequency": 2} | options)
