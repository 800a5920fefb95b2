"""Tests of model averaging: the models after an abort, switches of the rule, and workers that die."""

import numpy as np
import pytest
import tensorflow as tf

import coordinator
from coordinator.updates import Asynchronous, ModelAverage
from tests.deadline import wait_until
from tests.ps_strategy.every_worker import TIMEOUT, on_every_worker
from tests.updates.rules.averaging_steps import (
    NEVER,
    WORKERS,
    ascent,
    descend,
    make_rule,
    own_models,
    poll_until,
    run,
)

# Abort and resume.


@pytest.mark.long
def test_abort_gives_all_workers_the_exact_mean(strategy, weights):
    rule = make_rule(strategy, weights, period=NEVER)
    step = ascent(rule, weights)
    for worker, by in enumerate((0.1, 0.5, 3.0)):
        for _ in range(worker + 1):
            run(strategy, step, worker, by)
    mean = np.float32(np.mean(np.array(own_models(rule), np.float64)))
    rule.abort()
    assert weights[1].numpy() == mean
    assert weights[0].numpy().tolist() == [mean, mean]
    assert rule.version.numpy() == rule.statistics().updates == 1
    assert [run(strategy, step, worker) for worker in range(WORKERS)] == [mean] * WORKERS


@pytest.mark.long
def test_a_worker_that_has_trained_nothing_does_not_count(strategy, weights):
    rule = make_rule(strategy, weights, period=NEVER)
    step = ascent(rule, weights)
    run(strategy, step, 0, 4.0)
    run(strategy, step, 1, 2.0)
    rule.abort()
    assert weights[1].numpy() == 3


@pytest.mark.long
def test_models_stay_separate_between_abort_and_resume(strategy, weights):
    rule = make_rule(strategy, weights)
    step = ascent(rule, weights)
    run(strategy, step, 0, 4.0)
    rule.abort()
    rule.abort()
    assert weights[1].numpy() == 4
    version = int(rule.version.numpy())
    assert [run(strategy, step, worker, by) for worker, by in ((0, 1.0), (0, 1.0), (1, 6.0))] == [4, 5, 4]
    assert weights[1].numpy() == 4
    assert rule.version.numpy() == version
    rule.abort()
    assert weights[1].numpy() == (6 + 10) / 2
    assert rule.version.numpy() == version + 1
    rule.resume()
    rule.resume()
    assert [run(strategy, step, 0) for _ in range(3)] == [8, 9, 10]
    assert rule.version.numpy() == version + 4
    assert weights[1].numpy() == 10


@pytest.mark.long
def test_abort_with_nothing_trained_changes_nothing(strategy, weights):
    rule = make_rule(strategy, weights)
    rule.abort()
    assert rule.version.numpy() == 0
    assert weights[1].numpy() == 0


@pytest.mark.long
def test_a_checkpoint_restored_between_abort_and_resume_reaches_all_workers(strategy, weights, tmp_path):
    rule = make_rule(strategy, weights)
    step = ascent(rule, weights)
    checkpoint = tf.train.Checkpoint(weights=weights, rule=rule)
    [run(strategy, step, worker, 5.0) for worker in range(WORKERS)]
    rule.abort()
    saved, path = float(weights[1].numpy()), checkpoint.write(str(tmp_path / "saved"))
    rule.resume()
    [run(strategy, step, worker, 100.0) for worker in range(WORKERS)]
    rule.abort()
    assert weights[1].numpy() > saved + 50
    checkpoint.read(path).assert_consumed()
    rule.resume()
    found = [run(strategy, step, worker, 0.0) for worker in range(WORKERS)]
    assert found == [saved] * WORKERS


# Embeddings, other rules and nested functions.


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
        rule.push([*(-tf.ones_like(weight) for weight in weights), slices], version)
        return rows

    def found(worker, index):
        return strategy.schedule(step, (tf.constant(index),), worker=worker).result(TIMEOUT)[0].tolist()

    assert [found(0, 1), found(1, 1), found(1, 3), found(0, 3)] == [[0, 0], [2, 2], [0, 0], [2, 2]]
    assert table.numpy()[:, 0].tolist() == [0, 4, 0, 4]
    assert weights[1].numpy() == 0
    assert own_models(rule)[:2] == [2, 2]
    assert rule.version.numpy() == rule.statistics().pushes == 4
    rule.abort()
    assert weights[1].numpy() == 2
    assert table.numpy()[:, 0].tolist() == [0, 4, 0, 4]


