import asyncio
import socket
import threading
from collections.abc import Iterator
from concurrent import futures

import pytest

from coordinator.heartbeat.probes import AsyncTaskProbe, TaskProbe, TaskStatus
from coordinator.launch.server_process import free_addresses
from coordinator.testing.status_server import CPU, StatusService, encoded_device
from tests.deadline import wait_until

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
        assert probe.status(timeout=0.1) is None
        answered.set()
        assert probe.status(timeout=10) == TaskStatus(incarnation=1, devices=(CPU,))


def test_an_answer_of_something_else_is_none(address: str, probe: TaskProbe) -> None:
    replies = [b"", b"\xff\xff\xff", b"\x0a\x7f"]
    with StatusService(address, replies.pop):
        assert [probe.status(timeout=10) for _ in range(3)] == [None] * 3


def test_a_restarted_server_is_seen_with_its_new_incarnation(address: str, probe: TaskProbe) -> None:
    with StatusService(address, lambda: encoded_device(CPU, 1)):
        assert probe.status(timeout=10) == TaskStatus(incarnation=1, devices=(CPU,))
    for _ in range(20):
        assert probe.status(timeout=1) is None
    with StatusService(address, lambda: encoded_device(CPU, 2)):
        # gRPC's own back-off would make this wait for longer.
        wait_until(lambda: probe.status(timeout=1) == TaskStatus(incarnation=2, devices=(CPU,)))


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


def test_on_an_event_loop_a_probe_has_the_same_results_and_delays_no_other(address: str) -> None:
    """A silent listener, as the kernel is for a frozen server, does not answer; gRPC would report no server."""

    async def probe(address: str, timeout: float) -> TaskStatus | None:
        async with AsyncTaskProbe(address) as probe:
            return await probe.status(timeout)

    async def ask() -> list[TaskStatus | None]:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            there = f"127.0.0.1:{silent.getsockname()[1]}"
            slow = asyncio.create_task(probe(there, 60))
            found = []
            for reply in (encoded_device(CPU, 3), b"", b"\xff\xff\xff"):
                with StatusService(address, lambda reply=reply: reply):
                    found.append(await probe(address, 10))
            found.append(await probe(address, 10))
            with pytest.raises(TimeoutError, match=f"{there} did not answer within 0.1 s"):
                await probe(there, 0.1)
            assert not slow.done()
            slow.cancel()
            await asyncio.gather(slow, return_exceptions=True)
        return found

    assert asyncio.run(ask()) == [TaskStatus(incarnation=3, devices=(CPU,)), None, None, None]


def test_on_an_event_loop_a_server_that_does_not_answer_raises(address: str) -> None:
    answered = threading.Event()

    async def ask() -> None:
        async with AsyncTaskProbe(address) as probe:
            with pytest.raises(TimeoutError, match=f"{address} did not answer within 0.1 s"):
                await probe.status(0.1)

    with StatusService(address, lambda: answered.wait() and b""):
        asyncio.run(ask())
        answered.set()
