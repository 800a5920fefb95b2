"""Tests that optimizers applied server by server, and to rows and parts, change a model as in one process."""

from functools import partial

import keras
import numpy as np
import pytest
import tensorflow as tf

from coordinator import updates
from coordinator.updates.gradient_optimizer import gradient_optimizer
from tests.ps_strategy.every_worker import concrete_function
from tests.ps_strategy.sharded.partitioners import partitioned
from tests.updates.descent import descend, mostly_long, pushing_step, run
from tests.updates.state.locked_sections import waits_under_locks

SHAPES, STEPS = [(4, 3), (3,), (3, 2), (2,)], 4


def schedule():
    return keras.optimizers.schedules.ExponentialDecay(0.1, decay_steps=2, decay_rate=0.5)


# Those of which each does something that the others do not: scalars, slots of another shape, functions, clipping, ...
optimizers = keras.optimizers
OPTIMIZERS = {
    "Adam, AMSGrad, with a schedule": lambda: optimizers.Adam(schedule(), amsgrad=True),
    "Nadam": lambda: optimizers.Nadam(0.05),
    "Lamb": lambda: optimizers.Lamb(0.05),
    "Muon": lambda: optimizers.Muon(0.05, weight_decay=0.1),
    "ScheduleFreeAdamW": lambda: optimizers.ScheduleFreeAdamW(0.05, warmup_steps=3),
    "averages": lambda: optimizers.Adam(0.05, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    "loss_scale_factor and global_clipnorm": lambda: optimizers.SGD(0.1, loss_scale_factor=8.0, global_clipnorm=0.3),
}


def initial_values():
    random = np.random.default_rng(0)
    return [random.normal(size=shape).astype(np.float32) for shape in SHAPES]


def new_variables():
    variables = [keras.Variable(value) for value in initial_values()]
    variables[0].constraint = keras.constraints.NonNeg()
    return variables


def batches():
    random = np.random.default_rng(1)
    return [tf.constant(random.normal(size=(8, 4)), tf.float32) for _ in range(STEPS)]


def gradients_of(variables, x, optimizer):
    """Returns the gradients of a small network's loss."""
    with tf.GradientTape() as tape:
        kernel, bias, kernel2, bias2 = (tf.convert_to_tensor(variable) for variable in variables)
        y = tf.tanh(x @ kernel + bias) @ kernel2 + bias2
        loss = optimizer.scale_loss(tf.reduce_mean(tf.square(y - 1.0)))
    return tape.gradient(loss, [variable.value for variable in variables])


def values_of(variables):
    return [np.asarray(tf.cast(variable.value, tf.float32)) for variable in variables]


def trained_here(make_optimizer):
    """Returns the variables after the same steps in one process."""
    variables, optimizer = new_variables(), make_optimizer()
    optimizer.build(variables)
    for x in batches():
        optimizer.apply(gradients_of(variables, x, optimizer), variables)
    return values_of(variables)


def trained_there(strategy, make_optimizer):
    """Returns the variables on two servers after the steps of one worker."""
    with strategy.scope():
        variables, optimizer = new_variables(), make_optimizer()
        rule = updates.Asynchronous(optimizer, variables)

    step = pushing_step(rule, lambda x: gradients_of(variables, x, optimizer))
    for x in batches():
        assert run(strategy, step, 0, x)
    assert len({variable.value.device for variable in variables}) == 2
    assert int(optimizer.iterations.numpy()) == STEPS
    return values_of(variables)


@pytest.mark.parametrize("name", mostly_long(OPTIMIZERS, "loss_scale_factor and global_clipnorm"))
def test_an_optimizer_of_keras_changes_the_model_as_in_one_process(strategy, name):
    """Also with a constraint, which holds after each update."""
    here = trained_here(OPTIMIZERS[name])
    there = trained_there(strategy, OPTIMIZERS[name])
    assert np.all(there[0] >= 0)
    for value, expected, before in zip(there, here, initial_values(), strict=True):
        assert not np.allclose(expected, before)
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5)


def test_no_operation_under_a_lock_waits_for_another_machine(strategy):
    with strategy.scope():
        variables, optimizer = new_variables(), OPTIMIZERS["Nadam"]()
        rule = updates.Asynchronous(optimizer, variables, lr_staleness_modulation=True)
    step = pushing_step(rule, lambda x: gradients_of(variables, x, optimizer))
    assert waits_under_locks(concrete_function(strategy, step, batches()[0])) == []


def test_gradients_of_several_precisions_are_clipped_by_one_norm(strategy):
    with strategy.scope():
        variables = [keras.Variable(np.zeros(4), dtype=dtype) for dtype in ("float32", "float16", "bfloat16")]
        rule = updates.Asynchronous(optimizers.SGD(1.0, global_clipnorm=1.0), variables)
    # Nine ones (four, four and one) have the norm 3; in float16 the squares of the second gradient would overflow.
    gradients = [tf.constant([1.0, 1, 1, 1]), tf.ones(4, tf.float16), tf.constant([0, 0, 0, 1.0], tf.bfloat16)]
    run(strategy, pushing_step(rule, [300 * gradient for gradient in gradients]))
    for value, gradient in zip(values_of(variables), gradients, strict=True):
        np.testing.assert_allclose(value, -tf.cast(gradient, tf.float32) / 3, rtol=0.01)


def built_adafactor():
    with tf.init_scope():
        optimizer = optimizers.Adafactor(0.1)
        optimizer.build(new_variables())
    return optimizer


