"""Tests that optimizers applied server by server change a model as in one process."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from coordinator.updates import Asynchronous
from coordinator.updates.gradient_optimizer import gradient_optimizer
from tests.ps_strategy.every_worker import concrete_function
from tests.updates.descent import mostly_long
from tests.updates.state.locked_sections import waits_under_locks

TIMEOUT = 120.0
SHAPES = [(4, 3), (3,), (3, 2), (2,)]
STEPS = 3


def schedule():
    return keras.optimizers.schedules.ExponentialDecay(0.1, decay_steps=2, decay_rate=0.5)


optimizers = keras.optimizers
OPTIMIZERS = {
    "SGD": lambda: optimizers.SGD(0.1),
    "SGD with momentum": lambda: optimizers.SGD(0.1, momentum=0.9),
    "SGD, Nesterov's": lambda: optimizers.SGD(0.1, momentum=0.9, nesterov=True),
    "SGD with a schedule": lambda: optimizers.SGD(schedule(), momentum=0.5),
    "SGD with a function": lambda: optimizers.SGD(lambda: 0.05),
    "Adagrad": lambda: optimizers.Adagrad(0.1),
    "Adadelta": lambda: optimizers.Adadelta(1.0),
    "Adam": lambda: optimizers.Adam(0.05),
    "Adam with a schedule": lambda: optimizers.Adam(schedule()),
    "Adam, AMSGrad": lambda: optimizers.Adam(0.05, amsgrad=True),
    "AdamW": lambda: optimizers.AdamW(0.05, weight_decay=0.1),
    "Adamax": lambda: optimizers.Adamax(0.05),
    "RMSprop": lambda: optimizers.RMSprop(0.05, centered=True, momentum=0.5),
    "Ftrl": lambda: optimizers.Ftrl(0.1, l1_regularization_strength=0.01),
    "Nadam": lambda: optimizers.Nadam(0.05),
    "Lion": lambda: optimizers.Lion(0.01),
    "Adafactor": lambda: optimizers.Adafactor(0.05),
    "Lamb": lambda: optimizers.Lamb(0.05),
    "Muon": lambda: optimizers.Muon(0.05, weight_decay=0.1),
    "ScheduleFreeAdamW": lambda: optimizers.ScheduleFreeAdamW(0.05, warmup_steps=3),
    "clipnorm": lambda: optimizers.SGD(0.1, clipnorm=0.3),
    "clipvalue": lambda: optimizers.SGD(0.1, clipvalue=0.1),
    "global_clipnorm": lambda: optimizers.SGD(0.1, global_clipnorm=0.3),
    "averages": lambda: optimizers.Adam(0.05, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2),
    "loss_scale_factor": lambda: optimizers.SGD(0.1, loss_scale_factor=8.0),
    "loss_scale_factor and global_clipnorm": lambda: optimizers.SGD(0.1, loss_scale_factor=8.0, global_clipnorm=0.3),
}


def initial_values(shapes=SHAPES):
    random = np.random.default_rng(0)
    return [random.normal(size=shape).astype(np.float32) for shape in shapes]


def new_variables(dtype="float32", constraint=None):
    variables = [keras.Variable(value, dtype=dtype) for value in initial_values()]
    for variable in variables:
        variable.constraint = constraint
    return variables


def batches():
    random = np.random.default_rng(1)
    return [tf.constant(random.normal(size=(8, 4)), tf.float32) for _ in range(STEPS)]


def gradients_of(variables, x, optimizer):
    """Returns the gradients of a small network's loss."""
    with tf.GradientTape() as tape:
        kernel, bias, kernel2, bias2 = (tf.convert_to_tensor(variable) for variable in variables)
        y = tf.tanh(tf.cast(x, kernel.dtype) @ kernel + bias) @ kernel2 + bias2
        loss = optimizer.scale_loss(tf.reduce_mean(tf.square(y - 1.0)))
    return tape.gradient(loss, [variable.value for variable in variables])


def values_of(variables):
    return [np.asarray(tf.cast(variable.value, tf.float32)) for variable in variables]


def trained_here(make_optimizer, **options):
    """Returns the variables after the same steps in one process."""
    variables, optimizer = new_variables(**options), make_optimizer()
    optimizer.build(variables)
    for x in batches():
        optimizer.apply(gradients_of(variables, x, optimizer), variables)
    return values_of(variables)


