"""What servers know of their clients, and how they learn that one has ended."""

import contextlib
import socket

import pytest
import tensorflow as tf

from coordinator.ps_strategy.membership.client_registry import Client, client_list, encode_clients, marker_of
from coordinator.ps_strategy.membership.goodbye import Goodbye, ServedClients, delete_markers
from coordinator.ps_strategy.tensorflow_internals.process import context_id

TIMEOUT = 60.0
PS = "/job:ps/replica:0/task:0"


@pytest.fixture
def address(shared_cluster, strategy) -> str:
    return shared_cluster.spec["ps"][0]


@pytest.fixture
def served(address):
    """What the server sees of its clients; afterwards their list is as before."""
    with tf.device(f"{PS}/device:CPU:0"):
        before = tf.raw_ops.ReadVariableOp(resource=client_list(), dtype=tf.string)
        served = ServedClients(f"grpc://{address}", "/job:ps/task:0", TIMEOUT)
        yield served
        tf.raw_ops.AssignVariableOp(resource=client_list(), value=before)
        served.close()


def test_a_server_sees_the_clients_that_live(served) -> None:
    assert context_id() in [client.context_id for client in served.living()]
    assert not served.have_ended()


def test_a_server_tells_a_client_that_said_goodbye_from_one_that_was_killed(served, address) -> None:
    [own] = [client for client in served.registered() if client.context_id == context_id()]
    killed = Client(own.context_id ^ 1, own.address, own.host)
    with tf.device(f"{PS}/device:CPU:0"):
        tf.raw_ops.AssignVariableOp(resource=marker_of(killed.context_id), value=True)
        tf.raw_ops.AssignVariableOp(resource=client_list(), value=encode_clients([killed]))
        assert not served.living()
        assert not served.have_ended()
        delete_markers(killed.context_id, [address, f"localhost:{free_port()}"], TIMEOUT)
        assert served.have_ended()
        tf.raw_ops.AssignVariableOp(resource=client_list(), value=encode_clients([killed, own]))
        assert not served.have_ended(), "another client still lives"


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.mark.parametrize(
    ("error", "is_withheld"),
    [
        (SystemExit(), False),
        (SystemExit(0), False),
        (SystemExit(143), True),
        (SystemExit("why"), True),
        (OSError, False),
    ],
)
def test_leaving_by_exit_with_a_code_is_no_goodbye(error, is_withheld) -> None:
    goodbye = Goodbye(5, TIMEOUT)
    with contextlib.suppress(BaseException), contextlib.ExitStack() as closing:
        closing.callback(goodbye.strategy_closes)
        raise error
    assert goodbye.is_withheld == is_withheld
