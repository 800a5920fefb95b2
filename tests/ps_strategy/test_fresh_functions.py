"""Which functions are traced anew."""

import tensorflow as tf

from coordinator.ps_strategy.fresh_functions import FreshFunctions


def test_a_function_is_itself_until_all_begin_anew_and_one_other_from_then_on() -> None:
    traces: list[int] = []

    @tf.function
    def function(number: int) -> tf.Tensor:
        traces.append(number)
        return tf.constant(number)

    functions = FreshFunctions()
    assert functions.of(function) is function
    function(1)
    functions.begin_anew()
    fresh = functions.of(function)
    assert fresh is not function
    assert functions.of(function) is fresh
    fresh(1)
    fresh(1)
    assert traces == [1, 1]
    functions.begin_anew()
    assert functions.of(function) not in (function, fresh)


def test_a_function_that_is_traced_only_after_all_began_anew_is_itself() -> None:
    function = tf.function(lambda: tf.constant(1))
    functions = FreshFunctions()
    functions.begin_anew()
    assert functions.of(function) is function
    functions.begin_anew()
    assert functions.of(function) is not function
