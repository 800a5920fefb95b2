"""Tests of replacing a rule by another one during training."""

import pytest
import tensorflow as tf

import coordinator
from coordinator.updates import Asynchronous, ModelAverage, Synchronous
from tests.deadline import LIMIT
from tests.ps_strategy.every_worker import on_every_worker


def sgd(variable: tf.Variable, gradient: tf.Tensor, learning_rate: tf.Tensor) -> None:
    variable.assign_sub(learning_rate * gradient)


@pytest.fixture
def variables(strategy: coordinator.ParameterServerStrategy) -> list[tf.Variable]:
    with strategy.scope():
        return [tf.Variable(0.0), tf.Variable(0.0)]


def rule_of(strategy: coordinator.ParameterServerStrategy, variables: list[tf.Variable], rate: float) -> Asynchronous:
    with strategy.scope():
        return Asynchronous(sgd, variables, learning_rate=rate)


def step_of(rule: coordinator.updates.UpdateRule) -> tf.types.experimental.PolymorphicFunction:
    @tf.function
    def step() -> tf.Tensor:
        with rule.pull() as version:
            gradients = [tf.constant(-1.0), tf.constant(-1.0)]
        return rule.push(gradients, version)

    return step


def run(strategy: coordinator.ParameterServerStrategy, step: tf.types.experimental.GenericFunction, times: int) -> None:
    for _ in range(times):
        strategy.schedule(step)
    strategy.join()


def test_after_a_switch_steps_use_the_next_rule_and_counters_continue(
    strategy: coordinator.ParameterServerStrategy, variables: list[tf.Variable]
) -> None:
    first, second = rule_of(strategy, variables, 1.0), rule_of(strategy, variables, 10.0)
    step = step_of(first)
    run(strategy, step, 5)
    first.switch_to(second)
    run(strategy, step, 3)
    assert [float(variable) for variable in variables] == [35.0, 35.0]
    assert int(first.version) == int(second.version) == 8
    assert first.statistics() == second.statistics()
    assert first.statistics().updates == 8


