"""Tests of what a plain connection shows of a server that does not answer."""

import asyncio
import contextlib
import socket
import threading
from collections.abc import Iterator

import pytest

from coordinator.heartbeat import probes
from coordinator.heartbeat.probes import Obstacle, find_obstacles
from coordinator.launch.server_process import free_addresses


@contextlib.contextmanager
def bound_port() -> Iterator[str]:
    """The address of a port that a process has and does not listen on."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        yield f"127.0.0.1:{bound.getsockname()[1]}"


@contextlib.contextmanager
def silent_listener() -> Iterator[str]:
    """The address of a port on which the kernel accepts connections that nothing reads, as for a frozen server."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@contextlib.contextmanager
def full_listener() -> Iterator[str]:
    """The address of a port whose queue is full, so that the kernel drops packets to it, as a firewall does."""
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(socket.socket())
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for _ in range(3):
            waiting = opened.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.mark.parametrize(
    ("place", "obstacle"),
    [
        (lambda: contextlib.nullcontext(free_addresses(1)[0]), Obstacle.REFUSED),
        (bound_port, Obstacle.REFUSED),
        (lambda: contextlib.nullcontext("no-such-host.invalid:2222"), Obstacle.UNRESOLVED),
        (full_listener, Obstacle.UNREACHED),
        (silent_listener, Obstacle.SILENT),
    ],
    ids=["no process", "bound but not listening", "unknown name", "dropped packets", "frozen"],
)
def test_the_reasons_for_silence_are_told_apart(place, obstacle: Obstacle) -> None:
    with place() as address:
        assert find_obstacles([address]) == {address: obstacle}


def test_a_caller_may_run_an_event_loop_as_a_notebook_does() -> None:
    async def find() -> dict[str, Obstacle]:
        return find_obstacles(addresses)

    addresses = free_addresses(2)
    assert asyncio.run(find()) == dict.fromkeys(addresses, Obstacle.REFUSED)


def test_an_ip_address_does_not_wait_for_names_that_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = socket.getaddrinfo

    def hanging(host: str, *args, flags: int = 0, **kwargs):
        if not flags & socket.AI_NUMERICHOST:
            threading.Event().wait(0.3)  # more than is waited for a name
        return resolve(host, *args, flags=flags, **kwargs)

    monkeypatch.setattr(socket, "getaddrinfo", hanging)
    monkeypatch.setattr(probes, "_RESOLVE_TIMEOUT", 0.1)
    names, [address] = [f"no-such-host-{number}.invalid:2222" for number in range(40)], free_addresses(1)
    found = find_obstacles([*names, address])
    assert found == {**dict.fromkeys(names, Obstacle.UNRESOLVED), address: Obstacle.REFUSED}


def test_an_address_of_a_kind_that_the_kernel_has_not_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    resolve = socket.getaddrinfo
    # As an IPv6 address is where the kernel has no IPv6.
    unknown = (255, socket.SOCK_STREAM, 0, "", ("::1", 2222, 0, 0))
    monkeypatch.setattr(socket, "getaddrinfo", lambda *args, **kwargs: [unknown, *resolve(*args, **kwargs)])
    [address] = free_addresses(1)
    assert find_obstacles([address]) == {address: Obstacle.REFUSED}
