"""What servers know of their clients: the list of them, leases on resources, and how they learn of the end."""

import contextlib
import socket
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import tensorflow as tf

from coordinator.options import Options
from coordinator.ps_strategy.membership import clients as module
from coordinator.ps_strategy.membership.clients import (
    Answer,
    Client,
    ClientLease,
    Goodbye,
    RemoteContext,
    ServedClients,
    client_list,
    decode_clients,
    delete_markers,
    encode_clients,
    has_ended,
    marker_of,
    register,
)
from coordinator.ps_strategy.tensorflow_internals.process import context_id, current_server_def
from tests.deadline import wait_until

TIMEOUT = 10.0
PS = "/job:ps/replica:0/task:0"


@pytest.fixture
def address(shared_cluster, strategy) -> str:
    return shared_cluster.spec["ps"][0]


@pytest.fixture
def own(strategy) -> Client:
    """The client of this process."""
    [own_address] = [job.tasks[0] for job in current_server_def().cluster.job if job.name == "chief"]
    return Client(context_id(), own_address, socket.gethostname())


def listed() -> list[Client]:
    """The clients on the server."""
    with tf.device(f"{PS}/device:CPU:0"):
        return decode_clients(tf.raw_ops.ReadVariableOp(resource=client_list(), dtype=tf.string).numpy())


def write(resource: Callable[[], Any], value: Any) -> None:
    with tf.device(f"{PS}/device:CPU:0"):
        tf.raw_ops.AssignVariableOp(resource=resource(), value=tf.constant(value))


def test_a_written_list_is_read_and_an_unreadable_one_has_no_clients() -> None:
    clients = [Client(2**63 + 1, "10.0.0.1:2222", "here"), Client(5, "localhost:1", "there")]
    assert decode_clients(encode_clients(clients)) == clients
    for text in (b"", b"{", b"5", b'["x"]', b'[{"context_id": 1, "address": "localhost:1"}]', b"\xff"):
        assert decode_clients(text) == [], text


def test_a_client_counts_as_ended_only_if_that_is_certain(monkeypatch) -> None:
    for host in ("localhost", "127.0.0.1", "[::1]"):
        assert not has_ended(Client(1, f"{host}:1", "another machine"), TIMEOUT)
    for answer in Answer:
        monkeypatch.setattr(RemoteContext, "renew", lambda self, timeout, answer=answer: answer)
        is_certain = answer in {Answer.UNKNOWN, Answer.UNREACHED}
        assert has_ended(Client(1, "10.0.0.1:2222", "elsewhere"), TIMEOUT) is is_certain, answer


def test_no_process_and_a_silent_process_are_distinguished() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
        frozen = Client(1, address, socket.gethostname())
        with RemoteContext(address, 1) as context:
            assert context.renew(0.3) is Answer.SILENT
        assert not has_ended(frozen, 0.3)
    with RemoteContext(address, 1) as context:
        assert context.renew(TIMEOUT) is Answer.UNREACHED
        assert context.release(TIMEOUT) is Answer.UNREACHED
    assert has_ended(frozen, TIMEOUT)


def test_a_list_keeps_running_clients_and_drops_ended_ones(own, address, monkeypatch) -> None:
    before = listed()
    assert own in before
    assert not has_ended(own, TIMEOUT)
    with RemoteContext(address, own.context_id ^ 1) as another:
        assert another.renew(TIMEOUT) is Answer.UNKNOWN
        assert another.release(TIMEOUT) is Answer.HELD, "a missing context counts as freed"
    gone = Client(own.context_id ^ 1, own.address, own.host)
    assert has_ended(gone, TIMEOUT), "another process, or an earlier one, that had this address"
    silent, released = Client(1, "10.0.0.1:1", "elsewhere"), []

    def release(self, timeout):
        released.append((self._address, self._context_id))
        return Answer.HELD

    monkeypatch.setattr(module, "has_ended", lambda client, timeout: client == gone)
    monkeypatch.setattr(RemoteContext, "release", release)
    for found, expected in ((encode_clients([silent, gone, *before]), {own, silent, *before}), (b"no list", {own})):
        write(client_list, found)
        register(own, PS, address, TIMEOUT)
        assert set(listed()) == expected
    assert released == [(address, gone.context_id)]


def test_a_server_tells_a_client_that_said_goodbye_from_one_that_was_killed(own, address) -> None:
    before, served = listed(), ServedClients(f"grpc://{address}", "/job:ps/task:0", TIMEOUT)
    killed = Client(own.context_id ^ 1, own.address, own.host)
    with contextlib.closing(served), contextlib.ExitStack() as restoring:
        assert own.context_id in [client.context_id for client in served.living()]
        assert not served.have_ended()
        delete_markers(own.context_id, [address], TIMEOUT)
        restoring.callback(write, lambda: marker_of(own.context_id), True)
        assert not served.have_ended(), "it answers, though its marker is gone"

        restoring.callback(write, client_list, encode_clients(before))
        write(lambda: marker_of(killed.context_id), True)
        write(client_list, encode_clients([killed]))
        assert not served.living()
        assert not served.have_ended()
        delete_markers(killed.context_id, [address, "localhost:1"], TIMEOUT)
        assert served.have_ended()
        write(client_list, encode_clients([killed, own]))
        assert not served.have_ended(), "another client still lives"


