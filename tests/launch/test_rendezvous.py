import concurrent.futures
import contextlib
import gc
import random
import secrets
import socket
import threading

import pytest

from coordinator.errors import LaunchError
from coordinator.launch import slurm
from coordinator.launch.slurm import TaskLink
from tests.deadline import wait_until

TIMEOUT = 60.0


@pytest.fixture
def group() -> str:
    return secrets.token_hex()


def test_processes_find_each_other_and_exchange_objects(group: str) -> None:
    with concurrent.futures.ThreadPoolExecutor() as threads:
        accepting = threads.submit(slurm.accept, group, [1, 2], is_local=True, timeout=TIMEOUT)
        connecting = {rank: threads.submit(slurm.connect, group, rank, "127.0.0.1", TIMEOUT) for rank in (2, 1)}
        others = {rank: each.result(TIMEOUT) for rank, each in connecting.items()}
        links = accepting.result(TIMEOUT)
    for rank in (1, 2):
        assert others[rank].host == "127.0.0.1"
        others[rank].send(rank=rank)
        assert links[rank].receive(TIMEOUT) == {"rank": rank}
        links[rank].send(text="ä\n")
        assert others[rank].receive(TIMEOUT) == {"text": "ä\n"}
    others[1].close()
    assert links[1].receive() is None
    links[1].send(text="to nobody")
    with pytest.raises(TimeoutError):
        links[2].receive(0.01)
    links[2].close()
    assert others[2].receive(TIMEOUT) is None
    links[1].close()
    others[2].close()


KEY = b"of the group"
# What says nothing, does not end, is no object, lacks something, or has something of another kind. And what knows all
# but the key.
GREETINGS = [
    b"",
    b"GET / HTTP/1.1\r\n",
    b"null\n",
    b"[" * 4000 + b"\n",
    b"\xff\n",
    b"x" * 100_000,
    b'{"group": "GROUP", "rank": []}\n',
    b'{"group": [], "rank": 1, "nonce": ""}\n',
    b'{"group": "GROUP", "rank": true, "nonce": ""}\n',
    b'{"group": "GROUP", "rank": 1}\n',
    b'{"group": "GROUP", "rank": 1, "nonce": {}}\n{"proof": {}}\n',
    b'{"group": "GROUP", "rank": 1, "nonce": "0"}\n{"proof": "0"}\n',
    b'{"group": "GROUP", "rank": 1, "nonce": "0"}\n[]\n',
]


def listening_port(group: str) -> int:
    """Waits until the first process of a group listens; returns its port."""
    ports = random.Random(group).sample(range(10_000, 32_768), 32)
    found: list[int] = []

    def is_found() -> bool:
        for port in ports:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
                found.append(port)
                return True
        return False

    wait_until(is_found)
    return found[0]


def test_a_stranger_who_connects_at_the_end_is_closed(group: str) -> None:
    for each in range(5):
        with contextlib.ExitStack() as opened, concurrent.futures.ThreadPoolExecutor() as threads:
            accepting = threads.submit(slurm.accept, f"{group}{each}", [1], is_local=True, timeout=TIMEOUT)
            port = listening_port(f"{group}{each}")
            connecting = threads.submit(slurm.connect, f"{group}{each}", 1, "127.0.0.1", TIMEOUT)
            while not accepting.done():
                with contextlib.suppress(OSError):
                    opened.enter_context(socket.create_connection(("127.0.0.1", port), TIMEOUT))
            connecting.result(TIMEOUT).close()
            accepting.result(TIMEOUT)[1].close()
    # An unclosed socket raises a ResourceWarning.
    gc.collect()


def test_strangers_who_connect_delay_nobody_and_are_not_taken_for_others(group: str) -> None:
    with contextlib.ExitStack() as opened, concurrent.futures.ThreadPoolExecutor() as threads:
        accepting = threads.submit(slurm.accept, group, [1], is_local=True, timeout=TIMEOUT, key=KEY)
        port = listening_port(group)
        for greeting in GREETINGS * 10:
            stranger = opened.enter_context(socket.create_connection(("127.0.0.1", port), TIMEOUT))
            with contextlib.suppress(ConnectionError):
                stranger.sendall(greeting.replace(b"GROUP", group.encode()))
        impostor = threads.submit(slurm.connect, group, 1, "127.0.0.1", 0.5, key=b"another one")
        with pytest.raises(LaunchError, match="did not answer"):
            impostor.result(TIMEOUT)
        assert not accepting.done()
        with contextlib.closing(slurm.connect(group, 1, "127.0.0.1", TIMEOUT, key=KEY)) as link:
            [accepted] = accepting.result(TIMEOUT).values()
            link.send(text="from the right one")
            assert accepted.receive(TIMEOUT) == {"text": "from the right one"}
            accepted.close()


