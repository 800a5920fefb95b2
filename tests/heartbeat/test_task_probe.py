import asyncio
import socket
import threading
from collections.abc import Iterator
from concurrent import futures

import pytest

from coordinator.heartbeat.probes import AsyncTaskProbe, TaskProbe, TaskStatus
from coordinator.launch.server_process import free_addresses
from coordinator.testing.status_server import CPU, StatusService, encoded_device

GPU = "/job:worker/replica:0/task:0/device:GPU:0"


@pytest.fixture
def address() -> str:
    [address] = free_addresses(1)
    return address


@pytest.fixture
def probe(address: str) -> Iterator[TaskProbe]:
    with TaskProbe(address) as probe:
        yield probe


def test_a_status_has_the_devices_and_the_incarnation_of_the_first(address: str, probe: TaskProbe) -> None:
    with StatusService(address, lambda: encoded_device(CPU, 2**64 - 3) + encoded_device(GPU, 7)):
        assert probe.status(timeout=10) == TaskStatus(incarnation=2**64 - 3, devices=(CPU, GPU))


def test_no_server_is_none_at_once(probe: TaskProbe) -> None:
    assert probe.status(timeout=10) is None


def test_a_server_that_does_not_answer_is_none_after_the_timeout(address: str, probe: TaskProbe) -> None:
    answered = threading.Event()

    def frozen() -> bytes:
        answered.wait()
        return encoded_device(CPU, 1)

    with StatusService(address, frozen):
        assert probe.status(timeout=0.3) is None
        answered.set()
        assert probe.status(timeout=10) == TaskStatus(incarnation=1, devices=(CPU,))


@pytest.mark.parametrize("reply", [b"", b"\xff\xff\xff", b"\x0a\x7f"])
def test_an_answer_of_something_else_is_none(address: str, probe: TaskProbe, reply: bytes) -> None:
    with StatusService(address, lambda: reply):
        assert probe.status(timeout=10) is None


def test_a_restarted_server_is_seen_with_its_new_incarnation(address: str, probe: TaskProbe) -> None:
    with StatusService(address, lambda: encoded_device(CPU, 1)):
        assert probe.status(timeout=10) == TaskStatus(incarnation=1, devices=(CPU,))
    for _ in range(20):
        assert probe.status(timeout=1) is None
    with StatusService(address, lambda: encoded_device(CPU, 2)):
        assert wait_status(probe) == TaskStatus(incarnation=2, devices=(CPU,))


def wait_status(probe: TaskProbe, seconds: float = 5.0) -> TaskStatus | None:
    """Probes until there is an answer; gRPC's own back-off would wait for longer than this allows."""
    pause = threading.Event()
    for _ in range(int(seconds / 0.05)):
        if (status := probe.status(timeout=1)) is not None:
            return status
        pause.wait(0.05)
    return None


def test_one_probe_serves_many_threads(address: str, probe: TaskProbe) -> None:
    with StatusService(address, lambda: encoded_device(CPU, 1)), futures.ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: probe.status(timeout=10), range(200)))
    assert answers == [TaskStatus(incarnation=1, devices=(CPU,))] * 200


def test_a_closed_probe_cannot_be_used(address: str) -> None:
    probe = TaskProbe(address)
    probe.close()
    probe.close()
    with pytest.raises(ValueError, match="closed"):
        probe.status(timeout=1)


def test_closing_ends_a_probe_in_progress(address: str) -> None:
    begun, answered = threading.Event(), threading.Event()

    def frozen() -> bytes:
        begun.set()
        answered.wait()
        return b""

    probe = TaskProbe(address)
    with StatusService(address, frozen), futures.ThreadPoolExecutor(1) as threads:
        answer = threads.submit(probe.status, 60)
        assert begun.wait(10)
        probe.close()
        assert answer.result(10) is None
        answered.set()


async def probe_once(address: str, timeout: float) -> TaskStatus | None:
    async with AsyncTaskProbe(address) as probe:
        return await probe.status(timeout)


def test_on_an_event_loop_a_status_has_the_same_fields(address: str) -> None:
    with StatusService(address, lambda: encoded_device(CPU, 3)):
        assert asyncio.run(probe_once(address, 10)) == TaskStatus(incarnation=3, devices=(CPU,))


def test_on_an_event_loop_no_server_is_none_at_once(address: str) -> None:
    assert asyncio.run(probe_once(address, 10)) is None


def test_on_an_event_loop_a_server_that_does_not_answer_raises(address: str) -> None:
    answered = threading.Event()

    def frozen() -> bytes:
        answered.wait()
        return b""

    with StatusService(address, frozen):
        with pytest.raises(TimeoutError, match=f"{address} did not answer within 0.3 s"):
            asyncio.run(probe_once(address, 0.3))
        answered.set()


def test_on_an_event_loop_a_silent_listener_does_not_answer() -> None:
    """As the kernel does for a frozen server; gRPC closes the connection, which would otherwise count as no server."""
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(TimeoutError):
        asyncio.run(probe_once(f"127.0.0.1:{silent.getsockname()[1]}", 0.3))


@pytest.mark.parametrize("reply", [b"", b"\xff\xff\xff"])
def test_on_an_event_loop_an_answer_of_something_else_is_none(address: str, reply: bytes) -> None:
    with StatusService(address, lambda: reply):
        assert asyncio.run(probe_once(address, 10)) is None


def test_on_an_event_loop_many_servers_are_probed_concurrently(address: str) -> None:
    """A server that does not answer delays no other probe."""

    async def ask_both() -> TaskStatus | None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            slow = asyncio.create_task(probe_once(f"127.0.0.1:{silent.getsockname()[1]}", 30))
            answer = await probe_once(address, 10)
            assert not slow.done()
            slow.cancel()
            await asyncio.gather(slow, return_exceptions=True)
        return answer

    with StatusService(address, lambda: encoded_device(CPU, 1)):
        assert asyncio.run(ask_both()) == TaskStatus(incarnation=1, devices=(CPU,))