class Servers:
    """Fake contexts that count their renewals, by address, and give the answers of a test, or `HELD`."""

    def __init__(self) -> None:
        self.renewals: Counter[str] = Counter()
        self.answers: dict[str, Answer] = {}
        self.closed: list[str] = []

    def context(self, address: str, context_id: int) -> SimpleNamespace:
        assert context_id == 5

        def begin_renewal(timeout: float):
            self.renewals[address] += 1
            return lambda: self.answers.get(address, Answer.HELD)

        return SimpleNamespace(begin_renewal=begin_renewal, close=lambda: self.closed.append(address))

    def wait_renewed(self, address: str) -> None:
        least = self.renewals[address] + 3
        wait_until(lambda: self.renewals[address] >= least)


@pytest.fixture
def servers(monkeypatch) -> Servers:
    servers = Servers()
    monkeypatch.setattr(module, "RemoteContext", servers.context)
    return servers


def test_a_lease_is_renewed_on_each_of_its_servers_until_it_is_closed(servers) -> None:
    lease = ClientLease(5, Options(client_timeout=0.04))
    lease.hold(["a:1", "b:1"])
    servers.wait_renewed("a:1")
    servers.wait_renewed("b:1")
    lease.hold(["b:1"])
    assert servers.closed == ["a:1"]
    count = servers.renewals["a:1"]
    servers.wait_renewed("b:1")
    assert servers.renewals["a:1"] == count
    [thread] = [each for each in threading.enumerate() if each.name == "coordinator-lease"]
    for _ in range(2):
        lease.close()
    assert servers.closed == ["a:1", "b:1"]
    assert not thread.is_alive()


def test_a_context_counts_as_freed_only_if_its_server_says_so(servers) -> None:
    with contextlib.closing(ClientLease(5, Options(client_timeout=600))) as lease:
        lease.hold(["a:1"])
        for servers.answers["a:1"] in Answer:
            expected = {"a:1"} if servers.answers["a:1"] is Answer.UNKNOWN else set()
            assert lease.freed(["a:1", "b:1"]) == expected, servers.answers


@pytest.fixture
def is_said(monkeypatch) -> Iterator[Callable[..., bool]]:
    """Ends the process as far as a goodbye can see; returns whether it was said."""
    said, finalize = [], []
    monkeypatch.setattr(module, "delete_markers", lambda *given: said.append(given))
    monkeypatch.delattr(sys, "last_traceback", raising=False)
    monkeypatch.delattr(sys, "ps1", raising=False)
    monkeypatch.setattr(module.weakref, "finalize", lambda _, *call: finalize.extend(call))
    goodbye = Goodbye(5, TIMEOUT)

    def is_said(is_withheld: bool = False) -> bool:
        goodbye.is_withheld = is_withheld
        say, *given = finalize
        said.clear()
        say(*given)
        return bool(said)

    return is_said


def failing(source):
    """The traceback of a program, as Python keeps it, and as something that runs it does that catches its error."""
    try:
        exec(compile(source, "program.py", "exec"), {"__name__": "__main__"})  # noqa: S102 - as the interpreter does
    except ZeroDivisionError as error:
        return error.__traceback__.tb_next, error.__traceback__
    raise AssertionError("It did not fail.")


def test_an_error_that_ends_the_program_is_no_goodbye_and_one_that_was_caught_is(is_said, monkeypatch) -> None:
    assert is_said()
    uncaught, caught = failing("def f():\n    1 / 0\nf()")
    monkeypatch.setattr(sys, "last_traceback", uncaught, raising=False)
    assert not is_said()
    monkeypatch.setattr(sys, "last_traceback", caught)
    assert is_said(), "a runner of tests has gone on"
    monkeypatch.setattr(sys, "last_traceback", uncaught)
    monkeypatch.setattr(sys, "ps1", "In : ", raising=False)
    assert is_said(is_withheld=True), "a notebook, whatever its cells had"


def test_leaving_by_exit_with_a_code_is_no_goodbye() -> None:
    for error, is_withheld in (
        (SystemExit(), False),
        (SystemExit(0), False),
        (SystemExit(143), True),
        (SystemExit("why"), True),
        (OSError, False),
    ):
        goodbye = Goodbye(5, TIMEOUT)
        with contextlib.suppress(BaseException), contextlib.ExitStack() as closing:
            closing.callback(goodbye.strategy_closes)
            raise error
        assert goodbye.is_withheld == is_withheld, error
