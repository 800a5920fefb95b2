"""Tests that copies of a function's graph do the same as calls of it, read variables once, and draw other numbers."""

import functools

import numpy as np
import pytest
import tensorflow as tf

from coordinator.ps_strategy.fusing.graph_copies import packed_function
from coordinator.ps_strategy.fusing.repeated_function import RepeatedFunction, disable_fusing, may_be_fused
from tests.ps_strategy.tensorflow_internals.private_names import call_flat


def run(fn, *steps):
    """Runs a `tf.function` with the arguments of each step in one call, and returns a list for each step."""
    concrete = fn.get_concrete_function(*[tf.TensorSpec.from_tensor(tf.constant(value)) for value in steps[0]])
    repeated = RepeatedFunction(concrete, len(steps), [False] * len(steps[0]))
    inputs = [tf.stack(values) for values in zip(*steps, strict=True)]
    outputs = repeated.call_on(inputs, concrete.captured_inputs, tf.constant(True), call_flat)
    return [list(step) for step in zip(*outputs, strict=True)]


def test_functions_branches_and_loops_are_copied_as_well():
    variable = tf.Variable(0)

    @tf.function
    def twice(x):
        variable.assign_add(1)
        return 2 * x

    @tf.function
    def fn(x):
        y = twice(x)
        if x > 1:
            y += 100
        while y < 40:
            y = twice(y)
        return tf.map_fn(lambda z: z + y, tf.range(2))

    found = run(fn, [1], [2], [3])
    assert [list(each) for (each,) in found] == [[64, 65], [104, 105], [106, 107]]
    assert variable.numpy() == 8


def reads(concrete):
    """Returns how many reads of variables a function has itself, and how many the functions have that it calls."""
    graph = concrete.graph.as_graph_def()
    inner = [node for function in graph.library.function for node in function.node_def]
    return tuple(sum(node.op == "ReadVariableOp" for node in nodes) for nodes in (graph.node, inner))


def hoisted(fn, *args):
    """Runs a function as it is and with hoisted reads, on equal variables, and returns the latter function.

    Results and variables must be equal.
    """
    concrete = fn.get_concrete_function(*args)
    copy = packed_function(concrete) or concrete
    variables = concrete.variables
    before = [variable.numpy() for variable in variables]
    outcomes = []
    for each in (concrete, copy):
        for variable, value in zip(variables, before, strict=True):
            variable.assign(value)
        go = [] if each is concrete else [tf.constant(True)]
        found = call_flat(each, [*args, *concrete.captured_inputs, *go])
        outcomes.append([*(value.numpy() for value in tf.nest.flatten(found)), *(each.numpy() for each in variables)])
    for expected, result in zip(*outcomes, strict=True):
        np.testing.assert_array_equal(expected, result)
    return copy


def test_a_loop_a_branch_a_map_and_a_function_share_one_read():
    weights = tf.Variable([[1.0, 2.0], [3.0, 4.0]])

    @tf.function
    def function(x):
        return x @ weights

    @tf.function
    def step(x):
        for _ in tf.range(3):
            if tf.reduce_sum(x) > 0:
                x = function(x) / 10
        x = tf.cond(x[0, 0] > 0, lambda: x + weights, lambda: x)
        return tf.map_fn(lambda row: row * weights[0], x) + weights

    assert reads(hoisted(step, tf.ones([2, 2]))) == (1, 0)


def test_a_read_sees_the_changes_before_the_loop_and_none_after_it():
    weight = tf.Variable([2.0])

    @tf.function
    def repeated(x):
        for _ in tf.range(3):
            x = x * weight
        return x

    @tf.function
    def step(x):
        x = repeated(x)
        weight.assign_add([1.0])
        x = repeated(x)
        weight.assign(x / 100)
        return repeated(x), weight + 1.0

    assert reads(hoisted(step, tf.ones([1]))) == (4, 0)


def changed_in_a_function_after_its_loop(weight, _, x):
    @tf.function
    def function(x):
        for _ in tf.range(3):
            x = x * weight
        weight.assign(x)
        return x

    return function(x) + function(x)


def changed_in_the_loop(weight, _, x):
    for _ in tf.range(3):
        x = x * weight
        weight.assign_add([1.0])
    return x


def given_twice(weight, _, x):
    @tf.function
    def change(given):
        given.assign_add([1.0])
        return weight + 1.0

    return x + change(weight)


def rows_looked_up(_, table, x):
    for number in tf.range(3):
        x = x + table.sparse_read(number) + table[0]
    return x


def test_a_variable_that_may_change_meanwhile_is_read_where_it_was():
    weight, table = tf.Variable([2.0]), tf.Variable([[1.0], [2.0], [3.0]])
    for step in (changed_in_a_function_after_its_loop, changed_in_the_loop, given_twice, rows_looked_up):
        function = tf.function(lambda x, step=step: step(weight, table, x))
        assert reads(hoisted(function, tf.ones([1]))) == (0, 1), step.__name__


