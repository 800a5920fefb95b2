"""Tests that each copy of a function draws other random numbers, whatever draws them and however deep it is.

A function that runs alone draws other numbers in each call: the operation goes on with its sequence. In a call of
several steps each step is a copy with operations of its own, which must not all begin the same sequence.
"""

import collections
import functools
import itertools

import keras
import numpy as np
import pytest
import tensorflow as tf

from coordinator.ps_strategy.fusing.graph_copies import packed_function
from coordinator.ps_strategy.fusing.repeated_function import RepeatedFunction
from tests.ps_strategy.fusing.fused_calls import COUNT, STEPS, FusedCalls
from tests.ps_strategy.tensorflow_internals.private_names import call_flat

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
    keys = [*concrete.structured_outputs]
    return {key: [np.asarray(value).tobytes() for value in column]
            for key, column in zip(sorted(keys), columns, strict=True)}  # fmt: skip


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


def test_dropout_and_augmentation_of_scheduled_functions_differ_in_each_step(strategy, monkeypatch):
    tf.random.set_seed(5)
    layer = keras.layers.Dropout(0.5, seed=3)
    helper = tf.function(lambda image: tf.image.random_flip_left_right(tf.image.random_brightness(image, 0.5)))

    @tf.function
    def step(number):
        images = tf.map_fn(helper, tf.reshape(tf.range(32.0), [2, 4, 4, 1]))
        mask = tf.cond(number >= 0, lambda: tf.nn.dropout(tf.ones([32]), 0.5), lambda: tf.zeros([32]))
        return images, mask, layer(tf.ones([32]), training=True)

    calls = FusedCalls(strategy, monkeypatch)
    # Each worker has sequences of its own, with the same seeds: of one worker all differ.
    results = calls.run(step, [(tf.constant(number),) for number in range(COUNT)])
    assert max(calls.sizes) == STEPS
    by_worker = collections.defaultdict(list)
    for future in results:
        by_worker[future.worker].append(future.result())
    for (images, mask, dropped), (others, other_mask, other_dropped) in itertools.chain.from_iterable(
        itertools.combinations(found, 2) for found in by_worker.values()
    ):
        assert (images != others).any()
        assert (mask != other_mask).any()
        assert (dropped != other_dropped).any()
