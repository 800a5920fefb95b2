"""Tests of what rules round while it is sent: what stays exact, and that what rounding takes arrives later."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf

from coordinator.updates import Asynchronous, ModelAverage
from coordinator.updates.model import restored, rounded
from tests.deadline import wait_until
from tests.ps_strategy.every_worker import concrete_function
from tests.ps_strategy.sharded.partitioners import partitioned
from tests.updates.descent import descend, new_rule, pushing_step, run
from tests.updates.parts_of_rules import model_of

# Of 1 and 1 + 2**-9, the nearest numbers with 8 bits are 1.
FINE = 1 + 2**-9


def sent_to_16_bits(values):
    """Rounds float32 values to the nearest of 8 significant bits, ties to even; with integers, as IEEE 754 says."""
    bits = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    kept = (bits + 0x7FFF + ((bits >> 16) & 1)) & 0xFFFF0000
    return kept.astype(np.uint32).view(np.float32)


def step_with(rule, variables, gradients):
    """Returns a step that pushes these gradients, and returns the variables that it has read."""

    @tf.function
    def step():
        with rule.pull() as version:
            found = [tf.identity(variable) for variable in variables]
        rule.push(gradients, version)
        return found

    return step


def test_a_round_trip_gives_the_nearest_number_of_eight_bits():
    random = np.random.default_rng(0)
    values = (random.normal(size=10_000) * 10.0 ** random.integers(-30, 30, 10_000)).astype(np.float32)
    values[:3] = 0.0, -0.0, FINE
    variable = tf.Variable(values)
    found = restored(rounded(variable.read_value(), tf.bfloat16), variable)
    assert found.dtype == tf.float32
    np.testing.assert_array_equal(found, sent_to_16_bits(values))
    assert np.max(np.abs(found - values) / np.maximum(np.abs(values), 1e-37)) <= 2**-8
    np.testing.assert_array_equal(restored(rounded(found, tf.bfloat16), variable), found)
    special = tf.cast(rounded(tf.constant([np.inf, -np.inf, np.nan]), tf.bfloat16), tf.float32).numpy()
    np.testing.assert_array_equal(special, [np.inf, -np.inf, np.nan])
    # Scalars, other dtypes and rows are not rounded.
    rows = tf.IndexedSlices(tf.constant([[FINE]]), tf.constant([0]))
    for tensor in (tf.constant(FINE), tf.constant([FINE], tf.float64), tf.constant([257]), rows):
        assert rounded(tensor, tf.bfloat16) is tensor
    assert rounded(tf.constant([FINE]), None).dtype == tf.float32


def test_a_rule_rounds_pulls_and_pushes_and_counts_what_it_sends(strategy):
    large = [2**18 + 1]
    with strategy.scope(), partitioned(2):
        parts = tf.Variable(tf.fill([4, 3], FINE))
    with strategy.scope():
        matrix, table, scalar = (tf.Variable(tf.fill(shape, FINE)) for shape in (large, [4, 2], []))
    variables = [parts, matrix, table, scalar]
    gradients = [tf.fill(variable.shape, -FINE) for variable in variables]

    def trained(dtype):
        rule = new_rule(strategy, "asynchronous", variables, embeddings=[table], transfer_dtype=dtype)
        return run(strategy, step_with(rule, variables, gradients), 0), rule.statistics()

    found, of_16_bits = trained(tf.bfloat16)
    assert [np.unique(value).tolist() for value in found] == [[1.0], [1.0], [FINE], [FINE]]
    assert [np.unique(variable).tolist() for variable in variables] == [[FINE + 1]] * 2 + [[2 * FINE]] * 2
    _, of_32_bits = trained(tf.float32)
    assert of_32_bits.bytes_pulled - of_16_bits.bytes_pulled == 2 * (12 + large[0])
    assert of_32_bits.bytes_pushed - of_16_bits.bytes_pushed == 2 * (12 + large[0])


def test_no_float32_vector_leaves_its_device(strategy):
    with strategy.scope():
        variables = [tf.Variable(tf.ones([300])), tf.Variable(tf.ones([300])), tf.Variable(tf.ones([2**18 + 1]))]
        rule = Asynchronous(descend, variables, learning_rate=1.0, embeddings=(), transfer_dtype=tf.bfloat16)
    gradients = [tf.ones_like(variable) for variable in variables]
    graph = concrete_function(strategy, step_with(rule, variables, gradients)).graph
    sent = [
        tensor
        for operation in graph.get_operations()
        for tensor in operation.inputs
        if job_of(tensor.op) != job_of(operation) and tensor.shape.rank == 1 and tensor.shape[0] >= 300
    ]
    # To the worker and back.
    assert len({tensor.ref() for tensor in sent}) == 2 * len(variables)
    assert {tensor.dtype for tensor in sent} == {tf.bfloat16}


def job_of(operation):
    """Returns where an operation runs: on a parameter server if its device is one, or it is called with its handles."""
    return tf.DeviceSpec.from_string(operation.device).job or "worker"


def test_rules_have_the_default_of_the_options_unless_they_say_otherwise(strategy, monkeypatch):
    services = strategy.extended.services
    options = dataclasses.replace(services.options, transfer_dtype=tf.bfloat16)
    monkeypatch.setattr(strategy.extended, "services", dataclasses.replace(services, options=options))
    with strategy.scope():
        variable = tf.Variable([1.0])
        rounds = Asynchronous(descend, [variable], learning_rate=1.0, error_feedback=True)
        is_exact = Asynchronous(descend, [variable], learning_rate=1.0, transfer_dtype=tf.float32)
        averages = ModelAverage(descend, [variable], learning_rate=1.0)
    assert [model_of(rule).transfer_dtype for rule in (rounds, is_exact, averages)] == [tf.bfloat16, None, None]


def test_a_rule_refuses_other_dtypes_in_words(strategy):
    with strategy.scope():
        variable = tf.Variable([1.0])
        for dtype, message in (
            (tf.float16, r"^transfer_dtype must be tf.bfloat16, tf.float32 or None, got tf.float16 \(its numbers end"),
            (tf.int8, r"^transfer_dtype must be tf.bfloat16, tf.float32 or None, got tf.int8\.$"),
            ("bfloat16", r"^transfer_dtype must be tf.bfloat16, tf.float32 or None, got 'bfloat16'\.$"),
        ):
            with pytest.raises(ValueError, match=message):
                Asynchronous(descend, [variable], learning_rate=1.0, transfer_dtype=dtype)
        with pytest.raises(ValueError, match=r"^error_feedback needs transfer_dtype=tf.bfloat16, of the rule or"):
            Asynchronous(descend, [variable], learning_rate=1.0, error_feedback=True)
        with pytest.raises(TypeError, match=r"^error_feedback must be True or False, got 1\.$"):
            Asynchronous(descend, [variable], learning_rate=1.0, transfer_dtype=tf.bfloat16, error_feedback=1)


def new_step(strategy, variable, kind="asynchronous", **options):
    rule = new_rule(strategy, kind, [variable], transfer_dtype=tf.bfloat16, **{"error_feedback": True} | options)
    return rule, pushing_step(rule, lambda gradient: [gradient])


def push(strategy, step, *values, worker=0):
    return bool(run(strategy, step, worker, tf.constant(values)))


def test_the_sum_of_pushes_differs_from_the_exact_one_by_one_rounding(strategy):
    random, steps = np.random.default_rng(2), 20
    gradients = (random.normal(size=(steps, 50)) * 10.0 ** random.integers(-3, 3, (steps, 50))).astype(np.float32)
    with strategy.scope():
        variable, other = tf.Variable(tf.zeros([50])), tf.Variable(tf.zeros([50]))
    _, step = new_step(strategy, variable)
    _, step_without = new_step(strategy, other, error_feedback=False)
    for gradient in gradients:
        run(strategy, step, 0, tf.constant(gradient))
        run(strategy, step_without, 0, tf.constant(gradient))
    exact = gradients.sum(0, dtype=np.float64)
    # The last push was at most as large as its gradient and the error before, which is one rounding of a push.
    greatest = np.abs(gradients).max(0)
    one_rounding = 2.0**-8 * greatest * (1 + 2.0**-7)
    of_float32 = steps * 2.0**-23 * np.abs(gradients).sum(0)
    assert (np.abs(-variable.numpy() - exact) <= one_rounding + of_float32).all()
    assert np.linalg.norm(-variable.numpy() - exact) < np.linalg.norm(-other.numpy() - exact)


@pytest.mark.long
def test_a_rejected_push_leaves_the_error_as_it_was(strategy):
    with strategy.scope():
        variable = tf.Variable([0.0])
    rule, step = new_step(strategy, variable, "synchronous")
    late = pushing_step(rule, lambda gradient: [gradient], 1)
    assert push(strategy, step, FINE)
    assert variable.numpy().tolist() == [-1.0]
    assert not run(strategy, late, 0, tf.constant([FINE]))
    # The error of the first push: half a unit of the last bit, with which 1 + 2**-8 is halfway, and even upwards.
    assert push(strategy, step, 1 + 2**-8 + 2**-9)
    assert variable.numpy().tolist() == [-1.0 - (1 + 2**-7)]


def test_a_push_that_is_not_finite_leaves_the_error_as_it_was(strategy):
    with strategy.scope():
        variable = tf.Variable([0.0, 0.0])
    _, step = new_step(strategy, variable)
    push(strategy, step, FINE, FINE)
    push(strategy, step, np.inf, np.nan)
    variable.assign([0.0, 0.0])
    push(strategy, step, 2**-9, 0.0)
    assert variable.numpy().tolist() == [-(2**-8), -(2**-9)]


@pytest.mark.long
def test_each_worker_has_errors_and_a_restarted_one_begins_with_zero(strategy, shared_cluster):
    with strategy.scope():
        variable = tf.Variable([0.0])
    _, step = new_step(strategy, variable)
    for worker in (0, 1):
        push(strategy, step, FINE, worker=worker)
    assert variable.numpy().tolist() == [-2.0]
    shared_cluster.kill("worker", 1)
    wait_until(lambda: not strategy.cluster.workers[1].healthy())
    shared_cluster.restart("worker", 1)
    wait_until(strategy.cluster.workers[1].healthy)
    push(strategy, step, 0.0, worker=1)
    assert variable.numpy().tolist() == [-2.0]
    push(strategy, step, 0.0, worker=0)
    assert variable.numpy().tolist() == [-2.0 - 2**-9]


def test_a_variable_of_an_unknown_shape_is_refused(strategy):
    with strategy.scope():
        variable = tf.Variable([1.0], shape=[None])
    with pytest.raises(ValueError, match="error_feedback needs variables of known shapes: that of 'Variable:0' is"):
        new_step(strategy, variable)
