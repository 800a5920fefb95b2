"""What servers know of their clients, and how they learn that one has ended."""

import contextlib
import socket
import sys

import pytest
import tensorflow as tf

from coordinator.ps_strategy.membership import clients as module
from coordinator.ps_strategy.membership.clients import (
    Client,
    Goodbye,
    ServedClients,
    client_list,
    delete_markers,
    encode_clients,
    marker_of,
)
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


def test_a_client_that_answers_lives_though_its_marker_is_gone(served, address) -> None:
    delete_markers(context_id(), [address], TIMEOUT)
    try:
        assert not served.have_ended()
    finally:
        with tf.device(f"{PS}/device:CPU:0"):
            tf.raw_ops.AssignVariableOp(resource=marker_of(context_id()), value=True)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


@pytest.fixture
def goodbye(monkeypatch):
    """One that says nothing to servers, but to `said`."""
    said = []
    monkeypatch.setattr(module, "delete_markers", lambda *given: said.append(given))
    monkeypatch.delattr(sys, "last_traceback", raising=False)
    monkeypatch.delattr(sys, "ps1", raising=False)
    finalize = []
    monkeypatch.setattr(module.weakref, "finalize", lambda _, *call: finalize.extend(call))
    goodbye = Goodbye(5, TIMEOUT)

    def is_said() -> bool:
        """Ends the process as far as the goodbye can see."""
        say, *given = finalize
        said.clear()
        say(*given)
        return bool(said)

    goodbye.is_said = is_said
    return goodbye


def failing(source):
    """The traceback of a program, as Python keeps it, and as something that runs it does that catches its error."""
    try:
        exec(compile(source, "program.py", "exec"), {"__name__": "__main__"})  # noqa: S102 - as the interpreter does
    except ZeroDivisionError as error:
        return error.__traceback__.tb_next, error.__traceback__
    raise AssertionError("It did not fail.")


def test_an_error_that_ends_the_program_is_no_goodbye_and_one_that_was_caught_is(goodbye, monkeypatch) -> None:
    assert goodbye.is_said()
    uncaught, caught = failing("def f():\n    1 / 0\nf()")
    monkeypatch.setattr(sys, "last_traceback", uncaught, raising=False)
    assert not goodbye.is_said()
    monkeypatch.setattr(sys, "last_traceback", caught)
    assert goodbye.is_said(), "a runner of tests has gone on"
    monkeypatch.setattr(sys, "last_traceback", None)
    assert goodbye.is_said(), "it was no error of a program that ran"


def test_a_notebook_says_goodbye_whatever_its_cells_had(goodbye, monkeypatch) -> None:
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    monkeypatch.setattr(sys, "last_traceback", failing("1 / 0")[0], raising=False)
    goodbye.is_withheld = True
    assert goodbye.is_said()


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
