"""Tests of what a probe, a plain connection and a server itself show of servers and of the links between them."""

import asyncio
import concurrent.futures
import contextlib
import socket
import threading
from collections.abc import Iterator

import grpc
import pytest

from coordinator.heartbeat import probes
from coordinator.heartbeat.probes import (
    CLOSE_SESSION,
    CREATE_SESSION,
    AsyncTaskProbe,
    CloseSessionRequest,
    CreateSessionRequest,
    CreateSessionResponse,
    Link,
    Obstacle,
    ServerLinks,
    TaskProbe,
    TaskStatus,
    begin_request,
    find_obstacles,
)
from coordinator.launch.server_process import free_addresses
from coordinator.testing.status_server import CPU, StatusService, encoded_device
from tests.deadline import LIMIT, wait_until
from tests.virtual_clock import VirtualClock

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


def test_a_server_that_does_not_answer_is_none_after_the_timeout(address: str, probe: TaskProbe) -> None:
    answered = threading.Event()

    def frozen() -> bytes:
        answered.wait()
        return encoded_device(CPU, 1)

    with StatusService(address, frozen):
        assert probe.status(timeout=0.1) is None
        answered.set()
        assert probe.status(timeout=10) == TaskStatus(incarnation=1, devices=(CPU,))


def test_no_server_is_none_at_once_and_so_is_an_answer_of_something_else(address: str, probe: TaskProbe) -> None:
    assert probe.status(timeout=LIMIT) is None
    replies = [b"", b"\xff\xff\xff", b"\x0a\x7f"]
    with StatusService(address, replies.pop):
        assert [probe.status(timeout=LIMIT) for _ in range(3)] == [None] * 3


def test_a_restarted_server_is_seen_with_its_new_incarnation(address: str, probe: TaskProbe) -> None:
    with StatusService(address, lambda: encoded_device(CPU, 1)):
        assert probe.status(timeout=10) == TaskStatus(incarnation=1, devices=(CPU,))
    for _ in range(20):
        assert probe.status(timeout=1) is None
    with StatusService(address, lambda: encoded_device(CPU, 2)):
        # gRPC's own back-off would make this wait for longer.
        wait_until(lambda: probe.status(timeout=1) == TaskStatus(incarnation=2, devices=(CPU,)))


def test_one_probe_serves_many_threads(address: str, probe: TaskProbe) -> None:
    with StatusService(address, lambda: encoded_device(CPU, 1)), concurrent.futures.ThreadPoolExecutor(8) as threads:
        answers = list(threads.map(lambda _: probe.status(timeout=10), range(200)))
    assert answers == [TaskStatus(incarnation=1, devices=(CPU,))] * 200


def test_closing_ends_a_probe_in_progress_and_all_use(address: str) -> None:
    begun, answered = threading.Event(), threading.Event()

    def frozen() -> bytes:
        begun.set()
        answered.wait()
        return b""

    probe = TaskProbe(address)
    with StatusService(address, frozen), concurrent.futures.ThreadPoolExecutor(1) as threads:
        answer = threads.submit(probe.status, 60)
        assert begun.wait(LIMIT)
        for _ in range(2):
            probe.close()
        assert answer.result(LIMIT) is None
        answered.set()
    with pytest.raises(ValueError, match="closed"):
        probe.status(timeout=1)


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


PLACES = {
    "no process": (lambda: contextlib.nullcontext(free_addresses(1)[0]), Obstacle.REFUSED),
    "bound but not listening": (bound_port, Obstacle.REFUSED),
    "unknown name": (lambda: contextlib.nullcontext("no-such-host.invalid:2222"), Obstacle.UNRESOLVED),
    "dropped packets": (full_listener, Obstacle.UNREACHED),
    "frozen": (silent_listener, Obstacle.SILENT),
}


def test_the_reasons_for_silence_are_told_apart_also_in_an_event_loop() -> None:
    with contextlib.ExitStack() as opened:
        expected = {opened.enter_context(place()): obstacle for place, obstacle in PLACES.values()}
        assert find_obstacles(expected) == expected

        async def find() -> dict[str, Obstacle]:
            return find_obstacles(refused)

        refused = free_addresses(2)
        assert asyncio.run(find()) == dict.fromkeys(refused, Obstacle.REFUSED)


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


class Master(grpc.GenericRpcHandler):
    """A server that answers `CreateSession` as it is told: with a session, with an error, or once `gate` is open."""

    def __init__(self) -> None:
        self.error: grpc.StatusCode | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.asked: list[CreateSessionRequest] = []
        self.closed: list[str] = []

    def service(self, details):
        if details.method == CREATE_SESSION:
            return grpc.unary_unary_rpc_method_handler(
                self.create, CreateSessionRequest.FromString, CreateSessionResponse.SerializeToString
            )
        assert details.method == CLOSE_SESSION
        return grpc.unary_unary_rpc_method_handler(self.close, CloseSessionRequest.FromString, lambda _: b"")

    def create(self, request, context):
        self.asked.append(request)
        self.gate.wait(LIMIT)
        if self.error is not None:
            context.abort(self.error, "Connection refused\nand more")
        return CreateSessionResponse(session_handle=f"session {len(self.asked)}")

    def close(self, request, context):
        self.closed.append(request.session_handle)


