import contextlib
import http.client
import json
import socket
from collections.abc import Iterator

import psutil
import pytest

from coordinator.launch.serve import Health
from coordinator.launch.server_process import free_addresses
from coordinator.launch.task_config import TaskConfig
from coordinator.testing import StatusServer


@pytest.fixture
def config() -> TaskConfig:
    return TaskConfig({"worker": {3: free_addresses(1)[0]}}, "worker", 3)


@pytest.fixture
def health(config: TaskConfig) -> Iterator[Health]:
    with contextlib.closing(Health(config, 0, "127.0.0.1")) as health:
        yield health


def ask(health: Health, path: str, at: str = "127.0.0.1", host: str | None = None) -> tuple[int, str]:
    """Returns the status and the text of an answer to a request for a host."""
    connection = http.client.HTTPConnection(at, health.port, timeout=60)
    connection.request("GET", path, headers={} if host is None else {"Host": host})
    with contextlib.closing(connection), connection.getresponse() as reply:
        return reply.status, reply.read().decode()


def test_health_is_good_once_the_server_answers(config: TaskConfig, health: Health) -> None:
    code, text = ask(health, "/healthz")
    assert (code, json.loads(text)) == (503, {"task": "/job:worker/task:3", "serving": False, "clients": 0})
    with StatusServer(config.address):
        assert ask(health, "/healthz")[0] == 503, "another process may have the port while this one starts"
        health.count_clients = lambda: 2
        code, text = ask(health, "/healthz?verbose")
        assert (code, json.loads(text)) == (200, {"task": "/job:worker/task:3", "serving": True, "clients": 2})
    assert ask(health, "/healthz")[0] == 503


def test_a_page_of_a_site_that_resolves_to_this_address_reads_nothing(health: Health) -> None:
    assert [ask(health, path)[0] for path in ("/metrics", "/etc/passwd")] == [200, 404]
    answers = {"127.0.0.1:1": 503, "localhost": 503, "[::1]:8080": 503, "10.0.0.1": 403, "evil.example": 403, "": 403}
    assert {host: ask(health, "/healthz", host=host)[0] for host in answers} == answers
    # Probes of an open server name its address or its task.
    answers = {"10.0.0.1:8080": 503, "[fd00::1]": 503, "job-worker-3.job:80": 503, "JOB-worker-3.job": 503, "job": 403}
    answers[socket.gethostname()] = 503
    config = TaskConfig({"worker": {3: "job-worker-3.job:2222"}}, "worker", 3)
    with contextlib.closing(Health(config, 0, None)) as opened:
        assert {host: ask(opened, "/healthz", host=host)[0] for host in answers} == answers


def test_the_health_of_an_open_server_is_answered_over_ipv4_and_ipv6(config: TaskConfig) -> None:
    with contextlib.closing(Health(config, 0, None)) as health:
        bound = [each.laddr.ip for each in psutil.Process().net_connections("tcp") if each.laddr.port == health.port]
        assert bound == ["::" if socket.has_dualstack_ipv6() else "0.0.0.0"]  # noqa: S104 - what was bound
        for host in ("127.0.0.1", "::1") if _has_ipv6() else ("127.0.0.1",):
            assert ask(health, "/healthz", host)[0] == 503


def _has_ipv6() -> bool:
    """Returns whether this machine has the loopback address of IPv6."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True
