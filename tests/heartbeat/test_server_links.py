"""Tests that servers say which servers they reach; without TensorFlow, and on a real cluster."""

import concurrent.futures
import contextlib
import threading
from collections.abc import Iterator

import grpc
import pytest

from coordinator.heartbeat.probes import (
    CLOSE_SESSION,
    CREATE_SESSION,
    CloseSessionRequest,
    CreateSessionRequest,
    CreateSessionResponse,
    Link,
    ServerLinks,
)
from tests.deadline import LIMIT, wait_until
from tests.virtual_clock import VirtualClock


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


@pytest.mark.parametrize(("job", "index"), [("worker", 0), ("worker", 1), ("ps", 1)])
def test_servers_of_tensorflow_answer_the_question(shared_cluster, job: str, index: int) -> None:
    specification = shared_cluster.resolver.cluster_spec()
    source = specification.task_address(job, index)
    with contextlib.closing(ServerLinks(LIMIT)) as links:
        for other in range(2):
            target = specification.task_address("ps", other)
            if target != source:
                assert links.broken([Link(source, target)]) == {}
