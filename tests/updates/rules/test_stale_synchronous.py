"""Tests of the stale synchronous rule: the number of pulls, and local models between them."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from coordinator.updates import Asynchronous, StaleSynchronous
from tests.updates.descent import descend, descending_step, mostly_long, run


def make_rule(strategy, variables, **options):
    with strategy.scope():
        return StaleSynchronous(descend, variables, learning_rate=1.0, **options)


@pytest.fixture
def weights(strategy):
    with strategy.scope():
        return [tf.Variable([0.0, 0.0]), tf.Variable(0.0)]


# Pulls, and the local models between them.


@pytest.mark.parametrize(
    ("frequency", "steps", "pulls"),
    mostly_long([(4, 11, 3), (4, 12, 3), (4, 13, 4), (1, 5, 5), (100, 7, 1)], (4, 13, 4)),
)
def test_a_worker_pulls_once_in_get_model_frequency_steps(strategy, weights, frequency, steps, pulls):
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
    staleness = [sum(number % frequency == late for number in range(steps)) for late in range(min(frequency, steps))]
    assert statistics.staleness.histogram == tuple(staleness)


@pytest.mark.long
def test_every_worker_counts_its_own_steps(strategy, weights):
    rule = make_rule(strategy, weights, get_model_frequency=3)
    step = descending_step(rule, weights)
    for worker, steps in enumerate((4, 3, 1)):
        for _ in range(steps):
            run(strategy, step, worker)
    assert rule.statistics().pulls == 2 + 1 + 1


def test_the_pushes_of_others_are_seen_only_with_the_next_pull(strategy, weights):
    rule = make_rule(strategy, weights, get_model_frequency=3)
    step = descending_step(rule, weights)
    found = [run(strategy, step, worker) for worker in (0, 1, 0, 1, 0, 1, 0, 1)]
    of_first, of_second = ([tuple(map(float, result)) for result in found[worker::2]] for worker in (0, 1))
    assert of_first == [(0, 0), (0, -1), (0, -2), (6, -6)]
    assert of_second == [(1, -1), (1, -2), (1, -3), (7, -7)]
    assert weights[1].numpy() == -8


@pytest.mark.long
def test_several_steps_in_one_function_pull_as_often_as_in_several(strategy, weights):
    rule = make_rule(strategy, weights, get_model_frequency=4)

    @tf.function
    def steps():
        versions = tf.TensorArray(tf.int64, 6)
        for number in tf.range(6):
            with rule.pull() as version:
                gradients = [weight.read_value() - 1.0 for weight in weights]
            rule.push(gradients, version)
            versions = versions.write(number, version)
        return versions.stack()

    assert run(strategy, steps, 0).tolist() == [0, 0, 0, 0, 4, 4]
    assert run(strategy, steps, 0).tolist() == [4, 4, 8, 8, 8, 8]
    assert rule.statistics().pulls == 3


@pytest.mark.long
def test_variables_that_are_too_large_to_be_packed_have_copies(strategy):
    with strategy.scope():
        large = tf.Variable(tf.zeros([2**18 + 1]))
    rule = make_rule(strategy, [large], get_model_frequency=2)

    @tf.function
    def step():
        with rule.pull() as version:
            found = large[0] + large[-1]
        rule.push([tf.ones_like(large)], version)
        return found

    assert [float(run(strategy, step, worker)) for worker in (0, 1, 0, 1)] == [0.0, -2.0, -2.0, -4.0]
    assert rule.statistics().bytes_pulled == 2 * 4 * (2**18 + 1)


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

OPTIMIZERS = {
    "adam": lambda: keras.optimizers.Adam(0.05),
    "momentum": lambda: keras.optimizers.SGD(0.05, momentum=0.9),
    "schedule": lambda: keras.optimizers.SGD(keras.optimizers.schedules.ExponentialDecay(0.1, 2, 0.5)),
    "function": lambda: descend,
}
RATE = 0.05
FEATURES = np.random.default_rng(1).normal(size=[9, 8, 3]).astype(np.float32)
LABELS = FEATURES @ np.array([1.0, -2.0, 0.5], np.float32) + 0.3


def losses_in_one_process(optimizer):
    kernel, bias = tf.Variable([0.1, 0.2, 0.3]), tf.Variable(0.0)
    losses = []
    for x, y in zip(FEATURES, LABELS, strict=True):
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((tf.linalg.matvec(x, kernel) + bias - y) ** 2)
        gradients = tape.gradient(loss, [kernel, bias])
        if optimizer is descend:
            for variable, gradient in zip([kernel, bias], gradients, strict=True):
                descend(variable, gradient, RATE)
        else:
            optimizer.apply(gradients, [kernel, bias])
        losses.append(float(loss))
    return losses, kernel.numpy()


@pytest.mark.parametrize("kind", mostly_long(OPTIMIZERS, "schedule"))
@pytest.mark.parametrize("frequency", mostly_long([None, 1, 4], 4))
def test_one_worker_trains_as_one_process_however_seldom_it_pulls(strategy, kind, frequency):
    """A frequency of None tests the asynchronous rule, with which it has to agree."""
    with strategy.scope():
        kernel, bias = keras.Variable([0.1, 0.2, 0.3]), keras.Variable(0.0)
        optimizer = OPTIMIZERS[kind]()
        options = {"learning_rate": RATE} if optimizer is descend else {}
        rule = (
            Asynchronous(optimizer, [kernel, bias], **options)
            if frequency is None
            else StaleSynchronous(optimizer, [kernel, bias], get_model_frequency=frequency, **options)
        )

    @tf.function
    def step(x, y):
        with rule.pull() as version:
            with tf.GradientTape() as tape:
                loss = tf.reduce_mean((tf.linalg.matvec(x, kernel.value) + bias.value - y) ** 2)
            gradients = tape.gradient(loss, [kernel.value, bias.value])
        rule.push(gradients, version)
        return loss

    losses = [float(run(strategy, step, 0, x, y)) for x, y in zip(FEATURES, LABELS, strict=True)]
    expected_losses, expected_kernel = losses_in_one_process(OPTIMIZERS[kind]())
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(kernel.numpy(), expected_kernel, rtol=1e-4, atol=1e-6)
    if optimizer is not descend:
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


def test_a_checkpoint_contains_clocks_and_version_but_no_local_models(strategy, weights, tmp_path):
    rule = make_rule(strategy, weights, get_model_frequency=2, max_lead=3)
    step = descending_step(rule, weights)
    for _ in range(3):
        run(strategy, step, 0)
    path = tf.train.Checkpoint(rule=rule).save(str(tmp_path / "rule"))
    keys = {name.partition("/.ATTRIBUTES")[0] for name, _ in tf.train.list_variables(path)}
    kept = {f"rule/state/{name}" for name in ("version", "counts", "clocks", "seconds")}
    assert kept <= keys
    assert keys <= kept | {"save_counter", "_CHECKPOINTABLE_OBJECT_GRAPH"}


@pytest.mark.parametrize("max_lead", [None, 1])
@pytest.mark.long
def test_stale_synchronous_continues_after_another_rule(strategy, weights, max_lead):
    with strategy.scope():
        rule = Asynchronous(descend, weights, learning_rate=1.0)
    following = make_rule(strategy, weights, get_model_frequency=3, max_lead=max_lead)
    step = descending_step(rule, weights)
    found = [run(strategy, step, 0) for _ in range(2)]
    rule.switch_to(following)
    found += [run(strategy, step, 0) for _ in range(4)]
    assert [tuple(map(float, result)) for result in found] == [(0, 0), (1, -1), (2, -2), (2, -3), (2, -4), (5, -5)]
    statistics = rule.statistics()
    assert (statistics.pulls, statistics.updates, statistics.clocks) == (4, 6, {0: 6})


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


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        (
            {"get_model_frequency": 2, "grads_to_wait": 2, "lr_staleness_modulation": True},
            ValueError,
            "lr_staleness_modulation must be False with grads_to_wait above 1",
        ),
        ({"get_model_frequency": 0}, ValueError, "get_model_frequency must be an integer of at least 1, got 0"),
        ({"get_model_frequency": 2.5}, TypeError, r"get_model_frequency must be an integer of at least 1, got 2\.5"),
        ({"get_model_frequency": True}, TypeError, "get_model_frequency must be an integer of at least 1, got True"),
        (
            {"get_model_frequency": 2, "max_lead": -1},
            ValueError,
            "max_lead must be an integer of at least 1 .*got -1",
        ),
        (
            {"get_model_frequency": 2, "max_lead": 0},
            ValueError,
            r"at least 1 \(with 1 the workers run in lockstep\), got 0",
        ),
        ({"get_model_frequency": 2, "max_lead": 1.0}, TypeError, r"max_lead must be an integer .*, got 1\.0"),
        ({"get_model_frequency": 2, "lr_staleness_modulation": 3}, TypeError, "lr_staleness_modulation must be"),
    ],
)
def test_wrong_arguments_are_refused(strategy, weights, options, error, message):
    with pytest.raises(error, match=message):
        make_rule(strategy, weights, **options)