def test_a_loop_that_waits_for_a_variable_reads_it_in_each_iteration():
    clocks, flag, weights = tf.Variable([5.0, 6.0]), tf.Variable(1), tf.Variable([0.5, 0.25])

    @tf.function
    def waiting(x):
        while tf.reduce_min(clocks) < x:
            x -= 1.0
        go_on = tf.constant(True)
        while go_on:
            x, last = x + 1.0, tf.identity(flag)
            go_on = last < 1
        return x

    @tf.function
    def decided_by_weights(x):
        while tf.reduce_sum(x) > 1.0:
            x = x * weights
        return x

    assert reads(hoisted(waiting, tf.constant(9.0))) == (0, 2)
    assert reads(hoisted(decided_by_weights, tf.constant([9.0, 9.0]))) == (1, 0)


def unfusable():
    disable_fusing()
    return tf.constant(1.0)


def test_disabled_fusing_is_found_in_a_function_and_in_nested_functions():
    inner = tf.function(unfusable)
    inner()

    def in_a_branch(x):
        return tf.cond(x > 0, inner, lambda: tf.constant(0.0))

    def in_a_loop(x):
        return tf.while_loop(lambda i, _: i < 3, lambda i, y: (i + 1, y + in_a_branch(x)), (0, x))[1]

    for function in (lambda _: unfusable(), lambda _: inner(), in_a_branch, in_a_loop, tf.function(in_a_loop)):
        assert not may_be_fused(tf.function(function, autograph=False).get_concrete_function(tf.TensorSpec([])))
    assert may_be_fused(tf.function(lambda x: x + 1).get_concrete_function(tf.TensorSpec([])))


# With its seeds as attributes: of each kind of operation one.
DRAWS = {
    "uniform": lambda seeds: tf.raw_ops.RandomUniform(shape=[2], dtype=tf.float32, **seeds),
    "shuffled": lambda seeds: tf.raw_ops.RandomShuffle(value=tf.range(1000), **seeds)[:4],
    "multinomial": lambda seeds: tf.raw_ops.Multinomial(logits=tf.zeros([1, 1000]), num_samples=4, **seeds),
    "candidates": lambda seeds: (
        tf.raw_ops.UniformCandidateSampler(
            true_classes=[[1]], num_true=1, num_sampled=4, unique=True, range_max=1000, **seeds
        ).sampled_candidates
    ),
}


def called(draw):
    return tf.function(draw, autograph=False)()


def in_a_branch(draw):
    yes = tf.timestamp() > 0.0
    zeros = functools.partial(tf.nest.map_structure, tf.zeros_like)
    return tf.cond(yes, draw, lambda: zeros(draw()))


def in_a_loop(draw):
    first = draw()
    zeros = tf.nest.map_structure(tf.zeros_like, first)
    return tf.while_loop(lambda i, _: i < 2, lambda i, _: (i + 1, draw()), (0, zeros))[1]


def in_a_branch_of_a_loop_in_a_called_one(draw):
    return called(lambda: in_a_loop(lambda: in_a_branch(draw)))


def drawn_in_copies(concrete, count):
    """Returns what each of `count` copies draws, by operation."""
    columns = RepeatedFunction(concrete, count, []).call_on([], concrete.captured_inputs, tf.constant(True), call_flat)
    keys = sorted(concrete.structured_outputs)
    return {key: [np.asarray(value).tobytes() for value in column] for key, column in zip(keys, columns, strict=True)}


@pytest.mark.parametrize("depth", [called, in_a_branch_of_a_loop_in_a_called_one], ids=lambda depth: depth.__name__)
def test_copies_draw_different_numbers_from_every_operation(depth):
    def draw():
        return {name: draw({"seed": 1, "seed2": 7}) for name, draw in DRAWS.items()}

    concrete = tf.function(functools.partial(depth, draw), autograph=False).get_concrete_function()
    drawn = {name: [value.numpy().tobytes()] for name, value in concrete().items()}
    # Copies of other counts of steps, and the function alone, draw others too.
    for count in (2, 4):
        for name, values in drawn_in_copies(concrete, count).items():
            drawn[name] += values
    for name, values in drawn.items():
        assert len(set(values)) == len(values) == 7, name


def test_a_packed_function_with_hoisted_reads_draws_other_numbers_in_loops():
    scale = tf.Variable(tf.ones([2]))

    @tf.function
    def step():
        total = tf.zeros([2])
        for _ in tf.range(3):
            total += scale * tf.random.uniform([2], seed=7)
        return {"total": total}

    concrete = step.get_concrete_function()
    packed = packed_function(concrete)
    assert packed is not None
    drawn = drawn_in_copies(concrete, 4)["total"]
    for each, go in ((packed, [tf.constant(True)]), (packed, [tf.constant(True)]), (concrete, [])):
        [found] = tf.nest.flatten(call_flat(each, [*concrete.captured_inputs, *go]))
        drawn.append(found.numpy().tobytes())
    assert len(set(drawn)) == len(drawn)