def test_no_function_runs_while_a_rule_is_replaced(
    strategy: coordinator.ParameterServerStrategy, variables: list[tf.Variable], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = rule_of(strategy, variables, 1.0), rule_of(strategy, variables, 10.0)
    other = tf.function(lambda: tf.constant(1))
    assert on_every_worker(strategy, other) == [1] * 3
    futures = []
    schedule_internal = strategy._scheduler.schedule_internal  # noqa: SLF001 - the library alone schedules so

    def finish() -> None:
        futures.extend(strategy.schedule(other) for _ in range(8))
        # Workers do so before they take other functions.
        for worker in range(3):
            schedule_internal(worker, lambda context: None, "nothing").result(LIMIT)
        assert not any(future.done() for future in futures)

    monkeypatch.setattr(first, "_finish", finish)
    first.switch_to(second)
    assert [future.result(LIMIT) for future in futures] == [1] * 8


@pytest.mark.long
def test_a_switch_to_asynchronous_loses_no_waiting_gradient(
    strategy: coordinator.ParameterServerStrategy, variables: list[tf.Variable]
) -> None:
    with strategy.scope():
        first = Synchronous(sgd, variables, grads_to_wait=2, learning_rate=1.0)
    second = rule_of(strategy, variables, 10.0)

    @tf.function
    def step() -> tf.Tensor:
        return first.run(lambda: (tf.constant(0.0), [tf.constant(-1.0), tf.constant(-1.0)]))

    run(strategy, step, 5)
    assert (float(variables[0]), first.statistics().updates) == (2.0, 2)
    first.switch_to(second)
    # The fifth gradient waited for another.
    assert (float(variables[0]), first.statistics().updates) == (3.0, 3)
    run(strategy, step, 2)
    assert [float(variable) for variable in variables] == [23.0, 23.0]
    assert first.statistics().updates == 5


def test_functions_scheduled_before_a_switch_use_the_former_rule(
    strategy: coordinator.ParameterServerStrategy, variables: list[tf.Variable]
) -> None:
    first, second = rule_of(strategy, variables, 1.0), rule_of(strategy, variables, 10.0)
    step = step_of(first)
    for _ in range(20):
        strategy.schedule(step)
    first.switch_to(second)
    assert float(variables[0]) == 20.0


@pytest.mark.long
@pytest.mark.parametrize("index", [0, 1])
def test_switch_to_may_be_called_on_any_former_rule(
    strategy: coordinator.ParameterServerStrategy, variables: list[tf.Variable], index: int
) -> None:
    rules = [rule_of(strategy, variables, rate) for rate in (1.0, 10.0, 100.0)]
    steps = [step_of(rule) for rule in rules[:2]]
    run(strategy, steps[0], 1)
    rules[0].switch_to(rules[1])
    run(strategy, steps[0], 1)
    rules[index].switch_to(rules[2])
    for step in steps:
        run(strategy, step, 1)
    assert float(variables[0]) == 211.0
    assert rules[0].statistics().updates == 4


def test_a_concrete_function_keeps_the_rule_that_it_was_traced_with(
    strategy: coordinator.ParameterServerStrategy, variables: list[tf.Variable]
) -> None:
    first, second = rule_of(strategy, variables, 1.0), rule_of(strategy, variables, 10.0)
    step = step_of(first)
    with tf.distribute.ReplicaContext(strategy, 0):
        concrete = step.get_concrete_function()
    first.switch_to(second)
    run(strategy, concrete, 1)
    assert float(variables[0]) == 1.0


def test_the_error_of_a_step_is_raised_and_nothing_is_switched(
    strategy: coordinator.ParameterServerStrategy, variables: list[tf.Variable]
) -> None:
    first, second = rule_of(strategy, variables, 1.0), rule_of(strategy, variables, 10.0)
    step = step_of(first)

    @tf.function
    def fail() -> None:
        tf.debugging.Assert(False, ["no"])

    strategy.schedule(fail)
    with pytest.raises(tf.errors.InvalidArgumentError):
        first.switch_to(second)
    run(strategy, step, 1)
    assert float(variables[0]) == 1.0


def test_only_an_unused_rule_for_the_same_variables_may_follow(
    strategy: coordinator.ParameterServerStrategy, variables: list[tf.Variable]
) -> None:
    first = rule_of(strategy, variables, 1.0)
    for others in (variables[:1], variables[::-1]):
        with pytest.raises(ValueError, match="same variables, in the same order"):
            first.switch_to(rule_of(strategy, others, 1.0))
    with pytest.raises(ValueError, match="not used before"):
        first.switch_to(first)


def test_a_synchronous_warm_up_ends_in_averaging_of_its_model(strategy: coordinator.ParameterServerStrategy) -> None:
    with strategy.scope():
        variable = tf.Variable(0.0)
        rule = Synchronous(sgd, [variable], grads_to_wait=3, learning_rate=1.0)

    @tf.function
    def step(gradient: tf.Tensor) -> tf.Tensor:
        with rule.pull() as version:
            found = variable.read_value()
        rule.push([gradient], version)
        return found

    def round_of_all() -> list[float]:
        arguments = [(tf.constant(worker + 1.0),) for worker in range(3)]
        scheduled = enumerate(arguments)
        return [strategy.schedule(step, args=given, worker=worker).result(120.0) for worker, given in scheduled]

    # As the workers of the original: they reduce their gradients to a mean, then each trains that model.
    assert round_of_all() == [0.0, 0.0, 0.0]
    assert variable.numpy() == -2.0
    with strategy.scope():
        averaged = ModelAverage(sgd, [variable], learning_rate=1.0)
        rule.switch_to(averaged)
    assert round_of_all() == [-2.0, -2.0, -2.0]
    averaged.abort()
    # The mean of -3, -4 and -5.
    assert variable.numpy() == pytest.approx(-4.0)
