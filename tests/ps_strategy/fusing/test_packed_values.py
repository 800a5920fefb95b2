"""Tests that tensors of every dtype arrive bit for bit in packed messages."""

import numpy as np
import pytest
import tensorflow as tf

from coordinator.ps_strategy.fusing.message_packing import pack_transfers
from coordinator.ps_strategy.tensorflow_internals.functions import built_function
from tests.ps_strategy.fusing.fused_calls import COUNT, FusedCalls
from tests.ps_strategy.fusing.one_device import results
from tests.ps_strategy.fusing.random_transfers import (
    DTYPES,
    FED_ONLY,
    WORDS,
    RandomTransfers,
    bits,
    random_value,
    run_on_worker,
)


def built(transfers, is_packed):
    """Returns the concrete function of a random graph, with or without packed transfers."""
    messages = []

    def change(graph):
        if is_packed:
            messages.append(pack_transfers(graph, {}, transfers.sections))

    concrete = built_function(transfers.__call__, transfers.signature, change)
    assert not is_packed or messages[0] > 12, "the graph has messages of several tensors"
    return concrete


def run_here(concrete, fed):
    """Runs a function in this process on one device, and returns its results."""
    return [bits(value) for value in results(concrete, *fed)]


@pytest.mark.parametrize(
    "dtypes", [pytest.param(DTYPES, id="all"), pytest.param(WORDS, id="words", marks=pytest.mark.long)]
)
def test_packed_tensors_of_every_dtype_keep_their_bits(dtypes):
    transfers = RandomTransfers(0, dtypes)
    found, expected = (run_here(built(transfers, is_packed), transfers.fed) for is_packed in (True, False))
    assert found == expected


@pytest.mark.long
def test_packed_tensors_keep_their_bits_on_real_servers(strategy):
    transfers = RandomTransfers(1, DTYPES)
    found, expected = (run_on_worker(built(transfers, is_packed), transfers.fed) for is_packed in (True, False))
    assert found == expected


@pytest.mark.parametrize(
    "dtypes",
    [
        pytest.param([tf.int8, tf.float32, tf.bool, tf.string], id="some"),
        pytest.param([*DTYPES, *FED_ONLY], id="all", marks=pytest.mark.long),
    ],
)
def test_arguments_and_results_of_fused_calls_keep_their_bits(strategy, monkeypatch, dtypes):
    calls = FusedCalls(strategy, monkeypatch)
    rng, shapes = np.random.default_rng(5), [(), (3,), (0, 2), (5, 2)]
    kinds = [(dtype, shape) for dtype in dtypes for shape in shapes]
    values = [[random_value(rng, *kind) for kind in kinds] for _ in range(COUNT)]

    @tf.function
    def step(*given):
        return [tf.identity(value) for value in given]

    futures = calls.run(step, [[*map(tf.constant, given, [kind[0] for kind in kinds])] for given in values])
    for future, given in zip(futures, values, strict=True):
        for kind, found, value in zip(kinds, future.result(), given, strict=True):
            assert bits(found) == bits(value), kind