def trained_there(strategy, make_optimizer, **options):
    """Returns the variables on two servers after the steps of one worker."""
    with strategy.scope():
        variables, optimizer = new_variables(**options), make_optimizer()
        rule = Asynchronous(optimizer, variables)

    @tf.function
    def step(x):
        with rule.pull() as version:
            gradients = gradients_of(variables, x, optimizer)
        return rule.push(gradients, version)

    for x in batches():
        assert strategy.schedule(step, args=(x,)).result(TIMEOUT)
    assert len({variable.value.device for variable in variables}) == 2
    assert int(optimizer.iterations.numpy()) == STEPS
    return values_of(variables)


@pytest.mark.parametrize("name", mostly_long(OPTIMIZERS, "global_clipnorm"))
def test_an_optimizer_of_keras_changes_the_model_as_in_one_process(strategy, name):
    here = trained_here(OPTIMIZERS[name])
    there = trained_there(strategy, OPTIMIZERS[name])
    for value, expected, before in zip(there, here, initial_values(), strict=True):
        assert not np.allclose(expected, before)
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", mostly_long(OPTIMIZERS, "Nadam"))
def test_no_operation_under_a_lock_waits_for_another_machine(strategy, name):
    with strategy.scope():
        variables, optimizer = new_variables(constraint=keras.constraints.NonNeg()), OPTIMIZERS[name]()
        rule = Asynchronous(optimizer, variables, lr_staleness_modulation=True)

    @tf.function
    def step(x):
        with rule.pull() as version:
            gradients = gradients_of(variables, x, optimizer)
        return rule.push(gradients, version)

    assert waits_under_locks(concrete_function(strategy, step, batches()[0])) == []


def pushed_once(strategy, rule, *given):
    """Pushes the given gradients, which may be None."""
    push_again(strategy, push_of(rule, *given))


def push_of(rule, *given):
    @tf.function
    def step():
        with rule.pull() as version:
            pass
        return rule.push(list(given), version)

    return step


def push_again(strategy, push):
    assert strategy.schedule(push).result(TIMEOUT)


def test_variables_without_gradient_are_averaged_too(strategy):
    def averaging():
        return optimizers.SGD(0.5, use_ema=True, ema_momentum=0.5, ema_overwrite_frequency=2)

    here, optimizer = new_variables(), averaging()
    optimizer.build(here)
    gradients = [tf.ones(SHAPES[0]), tf.ones(SHAPES[1]), None, None]
    with strategy.scope():
        there = new_variables()
        rule = Asynchronous(averaging(), there)
    push = push_of(rule, *gradients)
    for _ in range(3):
        with pytest.warns(UserWarning, match="Gradients do not exist"):
            optimizer.apply(gradients, here)
        push_again(strategy, push)
    for value, expected in zip(values_of(there), values_of(here), strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5)


