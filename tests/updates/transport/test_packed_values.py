"""What a parcel brings is bit for bit what was sent, whatever its dtype."""

import pytest
import tensorflow as tf

from coordinator.ps_strategy import tensorflow_internals
from coordinator.updates.parcel import send
from tests.ps_strategy.fusing.random_transfers import SERVERS, RandomTransfers, run_on_worker


@pytest.mark.parametrize("way", ["to a server", "from a server"])
def test_a_parcel_of_every_dtype_is_the_same_bits(strategy, way):
    transfers = RandomTransfers(7)
    server = SERVERS[1]
    source, target = (None, server) if way == "to a server" else (server, None)

    def fn(*fed):
        sent = transfers(*fed)
        with tf.device(source):
            sent = [tf.identity(tensor) for tensor in sent]
        arrived = send(sent, source, target).tensors
        with tf.device(target):
            arrived = [tf.identity(tensor) for tensor in arrived]
        return [*map(tf.identity, arrived), *map(tf.identity, sent)]

    concrete = tensorflow_internals.built_function(fn, transfers.signature, lambda _: None)
    found = run_on_worker(concrete, transfers.fed)
    assert found[: len(found) // 2] == found[len(found) // 2 :]
