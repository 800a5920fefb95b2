"""Tests that TensorFlow's private interfaces for variable handles mean what the library assumes.

The variables are in this process, where handles work as on a server.
"""

import gc

import pytest
import tensorflow as tf

from coordinator.ps_strategy.tensorflow_internals.functions import captures_of
from coordinator.ps_strategy.tensorflow_internals.handles import (
    TracedFunctions,
    new_handle,
    owner_of_handle,
    present_handle,
    replace_handles,
)
from tests.ps_strategy.tensorflow_internals.private_names import handle_data


@pytest.fixture
def replace(recorded_functions):
    def replace(*variables):
        replace_handles([(variable, new_handle(variable)) for variable in variables], recorded_functions)

    return replace


def test_a_variable_keeps_its_identity_when_its_handle_is_replaced(replace):
    for value in (1.0, [[1, 2]], ["text"], True):
        variable = tf.Variable(value, name="named")
        former, reference = variable.handle, variable.ref()
        replace(variable)
        handle = variable.handle
        assert handle is not former
        assert (handle.device, handle_data(handle)) == (former.device, handle_data(former))
        assert not variable.is_initialized()
        assert variable.assign(value).numpy().tolist() == tf.constant(value).numpy().tolist()
        assert (variable.name, variable.ref()) == ("named:0", reference)
        assert owner_of_handle(handle) is variable
        assert present_handle(former) is present_handle(handle) is handle


def test_no_reference_to_the_former_handle_remains(replace):
    variable, other = tf.Variable(1.0), tf.Variable(10.0)

    @tf.function
    def inner(x):
        return tf.cond(x > 0, lambda: variable + other, lambda: variable - other)

    @tf.function
    def outer(x):
        return tf.while_loop(lambda i, _: i < 2, lambda i, total: (i + 1, total + inner(x)), [0, 0.0])[1]

    assert outer(tf.constant(1.0)) == 22.0
    former = variable.handle
    # The oldest objects are excluded from garbage collections in some programs.
    gc.freeze()
    try:
        replace(variable)
    finally:
        gc.unfreeze()
    variable.assign(5.0)
    assert outer(tf.constant(1.0)) == 30.0
    gc.collect()
    assert [holder for holder in gc.get_referrers(former) if not hasattr(holder, "f_code")] == []


def test_captures_keep_their_order_in_a_new_list(replace):
    variables = [tf.Variable(float(value)) for value in range(4)]
    large = tf.range(1000.0)
    concrete = tf.function(lambda: variables[2] - variables[0] * variables[3] + large[7]).get_concrete_function()
    value = concrete().numpy()
    before = captures_of(concrete)
    internal = [id(tensor) for tensor in concrete.graph.internal_captures]
    replace(variables[1])
    assert captures_of(concrete) is before
    replace(variables[0], variables[3])
    assert captures_of(concrete) is not before
    variables[0].assign(0.0)
    variables[3].assign(3.0)
    assert concrete().numpy() == value
    assert [id(tensor) for tensor in concrete.graph.internal_captures] == internal
    assert list(map(id, concrete.captured_inputs)) == list(map(id, concrete.graph.external_captures))


def test_functions_are_recorded_for_as_long_as_they_live_and_in_the_scope_alone(recorded_functions):
    variable = tf.Variable(1.0)
    before = len(recorded_functions.functions()), len(recorded_functions.graphs())
    concrete = tf.function(lambda: variable + 1.0).get_concrete_function()
    assert recorded_functions.functions()[-1] is concrete
    assert recorded_functions.graphs()[-1] is concrete.graph
    del concrete
    gc.collect()
    assert (len(recorded_functions.functions()), len(recorded_functions.graphs())) == before
    with TracedFunctions().recorded() as others:
        pass
    tf.function(lambda: variable + 2.0).get_concrete_function()
    assert others.functions() == []
