"""The tasks of a Slurm step: which role each has, and how they find each other."""

import concurrent.futures
import contextlib
import random
import secrets
import socket
import threading

import psutil
import pytest

from coordinator.errors import LaunchError
from coordinator.launch import slurm
from coordinator.launch.slurm import SlurmStep, TaskLink, role_of
from tests.deadline import wait_until

TIMEOUT = 60.0
ENVIRONMENT = {"SLURM_CLUSTER_NAME": "test", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2", "SLURM_PROCID": "3"}
ENVIRONMENT |= {"SLURM_NTASKS": "9", "SLURM_STEP_NUM_TASKS": "6", "SLURM_STEP_NUM_NODES": "1"}
ENVIRONMENT |= {"SLURM_STEP_NODELIST": "node3"}


def test_a_step_is_read_from_the_environment_of_srun() -> None:
    step = SlurmStep.from_environment(ENVIRONMENT)
    assert step == SlurmStep("test.7.2.", 3, 6, 1, "node3")
    assert step.first_host() == "127.0.0.1"
    with_key = SlurmStep.from_environment({**ENVIRONMENT, "COORDINATOR_SLURM_KEY": "a secret"})
    assert with_key.key == b"a secret"
    assert "a secret" not in repr(with_key)
    requeued = SlurmStep.from_environment({**ENVIRONMENT, "SLURM_RESTART_COUNT": "1"})
    assert requeued.name == "test.7.2.1", "another step: tasks of the former may still be ending"
    for missing in ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"):
        others = {name: value for name, value in ENVIRONMENT.items() if name != missing}
        with pytest.raises(LaunchError, match=f"{missing}.* Start it by srun: srun --ntasks 6 coordinator slurm"):
            SlurmStep.from_environment(others)


def test_each_task_has_a_role_and_too_few_are_refused() -> None:
    step = SlurmStep.from_environment(ENVIRONMENT)
    assert step.workers(2, evaluator=True) == 2
    roles = [role_of(rank, 2, 2) for rank in range(6)]
    assert roles == [("chief", 0), ("ps", 0), ("ps", 1), ("worker", 0), ("worker", 1), ("evaluator", 0)]
    for ps, evaluator, needed in ((5, False, 7), (4, True, 7), (9, True, 12)):
        with pytest.raises(LaunchError, match=f"The step has 6 tasks.* give srun --ntasks {needed} or more"):
            step.workers(ps, evaluator=evaluator)


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
GREETINGS = [b"", b"GET / HTTP/1.1\r\n", b"null\n", b"[" * 4000 + b"\n", b"\xff\n", b"x" * 100_000]
GREETINGS += [
    b'{"group": "GROUP", "rank": []}\n',
    b'{"group": "GROUP", "rank": true, "nonce": ""}\n',
    b'{"group": "GROUP", "rank": 1, "nonce": {}}\n{"proof": {}}\n',
    b'{"group": "GROUP", "rank": 1, "nonce": "0"}\n{"proof": "0"}\n',
    b'{"group": "GROUP", "rank": 1, "nonce": "0"}\n[]\n',
]


def listening_port(group: str) -> int:
    """Waits until the first process of a group listens, which is this one; returns its port."""
    ports, found = set(random.Random(group).sample(range(10_000, 32_768), 32)), set()

    def is_found() -> bool:
        opened = psutil.Process().net_connections("tcp")
        found.update(
            each.laddr.port for each in opened if each.status == psutil.CONN_LISTEN and each.laddr.port in ports
        )
        return bool(found)

    wait_until(is_found)
    return found.pop()


def test_strangers_who_connect_delay_nobody_and_are_not_taken_for_others(group: str) -> None:
    stop = threading.Event()

    def dribble(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.sendall(f'{{"group": "{group}", "rank": []}}\n'.encode())
            while not stop.wait(0.02):
                connection.sendall(b"x")

    with contextlib.ExitStack() as opened, concurrent.futures.ThreadPoolExecutor(8) as threads:
        accepting = threads.submit(slurm.accept, group, [1], is_local=True, timeout=TIMEOUT, key=KEY)
        opened.callback(stop.set)
        port = listening_port(group)
        for _ in range(3):
            threads.submit(dribble, socket.create_connection(("127.0.0.1", port), TIMEOUT))
        for greeting in GREETINGS * 10:
            stranger = opened.enter_context(socket.create_connection(("127.0.0.1", port), TIMEOUT))
            with contextlib.suppress(ConnectionError):
                stranger.sendall(greeting.replace(b"GROUP", group.encode()))
        # One knows all but the key, and waits until it is asked for its proof.
        stranger = opened.enter_context(socket.create_connection(("127.0.0.1", port), TIMEOUT))
        lines = opened.enter_context(stranger.makefile("rb"))
        stranger.sendall(f'{{"group": "{group}", "rank": 1, "nonce": "0"}}\n'.encode())
        assert b"proof" in lines.readline()
        stranger.sendall(b'{"proof": "0"}\n')
        assert lines.readline() == b"", "it was closed, not accepted"
        impostor = threads.submit(slurm.connect, group, 1, "127.0.0.1", 0.5, key=b"another one")
        with pytest.raises(LaunchError, match="did not answer"):
            impostor.result(TIMEOUT)
        assert not accepting.done()
        with contextlib.closing(slurm.connect(group, 1, "127.0.0.1", TIMEOUT, key=KEY)) as link:
            [accepted] = accepting.result(TIMEOUT).values()
            link.send(text="from the right one")
            assert accepted.receive(TIMEOUT) == {"text": "from the right one"}
            accepted.close()


def test_others_who_listen_on_the_ports_delay_nobody_and_are_not_believed(group: str) -> None:
    ports = random.Random(group).sample(range(10_000, 32_768), 32)
    with contextlib.ExitStack() as opened, concurrent.futures.ThreadPoolExecutor() as threads:
        # All but the last two say nothing.
        for port in ports[:-2]:
            opened.enter_context(socket.create_server(("127.0.0.1", port)))
        with pytest.raises(LaunchError, match=r"did not answer within 0\.1 s"):
            slurm.connect(group, 1, "127.0.0.1", 0.1, key=KEY)
        # One poses as the first process, without the key, until one with the same wrong key comes.
        posing = threads.submit(slurm.accept, group, [1], is_local=True, timeout=TIMEOUT, key=b"another one")
        listening_port(group)
        accepting = threads.submit(slurm.accept, group, [1], is_local=True, timeout=TIMEOUT, key=KEY)
        link = slurm.connect(group, 1, "127.0.0.1", TIMEOUT, key=KEY)
        accepting.result(TIMEOUT)[1].close()
        link.close()
        assert not posing.done()
        slurm.connect(group, 1, "127.0.0.1", TIMEOUT, key=b"another one").close()
        posing.result(TIMEOUT)[1].close()


def test_a_name_that_is_not_resolved_is_waited_for_until_the_deadline(
    group: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    answer = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answer.wait(TIMEOUT) and [])
    with pytest.raises(LaunchError, match=r"The first task, on node7, did not answer within 0\.1 s"):
        slurm.connect(group, 1, "node7", 0.1)
    answer.set()


def test_an_object_without_a_proof_or_one_that_is_sent_again_ends_a_link() -> None:
    for forged in (b'0123 {"text": "forged"}\n', b"\xff\xe9 {}\n"):
        ends = socket.socketpair()
        first, other = (
            TaskLink(end, KEY, is_first=is_first) for end, is_first in zip(ends, (True, False), strict=True)
        )
        with contextlib.closing(first), contextlib.closing(other):
            first.send(number=1)
            ends[0].sendall(forged)
            assert other.receive(TIMEOUT) == {"number": 1}
            assert other.receive(TIMEOUT) is None
    ends = socket.socketpair()
    with contextlib.closing(TaskLink(ends[0], KEY, is_first=True)) as first:
        first.send(number=1)
        sent = ends[1].recv(1000)
        # It is sent back.
        ends[1].sendall(sent)
        assert first.receive(TIMEOUT) is None
        with contextlib.closing(TaskLink(ends[1], KEY, is_first=False, received=sent + sent)) as other:
            assert other.receive(TIMEOUT) == {"number": 1}
            assert other.receive(TIMEOUT) is None


def test_a_missing_process_is_named(group: str) -> None:
    with pytest.raises(LaunchError, match=r"The tasks 1, 3 did not start within 0\.05 s"):
        slurm.accept(group, [1, 3], is_local=True, timeout=0.05)
    with pytest.raises(LaunchError, match=r"The first task, on 127\.0\.0\.1, did not answer"):
        slurm.connect(group, 1, "127.0.0.1", 0.05)
