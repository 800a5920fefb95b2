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
from tests.ps_strategy.tensorflow_internals.private_names import call_flat, operations_with_seeds

LIMIT = 120.0
BOX = ([5000, 5000, 3], [[[0.0, 0.0, 1.0, 1.0]]])

# Each operation with its seeds as attributes; the results of two calls with the same state are equal.
UNIGRAM = {"true_classes": [[1]], "num_true": 1, "num_sampled": 4, "unique": True, "range_max": 1000}
DRAWS = {
    "RandomUniform": lambda seeds: tf.raw_ops.RandomUniform(shape=[2], dtype=tf.float32, **seeds),
    "RandomShuffle": lambda seeds: tf.raw_ops.RandomShuffle(value=tf.range(1000), **seeds)[:4],
    "Multinomial": lambda seeds: tf.raw_ops.Multinomial(logits=tf.zeros([1, 1000]), num_samples=4, **seeds),
    "RandomUniformInt": lambda seeds: tf.raw_ops.RandomUniformInt(shape=[2], minval=0, maxval=2**30, **seeds),
    "RandomStandardNormal": lambda seeds: tf.raw_ops.RandomStandardNormal(shape=[2], dtype=tf.float32, **seeds),
    "TruncatedNormal": lambda seeds: tf.raw_ops.TruncatedNormal(shape=[2], dtype=tf.float32, **seeds),
    "ParameterizedTruncatedNormal": lambda seeds: tf.raw_ops.ParameterizedTruncatedNormal(
        shape=[2], means=0.0, stdevs=1.0, minvals=-2.0, maxvals=2.0, **seeds
    ),
    "RandomGamma": lambda seeds: tf.raw_ops.RandomGamma(shape=[2], alpha=3.0, **seeds),
    "RandomPoissonV2": lambda seeds: tf.raw_ops.RandomPoissonV2(shape=[2], rate=1e6, **seeds),
    "SampleDistortedBoundingBox": lambda seeds: (
        tf.raw_ops.SampleDistortedBoundingBox(image_size=BOX[0], bounding_boxes=BOX[1], **seeds).begin
    ),
    "SampleDistortedBoundingBoxV2": lambda seeds: (
        tf.raw_ops.SampleDistortedBoundingBoxV2(
            image_size=BOX[0], bounding_boxes=BOX[1], min_object_covered=0.01, **seeds
        ).begin
    ),
    "LogUniformCandidateSampler": lambda seeds: (
        tf.raw_ops.LogUniformCandidateSampler(
            **UNIGRAM | {"num_sampled": 8, "range_max": 10**6}, **seeds
        ).sampled_candidates
    ),
    "FixedUnigramCandidateSampler": lambda seeds: (
        tf.raw_ops.FixedUnigramCandidateSampler(**UNIGRAM, unigrams=[1.0] * 1000, **seeds).sampled_candidates
    ),
    **{
        name: lambda seeds, name=name: getattr(tf.raw_ops, name)(**UNIGRAM, **seeds).sampled_candidates
        for name in [f"{kind}CandidateSampler" for kind in ("Uniform", "LearnedUnigram", "ThreadUnsafeUnigram")]
    },
}
# How deep a copy looks does not depend on the operation.
FEW = dict(itertools.islice(DRAWS.items(), 3))
# They draw the same in each call, are queues or readers of files, or need a GPU; or TensorFlow has removed them.
OTHERS = {
    *("AllCandidateSampler", "ComputeAccidentalHits", "FractionalAvgPool", "FractionalMaxPool"),
    *("RandomCrop", "RandomPoisson", "RandomShuffleQueue", "RandomShuffleQueueV2", "RecordInput", "SnapshotDataset"),
    *("CudnnRNN", "CudnnRNNV2", "CudnnRNNV3", "CudnnRNNBackprop", "CudnnRNNBackpropV2", "CudnnRNNBackpropV3"),
    *("CudnnRNNCanonicalToParams", "CudnnRNNCanonicalToParamsV2", "CudnnRNNParamsSize"),
    *("CudnnRNNParamsToCanonical", "CudnnRNNParamsToCanonicalV2"),
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


DEPTHS = [
    in_a_branch,
    in_a_branch_of_a_loop_in_a_called_one,
]


def drawing(depth, seeds, draws):
    """Returns a function that draws from each operation, at a depth."""

    def draw():
        return {name: draw(seeds) for name, draw in draws.items()}

    return tf.function(functools.partial(depth, draw), autograph=False)


def drawn_in_copies(concrete, count):
    """Returns what each of `count` copies draws, by operation."""
    columns = RepeatedFunction(concrete, count, []).call_on([], concrete.captured_inputs, tf.constant(True), call_flat)
    keys = [*concrete.structured_outputs]
    return {key: [np.asarray(value).tobytes() for value in column]
            for key, column in zip(sorted(keys), columns, strict=True)}  # fmt: skip


def repeated(drawn):
    """Returns the operations that have drawn the same more than once, with how often."""
    return {name: len(values) - len(set(values)) for name, values in drawn.items() if len(set(values)) < len(values)}


def test_every_operation_with_a_seed_is_drawn_from():
    assert operations_with_seeds() <= DRAWS.keys() | OTHERS
    assert DRAWS.keys() <= operations_with_seeds()


@pytest.mark.parametrize("depth", [called, *DEPTHS], ids=lambda depth: depth.__name__)
def test_copies_draw_different_numbers_from_every_operation(depth):
    draws = DRAWS if depth is called else FEW
    concrete = drawing(depth, {"seed": 1, "seed2": 7}, draws).get_concrete_function()
    drawn = collections.defaultdict(list)
    # Copies of other counts of steps, and the function alone, draw others too.
    for count in (2, 4):
        for name, values in drawn_in_copies(concrete, count).items():
            drawn[name] += values
    for name, value in concrete().items():
        drawn[name].append(value.numpy().tobytes())
    assert repeated(drawn) == {}


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
