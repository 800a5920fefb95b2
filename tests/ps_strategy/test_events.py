"""Tests of the events of a strategy on real servers."""

import queue

import tensorflow as tf

import coordinator
from tests.deadline import LIMIT


@tf.function
def step() -> tf.Tensor:
    return tf.constant(7)


def test_a_callback_gets_the_events_of_a_step_on_a_real_cluster(strategy) -> None:
    received: queue.Queue[coordinator.Event] = queue.Queue()
    stop = strategy.on_event(received.put)
    strategy.schedule(step)
    strategy.join(LIMIT)
    strategy.settled(LIMIT)
    events = [received.get_nowait() for _ in range(received.qsize())]
    stop()
    # A worker that an earlier test has restarted may return now.
    assert [event.kind for event in events if event.name == "step"] == ["closures_started", "closures_finished"]
    servers = strategy.cluster.statistics().parameter_servers
    assert [(server.index, server.device, server.state) for server in servers] == [
        (index, f"/job:ps/replica:0/task:{index}", "live") for index in range(2)
    ]
