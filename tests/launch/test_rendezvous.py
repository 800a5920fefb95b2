import concurrent.futures
import contextlib
import random
import secrets
import socket

import pytest

from coordinator.errors import LaunchError
from coordinator.launch import rendezvous

TIMEOUT = 60.0


@pytest.fixture
def group() -> str:
    return secrets.token_hex()


def test_processes_find_each_other_and_exchange_objects(group: str) -> None:
    with concurrent.futures.ThreadPoolExecutor() as threads:
        accepting = threads.submit(rendezvous.accept, group, [1, 2], is_local=True, timeout=TIMEOUT)
        connecting = {rank: threads.submit(rendezvous.connect, group, rank, "127.0.0.1", TIMEOUT) for rank in (2, 1)}
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


def test_other_programs_on_the_ports_are_left_alone(group: str) -> None:
    first = random.Random(group).sample(range(10_000, 32_768), 32)[0]
    with contextlib.ExitStack() as opened, concurrent.futures.ThreadPoolExecutor() as threads:
        foreign = opened.enter_context(socket.create_server(("127.0.0.1", first)))
        answering = threads.submit(lambda: foreign.accept()[0])
        accepting = threads.submit(rendezvous.accept, group, [1], is_local=True, timeout=TIMEOUT)
        stranger = threads.submit(rendezvous.connect, group, 5, "127.0.0.1", 0.5)
        connecting = threads.submit(rendezvous.connect, group, 1, "127.0.0.1", TIMEOUT)
        with answering.result(TIMEOUT) as connection:
            connection.sendall(b"220 mail.example.org\r\n")
        link = connecting.result(TIMEOUT)
        [accepted] = accepting.result(TIMEOUT).values()
        with pytest.raises(LaunchError, match=r"did not answer within 0\.5 s"):
            stranger.result(TIMEOUT)
        link.close()
        accepted.close()


def test_a_missing_process_is_named(group: str) -> None:
    with pytest.raises(LaunchError, match=r"The tasks 1, 3 did not start within 0\.05 s"):
        rendezvous.accept(group, [1, 3], is_local=True, timeout=0.05)
    with pytest.raises(LaunchError, match=r"The first task, on 127\.0\.0\.1, did not answer"):
        rendezvous.connect(group, 1, "127.0.0.1", 0.05)