def test_a_constraint_holds_after_each_update(strategy):
    constraint = keras.constraints.NonNeg()
    here = trained_here(OPTIMIZERS["Adam"], constraint=constraint)
    there = trained_there(strategy, OPTIMIZERS["Adam"], constraint=constraint)
    for value, expected in zip(there, here, strict=True):
        assert np.all(value >= 0)
        np.testing.assert_allclose(value, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", mostly_long(["float16", "bfloat16"], "float16"))
@pytest.mark.parametrize("name", mostly_long(["SGD with momentum", "Adagrad", "global_clipnorm"], "Adagrad"))
def test_variables_of_low_precision_train_as_in_one_process(strategy, name, dtype):
    # Clipped steps of a small learning rate would change less than the dtypes round.
    make_optimizer = (
        (lambda: optimizers.SGD(0.3, global_clipnorm=0.3)) if name == "global_clipnorm" else OPTIMIZERS[name]
    )
    here = trained_here(make_optimizer, dtype=dtype)
    there = trained_there(strategy, make_optimizer, dtype=dtype)
    for value, expected, before in zip(there, here, initial_values(), strict=True):
        assert not np.allclose(expected, before, atol=0.02)
        np.testing.assert_allclose(value, expected, rtol=0.05, atol=0.02)


def test_gradients_of_several_precisions_are_clipped_by_one_norm(strategy):
    with strategy.scope():
        variables = [keras.Variable(np.zeros(4), dtype=dtype) for dtype in ("float32", "float16", "bfloat16")]
        rule = Asynchronous(optimizers.SGD(1.0, global_clipnorm=1.0), variables)
    # Nine ones (four, four and one) have the norm 3; in float16 the squares of the second gradient would overflow.
    gradients = [tf.constant([1.0, 1, 1, 1]), tf.ones(4, tf.float16), tf.constant([0, 0, 0, 1.0], tf.bfloat16)]
    pushed_once(strategy, rule, *(300 * gradient for gradient in gradients))
    for value, gradient in zip(values_of(variables), gradients, strict=True):
        np.testing.assert_allclose(value, -tf.cast(gradient, tf.float32) / 3, rtol=0.01)


def refused(strategy, make_optimizer, **options):
    with strategy.scope():
        variables = new_variables()
        return gradient_optimizer(make_optimizer(variables), variables, options.pop("learning_rate", None), **options)


def built_adafactor(variables):
    optimizer = optimizers.Adafactor(0.1)
    optimizer.build(variables)
    return optimizer


REFUSED = [
    (lambda _: optimizers.SGD(0.1, gradient_accumulation_steps=2), "Synchronous\\(grads_to_wait"),
    (lambda _: optimizers.LossScaleOptimizer(optimizers.SGD(0.1)), "Give its inner optimizer"),
    (lambda _: optimizers.MultiOptimizer(optimizers.SGD(0.1)), "Create one rule for each of its optimizers"),
    (built_adafactor, "Give the rule an optimizer that is not built yet"),
]


@pytest.mark.parametrize(("make_optimizer", "message"), REFUSED)
def test_an_optimizer_that_cannot_work_server_by_server_is_refused(strategy, make_optimizer, message):
    with pytest.raises(ValueError, match=message):
        refused(strategy, make_optimizer)


def test_an_optimizer_created_outside_of_the_scope_is_refused(strategy):
    optimizer = optimizers.SGD(0.1)
    with pytest.raises(ValueError, match=r"Create it inside strategy.scope\(\)"):
        refused(strategy, lambda _: optimizer)


def test_a_learning_rate_is_accepted_only_with_an_update_function(strategy):
    with pytest.raises(ValueError, match="a Keras optimizer has its own"):
        refused(strategy, lambda _: optimizers.SGD(0.1), learning_rate=0.1)
    with pytest.raises(TypeError, match="needs learning_rate="):
        refused(strategy, lambda _: lambda variable, gradient, rate: None)


def test_keras_optimizers_get_no_repeated_indices(strategy):
    with pytest.raises(ValueError, match="allow_duplicate_indices goes with an update function"):
        refused(strategy, lambda _: optimizers.SGD(0.1), allow_duplicate_indices=True)


@pytest.mark.parametrize("optimizer", ["sgd", None, optimizers.SGD])
def test_other_objects_than_optimizers_are_refused(strategy, optimizer):
    with pytest.raises(TypeError, match="must be a Keras 3 optimizer or a function"):
        refused(strategy, lambda _: optimizer, learning_rate=0.1)


def test_an_optimizer_of_keras_2_is_refused(strategy):
    tf_keras = pytest.importorskip("tf_keras")
    with pytest.raises(TypeError, match="For an optimizer of tf_keras, give a function that calls it"):
        refused(strategy, lambda _: tf_keras.optimizers.SGD(0.1))


def test_the_text_of_an_optimizer_is_readable(strategy):
    assert repr(refused(strategy, lambda _: optimizers.Adam())) == "<KerasOptimizer Adam>"
    assert repr(refused(strategy, lambda _: descend, learning_rate=0.1)) == "<FunctionOptimizer 'descend'>"


def descend(variable, gradient, rate):
    variable.assign_sub(tf.cast(rate, gradient.dtype) * gradient)


@pytest.mark.parametrize("as_variable", [False, True])
def test_a_function_gets_each_variable_its_gradient_and_the_learning_rate(strategy, as_variable):
    with strategy.scope():
        variables = [tf.Variable(value, dtype=dtype) for value, dtype in ((1.0, tf.float32), (2.0, tf.bfloat16))]
        rate = tf.Variable(0.5) if as_variable else 0.5
        rule = Asynchronous(descend, variables, learning_rate=rate)
    push = push_of(rule, tf.constant(1.0), tf.constant(2.0, tf.bfloat16))
    push_again(strategy, push)
    assert [float(variable.numpy()) for variable in variables] == [0.5, 1.0]
    if as_variable:
        rate.assign(0.25)
        push_again(strategy, push)
        assert [float(variable.numpy()) for variable in variables] == [0.25, 0.5]
