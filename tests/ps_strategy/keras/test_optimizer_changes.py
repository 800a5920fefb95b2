"""Tests of the operations by which Keras 3's optimizers change variables: exact additions, or assignments.

It checks the tables of docs/keras/exactness.md with the graphs of `optimizer.apply` on shared variables: those of Keras
itself, which `Options(sparse_updates="dense")` leaves as they are, and those on parameter servers.
"""

import keras
import numpy as np
import pytest
import tensorflow as tf

from coordinator.ps_strategy.tensorflow_internals.shared_variable import make_shared
from tests.ps_strategy.keras.test_optimizers import CHANGE_WHOLE_VARIABLES, DEFAULT, DENSE_ONLY, OPTIMIZERS
from tests.ps_strategy.tensorflow_internals.private_names import function_in

SHAPE = (7, 2)
ROWS_ASSIGNED = "ResourceScatterNdUpdate"
ROWS_ADDED = {"ResourceScatterNdAdd", "ResourceScatterNdSub"}
ADDED = {"AssignAddVariableOp", "AssignSubVariableOp"}
ASSIGNED = "AssignVariableOp"
CALLS = {"If", "StatelessIf", "While", "StatelessWhile", "PartitionedCall", "StatefulPartitionedCall"}
ROWS_READ = "ResourceGather"
READS = {"ReadVariableOp", ROWS_READ, "VariableShape"}

# Variables that may lose the change of a racing step. All others are changed by additions.
OVERWRITTEN = {
    "SGD with momentum": {"momentum"},
    "SGD, Nesterov's": {"momentum"},
    "Adadelta": {"accumulated_grad", "accumulated_delta_var"},
    "Adam, AMSGrad": {"velocity_hat"},
    "Adamax": {"norm"},
    "RMSprop": {"velocity"},
    "RMSprop, centered, with momentum": {"velocity", "momentum", "average_gradient"},
    "Ftrl": {"weights"},
    # The product of its momenta.
    "Nadam": {"variable"},
    "Lion": {"momentum"},
    # Keras names its averages of rows and of columns like the weights.
    "Adafactor": {"table", "velocity"},
    "ScheduleFreeAdamW": {"weights"},
    "use_ema": {"weights", "average"},
    "gradient_accumulation_steps": {"gradient_accumulator"},
    "LossScaleOptimizer": {"step_counter", "dynamic_scale"},
}
# Not changed in the order of rows: scalars, and averages of whole variables.
NO_ROWS = {"iteration", "learning_rate", "step_counter", "dynamic_scale", "variable", "average"}


def new_shared(next_creator, **options):
    variable = next_creator(**options)
    make_shared(variable)
    return variable


def changes_by_variable(name, is_sparse, scope=None, reads=READS):
    """Returns the types of the operations that change each variable in a step; variables are created in `scope`."""
    with scope or tf.variable_creator_scope(new_shared):
        weights = keras.Variable(np.ones(SHAPE, np.float32), name="table")
        optimizer = OPTIMIZERS[name]()
        optimizer.build([weights])

    @tf.function(input_signature=[tf.TensorSpec([3], tf.int32)])
    def step(rows):
        gradient = tf.IndexedSlices(tf.ones([3, 2]), rows, tf.constant(SHAPE)) if is_sparse else tf.ones(SHAPE)
        optimizer.apply([gradient], [weights])

    graph = step.get_concrete_function().graph
    found = {"weights": changes_in(graph, weights, reads)}
    for variable in optimizer.variables:
        slot = variable.path.rsplit("/", 1)[-1].removeprefix("table_")
        slot = "variable" if slot.startswith("variable") else slot
        found[slot] = found.get(slot, set()) | changes_in(graph, variable, reads)
    return found


def changes_in(graph, variable, reads):
    handle = variable.value.handle
    inside = next((inside for outside, inside in graph.captures if outside is handle), None)
    found = set() if inside is None else {each.type for each in inside.consumers()} - reads - CALLS
    for operation in graph.get_operations():
        for attribute in operation.node_def.attr.values():
            if attribute.func.name:
                found |= changes_in(function_in(graph, attribute.func.name).graph, variable, reads)
    return found


def each_optimizer(default, names):
    """Runs a test with each of these optimizers: all but the default ones in the long suite."""
    long = pytest.mark.long
    return pytest.mark.parametrize(
        "name", [pytest.param(name, marks=() if name in default else long) for name in sorted(names)]
    )


@each_optimizer(DEFAULT, OPTIMIZERS)
def test_sparse_gradients_are_applied_by_additions_with_known_exceptions(name):
    dense = changes_by_variable(name, is_sparse=False)
    assert {each for each, types in dense.items() if ASSIGNED in types} == OVERWRITTEN.get(name, set())
    assert set.union(*dense.values()) <= {*ADDED, ASSIGNED}
    if name in DENSE_ONLY:
        with pytest.raises(TypeError, match="IndexedSlices"):
            changes_by_variable(name, is_sparse=True)
        return
    found = changes_by_variable(name, is_sparse=True)
    assert {each for each, types in found.items() if ASSIGNED in types} == OVERWRITTEN.get(name, set())
    assert set.union(*found.values()) <= {*ADDED, *ROWS_ADDED, ASSIGNED}


@each_optimizer({"Adam, AMSGrad", "Ftrl"}, OPTIMIZERS.keys() - DENSE_ONLY - CHANGE_WHOLE_VARIABLES)
def test_on_servers_sparse_gradients_only_read_and_change_rows(strategy, name):
    found = changes_by_variable(name, is_sparse=True, scope=strategy.scope(), reads=set())
    by_rows = {slot: types for slot, types in found.items() if slot not in NO_ROWS}
    if name != "use_ema":
        assert set.union(*by_rows.values()) <= {*ROWS_ADDED, ROWS_ASSIGNED, ROWS_READ}
    overwritten = {slot for slot, types in by_rows.items() if ROWS_ASSIGNED in types}
    assert overwritten == {each for each in OVERWRITTEN.get(name, set()) - NO_ROWS if name != "use_ema"}