@pytest.fixture
def master() -> Master:
    return Master()


@pytest.fixture
def link(master: Master) -> Iterator[Link]:
    server = grpc.server(concurrent.futures.ThreadPoolExecutor(4), handlers=[master])
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    yield Link(f"127.0.0.1:{port}", "target:1")
    master.gate.set()
    server.stop(None).wait()


class Links:
    """Asks anew each time: the answers before are old by then."""

    def __init__(self, timeout: float) -> None:
        self._clock = VirtualClock()
        self._links = ServerLinks(timeout, self._clock)
        self.close = self._links.close

    def broken(self, link: Link) -> dict[Link, str]:
        self._clock.advance(1.0)
        return self._links.broken([link])


@pytest.fixture
def links() -> Iterator[Links]:
    with contextlib.closing(Links(LIMIT)) as links:
        yield links


def test_a_server_that_answers_reaches_the_other_and_what_it_made_is_freed(
    master: Master, link: Link, links: Links
) -> None:
    assert links.broken(link) == {}
    [request] = master.asked
    assert request.target == f"grpc://{link.source}"
    jobs = {job.name: [(task.key, task.value) for task in job.tasks] for job in request.config.cluster_def.job}
    assert jobs == {"coordinator_here": [(0, link.source)], "coordinator_there": [(0, "target:1")]}
    wait_until(lambda: master.closed == ["session 1"])


def test_a_server_that_fails_to_reach_the_other_says_so(master: Master, link: Link, links: Links) -> None:
    for code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL, grpc.StatusCode.CANCELLED):
        master.error = code
        assert links.broken(link) == {link: f"{code.name}: Connection refused"}
        master.error = None
        assert links.broken(link) == {}
    # A server that does not know the question shows nothing.
    for code in (grpc.StatusCode.UNIMPLEMENTED, grpc.StatusCode.INVALID_ARGUMENT):
        master.error = code
        assert links.broken(link) == {}


def test_an_unanswered_question_is_asked_once_and_answered_when_the_link_is_whole(master: Master, link: Link) -> None:
    master.gate.clear()
    with contextlib.closing(Links(timeout=0.1)) as links:
        for _ in range(3):
            assert links.broken(link)[link].startswith("no answer for ")
        assert len(master.asked) == 1
        master.gate.set()
        wait_until(lambda: links.broken(link) == {})
        assert len(master.asked) == 1
        wait_until(lambda: master.closed == ["session 1"])
        wait_until(lambda: links.broken(link) == {})
        assert len(master.asked) == 2


def test_many_threads_share_a_question_and_its_answer(master: Master, link: Link) -> None:
    master.gate.clear()
    with (
        contextlib.closing(ServerLinks(LIMIT, VirtualClock())) as links,
        concurrent.futures.ThreadPoolExecutor(8) as pool,
    ):
        asking = [pool.submit(links.broken, [link]) for _ in range(8)]
        wait_until(lambda: master.asked)
        master.gate.set()
        assert [each.result(LIMIT) for each in asking] == [{}] * 8
        assert links.broken([link]) == {}
        assert len(master.asked) == 1


def test_close_ends_a_wait(master: Master, link: Link) -> None:
    master.gate.clear()
    links = ServerLinks(LIMIT)
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        asking = pool.submit(links.broken, [link])
        wait_until(lambda: master.asked)
        links.close()
        asking.result(LIMIT)
    assert links.broken([link]) == {}


@pytest.mark.parametrize(("job", "index"), [("worker", 0), ("ps", 1)])
def test_servers_of_tensorflow_answer_the_question(shared_cluster, job: str, index: int) -> None:
    specification = shared_cluster.resolver.cluster_spec()
    source = specification.task_address(job, index)
    with contextlib.closing(ServerLinks(LIMIT)) as links:
        for other in range(2):
            target = specification.task_address("ps", other)
            if target != source:
                assert links.broken([Link(source, target)]) == {}


def test_a_request_is_made_without_a_thread_where_none_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    def answer(request: str, timeout: float) -> tuple[str, float, threading.Thread]:
        if request == "closed":
            raise ValueError("the channel is closed")
        return request, timeout, threading.current_thread()

    monkeypatch.setattr(threading.Thread, "start", refuse)
    made = begin_request(answer, "a request", 2.0)
    assert made.done()
    assert made.result() == ("a request", 2.0, threading.current_thread())
    assert isinstance(begin_request(answer, "closed", 2.0).exception(), ValueError)
    # It might never end.
    with pytest.raises(RuntimeError, match="can't create new thread"):
        begin_request(answer, "a request", None)
