import http.client
import json
import socket
import urllib.error
import urllib.request
from collections.abc import Iterator

import psutil
import pytest

from coordinator.errors import LaunchError
from coordinator.launch.serve import Health
from coordinator.launch.server_process import free_addresses
from coordinator.launch.task_config import TaskConfig
from coordinator.testing import StatusServer


@pytest.fixture
def config() -> TaskConfig:
    return TaskConfig({"worker": {3: free_addresses(1)[0]}}, "worker", 3)


@pytest.fixture
def health(config: TaskConfig) -> Iterator[Health]:
    health = Health(config, 0, "127.0.0.1")
    yield health
    health.close()


def ask(health: Health, path: str, host: str = "127.0.0.1") -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{host}:{health.port}{path}", timeout=60) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def test_health_is_good_once_the_server_answers(config: TaskConfig, health: Health) -> None:
    code, text = ask(health, "/healthz")
    assert (code, json.loads(text)) == (503, {"task": "/job:worker/task:3", "serving": False, "clients": 0})
    with StatusServer(config.address):
        assert ask(health, "/healthz")[0] == 503, "another process may have the port while this one starts"
        health.count_clients = lambda: 2
        code, text = ask(health, "/healthz?verbose")
        assert (code, json.loads(text)) == (200, {"task": "/job:worker/task:3", "serving": True, "clients": 2})
    assert ask(health, "/healthz")[0] == 503


def test_metrics_are_in_the_format_of_prometheus(health: Health) -> None:
    code, text = ask(health, "/metrics")
    values = dict(line.rsplit(" ", 1) for line in text.splitlines() if not line.startswith("#"))
    assert code == 200
    assert values['coordinator_server_serving{task="/job:worker/task:3"}'] == "0"
    assert float(values["process_resident_memory_bytes"]) > 2**20
    assert float(values["process_cpu_seconds_total"]) > 0
    assert all(f"# HELP {name.partition('{')[0]} " in text for name in values)


def test_nothing_else_is_answered_and_nothing_can_be_changed(health: Health) -> None:
    assert ask(health, "/etc/passwd")[0] == 404
    request = urllib.request.Request(f"http://127.0.0.1:{health.port}/healthz", method="POST", data=b"x")
    with pytest.raises(urllib.error.HTTPError, match="501") as raised:
        urllib.request.urlopen(request, timeout=60)
    raised.value.close()


@pytest.mark.parametrize(
    ("host", "code"),
    [
        ("127.0.0.1:1", 503),
        ("localhost", 503),
        ("[::1]:8080", 503),
        ("10.0.0.1", 403),
        ("evil.example", 403),
        ("", 403),
    ],
)
def test_a_page_of_a_site_that_resolves_to_this_address_reads_nothing(health: Health, host: str, code: int) -> None:
    assert asked_as(health, host) == code


@pytest.mark.parametrize(
    ("host", "code"),
    [("10.0.0.1:8080", 503), ("[fd00::1]", 503), ("job-worker-3.job:80", 503), ("JOB-worker-3.job", 503), ("job", 403)],
)
def test_probes_of_an_open_server_name_its_address_or_its_task(host: str, code: int) -> None:
    health = Health(TaskConfig({"worker": {3: "job-worker-3.job:2222"}}, "worker", 3), 0, None)
    try:
        assert asked_as(health, host) == code
        assert asked_as(health, socket.gethostname()) == 503
    finally:
        health.close()


def asked_as(health: Health, host: str) -> int:
    """Returns the status of an answer to a request for this host."""
    connection = http.client.HTTPConnection("127.0.0.1", health.port, timeout=60)
    connection.request("GET", "/healthz", headers={"Host": host})
    status = connection.getresponse().status
    connection.close()
    return status


def test_the_health_of_a_local_server_can_be_asked_on_this_machine_alone(health: Health) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", health.port), timeout=60)


def test_the_health_of_an_open_server_is_answered_over_ipv4_and_ipv6(config: TaskConfig) -> None:
    health = Health(config, 0, None)
    try:
        bound = [each.laddr.ip for each in psutil.Process().net_connections("tcp") if each.laddr.port == health.port]
        assert bound == ["::" if socket.has_dualstack_ipv6() else "0.0.0.0"]  # noqa: S104 - what was bound
        for host in ("127.0.0.1", "[::1]") if _has_ipv6() else ("127.0.0.1",):
            assert ask(health, "/healthz", host)[0] == 503
    finally:
        health.close()


def _has_ipv6() -> bool:
    """Returns whether this machine has the loopback address of IPv6."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize("port", [-1, 65_536])
def test_a_port_that_does_not_exist_is_refused(config: TaskConfig, port: int) -> None:
    with pytest.raises(LaunchError, match=r"it must be from 0 to 65535\. Give it another --health-port"):
        Health(config, port, None)
