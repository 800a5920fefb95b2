"""Tests that tensors of every dtype are transferred bit for bit."""

import pytest
import tensorflow as tf

from coordinator.ps_strategy.tensorflow_internals.functions import built_function
from coordinator.updates.model import transfer
from tests.ps_strategy.fusing.random_transfers import SERVERS, RandomTransfers, run_on_worker


@pytest.mark.long
@pytest.mark.parametrize("direction", ["to a server", "from a server"])
def test_a_packed_transfer_of_every_dtype_keeps_the_bits(strategy, direction):
    transfers = RandomTransfers(7)
    server = SERVERS[1]
    source, target = (None, server) if direction == "to a server" else (server, None)

    def fn(*fed):
        sent = transfers(*fed)
        with tf.device(source):
            sent = [tf.identity(tensor) for tensor in sent]
        arrived = transfer(sent, source, target)[0]
        with tf.device(target):
            arrived = [tf.identity(tensor) for tensor in arrived]
        return [*map(tf.identity, arrived), *map(tf.identity, sent)]

    concrete = built_function(fn, transfers.signature, lambda _: None)
    found = run_on_worker(concrete, transfers.fed)
    assert found[: len(found) // 2] == found[len(found) // 2 :]