def test_optimizers_and_settings_that_cannot_be_used_are_refused(strategy):
    outside = optimizers.SGD(0.1)
    # Older versions of Keras have none.
    several = [optimizers.MultiOptimizer] if hasattr(optimizers, "MultiOptimizer") else []
    for make_optimizer, options, error, message in (
        (lambda: optimizers.SGD(0.1, gradient_accumulation_steps=2), {}, ValueError, r"Synchronous\(grads_to_wait"),
        (lambda: optimizers.LossScaleOptimizer(optimizers.SGD(0.1)), {}, ValueError, "Give its inner optimizer"),
        *(
            (lambda kind=kind: kind(optimizers.SGD(0.1)), {}, ValueError, "one rule for each of its")
            for kind in several
        ),
        (built_adafactor, {}, ValueError, "Give the rule an optimizer that is not built yet"),
        (lambda: outside, {}, ValueError, r"Create it inside strategy.scope\(\)"),
        (lambda: optimizers.SGD(0.1), {"learning_rate": 0.1}, ValueError, "a Keras optimizer has its own"),
        (lambda: optimizers.SGD(0.1), {"allow_duplicate_indices": True}, ValueError, "goes with an update function"),
        (lambda: descend, {}, TypeError, "needs learning_rate="),
        (lambda: "sgd", {"learning_rate": 0.1}, TypeError, "must be a Keras 3 optimizer or a function"),
    ):
        with strategy.scope():
            variables, optimizer = new_variables(), make_optimizer()
            with pytest.raises(error, match=message):
                gradient_optimizer(optimizer, variables, options.pop("learning_rate", None), **options)


IDS = np.array([1, 7, 1, 6])
TOUCHED, OTHERS = [1, 6, 7], [0, 2, 3, 4, 5]
TABLE = np.random.default_rng(0).normal(size=(8, 2)).astype(np.float32)
KERNEL = np.random.default_rng(1).normal(size=(5, 2)).astype(np.float32)

# The number of parts, the rule, and whether its table is among its embeddings.
CASES = {
    "rows, synchronous": (1, partial(updates.Synchronous, grads_to_wait=1), False),
    "parts, asynchronous": (3, updates.Asynchronous, True),
    "parts, model average": (3, updates.ModelAverage, True),
}


def new():
    """Returns a table, a kernel, a scale, and an optimizer that does not decay the kernel."""
    variables = [keras.Variable(TABLE), keras.Variable(KERNEL), keras.Variable(2.0)]
    optimizer = keras.optimizers.AdamW(0.05, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_list=variables[1:])
    return variables, optimizer


def gradients(variables):
    table, kernel, scale = (each.value for each in variables)
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.matmul(tf.tanh(tf.gather(table, IDS)), kernel, transpose_b=True) ** 2) * scale
    found = tape.gradient(loss, [table, kernel, scale])
    assert isinstance(found[0], tf.IndexedSlices)
    return found


@pytest.mark.parametrize("name", mostly_long(CASES, "rows, synchronous", "parts, asynchronous"))
def test_pushed_rows_and_parts_change_as_in_one_process_with_dense_gradients(strategy, name):
    parts, kind, is_embedding = CASES[name]
    with strategy.scope(), partitioned(parts):
        variables, optimizer = new()
        rule = kind(optimizer, variables, **({"embeddings": variables[:1]} if is_embedding else {}))
    assert [len(getattr(each.value, "parts", [each])) for each in variables[:2]] == [parts] * 2
    step = pushing_step(rule, lambda: gradients(variables))
    here, own_optimizer = new()
    for _ in range(STEPS):
        assert run(strategy, step, 0)
        own_optimizer.apply([tf.convert_to_tensor(each) for each in gradients(here)], here)
    if not isinstance(rule, updates.ModelAverage):
        # The kernel of that rule is on the workers.
        np.testing.assert_allclose(np.asarray(variables[0])[TOUCHED], np.asarray(here[0])[TOUCHED], rtol=1e-5)
        np.testing.assert_allclose(variables[1], here[1], rtol=1e-5)
        np.testing.assert_allclose(variables[2], here[2], rtol=1e-5)
    np.testing.assert_array_equal(np.asarray(variables[0])[OTHERS], TABLE[OTHERS])
    assert not np.any(np.isclose(np.asarray(variables[0])[TOUCHED], TABLE[TOUCHED]))
    assert int(optimizer.iterations) == STEPS


def test_the_gradient_of_a_sharded_variable_is_clipped_as_a_whole(strategy):
    repeated = tf.IndexedSlices(tf.constant([[1.0], [4.0], [2.0]]), tf.constant([0, 3, 0]), tf.constant([4, 1]))
    for gradient, options, step_length in (
        (tf.fill([4, 1], 8.0), {"loss_scale_factor": 8.0}, [[0.5], [0.5], [0.5], [0.5]]),
        (repeated, {}, [[0.6], [0.0], [0.0], [0.8]]),
    ):
        with strategy.scope(), partitioned(2):
            table, scalar = tf.Variable(tf.zeros([4, 1])), tf.Variable(0.0)
            rule = updates.Asynchronous(keras.optimizers.SGD(1.0, clipnorm=1.0, **options), [table, scalar])
        assert len(table.parts) == 2
        assert run(strategy, pushing_step(rule, [gradient, tf.constant(80.0)]))
        np.testing.assert_allclose(-table.numpy(), step_length, rtol=1e-5)
        # By its own norm.
        assert scalar.numpy() == -1.0


def test_what_concerns_all_rows_is_refused(strategy):
    with strategy.scope(), partitioned(3):
        table = keras.Variable(TABLE)
        kernel = tf.Variable(KERNEL, constraint=keras.constraints.MaxNorm(1.0))
        with pytest.raises(ValueError, match="Lamb updates whole variables"):
            updates.Asynchronous(keras.optimizers.Lamb(), [table])
        with pytest.raises(ValueError, match="has a constraint"):
            updates.Asynchronous(keras.optimizers.Adam(), [table, kernel])