@pytest.mark.long
def test_model_averaging_may_follow_and_precede_another_rule(strategy, weights):
    first = make_rule(strategy, weights, period=NEVER)
    with strategy.scope():
        second = Asynchronous(descend, weights, learning_rate=1.0)
    third = make_rule(strategy, weights, period=NEVER)
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


@pytest.mark.long
def test_a_push_may_be_in_a_nested_function_of_its_pull_and_in_no_other(strategy, weights):
    rule = make_rule(strategy, weights)

    @tf.function
    def step():
        with rule.pull() as version:
            gradients = [-tf.ones_like(weight) for weight in weights]
        return tf.function(lambda: rule.push(gradients, version))()

    assert strategy.schedule(step, worker=0).result(TIMEOUT)
    assert own_models(rule)[0] == 1
    beside = tf.function(lambda version: rule.push([tf.ones_like(weight) for weight in weights], version))
    with pytest.raises(ValueError, match="another function"):
        strategy.schedule(beside, args=(tf.constant(0, tf.int64),))


# Workers that die.


@pytest.mark.release
def test_a_dead_worker_is_left_out_and_starts_with_the_shared_model_on_return(strategy, shared_cluster, weights, turn):
    rule = make_rule(strategy, weights)
    step = ascent(rule, weights)

    @tf.function
    def average_and_wait():
        with rule.pull() as version:
            found = weights[1].read_value()
            gradients = [tf.zeros_like(weight) for weight in weights]
        with tf.control_dependencies([rule.push(gradients, version)]):
            turn.assign_add(1)
            poll_until(lambda: turn.read_value() > 1)
        return found

    run(strategy, step, 0)
    waiting = strategy.schedule(average_and_wait, worker=2)
    wait_until(lambda: turn.numpy() == 1)
    shared_cluster.kill("worker", 2)
    try:
        # The model of the dead one is not below 0: a mean with it would stay above twice the step.
        wait_until(lambda: run(strategy, step, 0, -100.0) < -1000)
        turn.assign(2)
    finally:
        shared_cluster.restart("worker", 2)
    assert waiting.result(TIMEOUT) < -500


@pytest.mark.release
def test_abort_does_not_wait_for_a_worker_that_is_dead(strategy, shared_cluster, weights):
    rule = make_rule(strategy, weights, period=NEVER)
    step = ascent(rule, weights)
    for worker, by in enumerate((1.0, 3.0, 50.0)):
        run(strategy, step, worker, by)
    shared_cluster.kill("worker", 2)
    try:
        wait_until(lambda: strategy.cluster.statistics().workers[2].state == "lost")
        rule.abort(TIMEOUT)
        assert weights[1].numpy() == 2
    finally:
        shared_cluster.restart("worker", 2)
    assert on_every_worker(strategy, tf.function(lambda: tf.constant(1))) == [1] * WORKERS
    assert run(strategy, step, 2) == 2


# Arguments.


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"period": -0.1}, ValueError, "period"),
        ({"period": float("nan")}, ValueError, "period"),
        ({"period": "1"}, TypeError, "period"),
        ({"warmup_steps": -1}, ValueError, "warmup_steps"),
        ({"warmup_steps": 1.5}, TypeError, "warmup_steps"),
        ({"warmup_steps": True}, TypeError, "warmup_steps"),
    ],
)
def test_invalid_arguments_are_refused(strategy, weights, options, error, message):
    with pytest.raises(error, match=message):
        make_rule(strategy, weights, **options)


def test_a_model_of_embeddings_alone_is_refused(strategy, weights):
    with pytest.raises(ValueError, match="nothing to average"):
        make_rule(strategy, weights, embeddings=weights)


def test_model_averaging_is_public():
    assert coordinator.updates.ModelAverage is ModelAverage