def test_nobody_who_sends_byte_by_byte_moves_the_deadline(group: str) -> None:
    stop = threading.Event()

    def dribble(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.sendall(f'{{"group": "{group}", "rank": []}}\n'.encode())
            while not stop.wait(0.02):
                connection.sendall(b"x")

    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        accepting = threads.submit(slurm.accept, group, [1], is_local=True, timeout=1.0)
        port = listening_port(group)
        for _ in range(5):
            threads.submit(dribble, socket.create_connection(("127.0.0.1", port), TIMEOUT))
        try:
            with pytest.raises(LaunchError, match=r"The tasks 1 did not start within 1 s"):
                accepting.result(TIMEOUT)
        finally:
            stop.set()


def test_others_who_listen_on_the_ports_delay_nobody_and_are_not_believed(group: str) -> None:
    ports = random.Random(group).sample(range(10_000, 32_768), 32)
    with contextlib.ExitStack() as opened, concurrent.futures.ThreadPoolExecutor() as threads:
        # All but the last two say nothing.
        for port in ports[:-2]:
            opened.enter_context(socket.create_server(("127.0.0.1", port)))
        with pytest.raises(LaunchError, match=r"did not answer within 0\.3 s"):
            slurm.connect(group, 1, "127.0.0.1", 0.3, key=KEY)
        # One poses as the first process, without the key.
        posing = threads.submit(slurm.accept, group, [1], is_local=True, timeout=3.0, key=b"another one")
        listening_port(group)
        accepting = threads.submit(slurm.accept, group, [1], is_local=True, timeout=TIMEOUT, key=KEY)
        link = slurm.connect(group, 1, "127.0.0.1", TIMEOUT, key=KEY)
        accepting.result(TIMEOUT)[1].close()
        link.close()
        with pytest.raises(LaunchError, match="The tasks 1 did not start"):
            posing.result(TIMEOUT)


def test_a_name_that_is_not_resolved_is_waited_for_until_the_deadline(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()
    answer = threading.Event()

    def hang(*_: object, **__: object) -> list[object]:
        asked.set()
        answer.wait(TIMEOUT)
        return []

    monkeypatch.setattr(socket, "getaddrinfo", hang)
    with pytest.raises(LaunchError, match=r"The first task, on node7, did not answer within 0\.1 s"):
        slurm.connect(group, 1, "node7", 0.1)
    assert asked.is_set()
    answer.set()


@pytest.mark.parametrize("forged", [b'0123 {"text": "forged"}\n', b"\xff\xe9 {}\n"])
def test_an_object_without_a_proof_ends_a_link(forged: bytes) -> None:
    ends = socket.socketpair()
    first, other = (TaskLink(end, KEY, is_first=is_first) for end, is_first in zip(ends, (True, False), strict=True))
    with contextlib.closing(first), contextlib.closing(other):
        first.send(number=1)
        ends[0].sendall(forged)
        assert other.receive(TIMEOUT) == {"number": 1}
        assert other.receive(TIMEOUT) is None


def test_an_object_that_is_sent_back_or_again_ends_a_link() -> None:
    ends = socket.socketpair()
    with contextlib.closing(TaskLink(ends[0], KEY, is_first=True)) as first:
        first.send(number=1)
        sent = ends[1].recv(1000)
        ends[1].sendall(sent)
        assert first.receive(TIMEOUT) is None
        other = TaskLink(ends[1], KEY, is_first=False, received=sent + sent)
        assert other.receive(TIMEOUT) == {"number": 1}
        assert other.receive(TIMEOUT) is None
        other.close()


def test_a_missing_process_is_named(group: str) -> None:
    with pytest.raises(LaunchError, match=r"The tasks 1, 3 did not start within 0\.05 s"):
        slurm.accept(group, [1, 3], is_local=True, timeout=0.05)
    with pytest.raises(LaunchError, match=r"The first task, on 127\.0\.0\.1, did not answer"):
        slurm.connect(group, 1, "127.0.0.1", 0.05)
