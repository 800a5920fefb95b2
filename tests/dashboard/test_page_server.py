"""The server of the dashboard, as a browser and as somebody else's page talk to it."""

import dataclasses
import http.client
import json
import logging
import re
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest

from coordinator.addresses import PageAddress
from coordinator.dashboard.dashboard import Dashboard, PageServer, Publisher
from coordinator.dashboard.snapshot import ServerUsage
from coordinator.errors import LaunchError
from coordinator.events.event_stream import EventStream
from coordinator.statistics import ClusterStatistics
from tests.dashboard.made_cluster import MadeCluster
from tests.deadline import wait_until
from tests.virtual_clock import VirtualClock

# Not a secret.
TOKEN = "-".join(["open", "sesame"])


@pytest.fixture
def cluster() -> MadeCluster:
    return MadeCluster(2)


@pytest.fixture
def clock() -> VirtualClock:
    return VirtualClock()


@pytest.fixture
def publisher(cluster: MadeCluster, clock: VirtualClock) -> Publisher:
    return Publisher(cluster.run(3), clock)


@pytest.fixture
def server(publisher: Publisher) -> Iterator[PageServer]:
    server = PageServer(PageAddress("127.0.0.1", 0, TOKEN), publisher)
    yield server
    publisher.close()
    server.close(30.0)


def ask(
    server: PageServer, path: str, method: str = "GET", host: str | None = None
) -> tuple[http.client.HTTPResponse, str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request(method, path, headers={} if host is None else {"Host": host})
    response = connection.getresponse()
    text = response.read().decode()
    connection.close()
    return response, text


def test_the_page_and_its_files_are_served_with_a_policy_that_loads_nothing_else(server: PageServer) -> None:
    response, page = ask(server, f"/{TOKEN}/")
    assert response.status == 200
    assert response.headers["Content-Security-Policy"].startswith("default-src 'self'; ")
    assert response.headers["Referrer-Policy"] == "no-referrer"
    files = re.findall(r'(?:src|href)="([^"]+)"', page)
    assert {"dashboard.js", "dashboard.css", "uPlot.iife.min.js", "favicon.svg"} <= set(files)
    scripts = [ask(server, f"/{TOKEN}/{name}")[1] for name in server.files if name.endswith(".js")]
    files += [name for script in scripts for name in re.findall(r'from "\./([^"]+)"', script)]
    for name in set(files):
        response, _ = ask(server, f"/{TOKEN}/{name}")
        assert response.status == 200, name
    # Scripts and styles within the page would be refused by the policy.
    assert not re.search(r"<script>|<style|style=|onclick=|https?://", page)


def test_the_state_is_the_latest_snapshot_and_who_asked_counts_as_a_reader(
    server: PageServer, publisher: Publisher, cluster: MadeCluster, clock: VirtualClock
) -> None:
    assert not publisher.is_watched
    publisher.publish(cluster.run(1, away=[1]))
    response, text = ask(server, f"/{TOKEN}/api/state")
    assert response.headers["Content-Type"] == "application/json"
    assert [worker["state"] for worker in json.loads(text)["workers"]] == ["live", "lost"]
    clock.advance(1.0)
    assert json.loads(ask(server, f"/{TOKEN}/api/target")[1])["workers"] == 1
    clock.advance(74.0)
    assert publisher.is_watched
    clock.advance(1.0)
    assert not publisher.is_watched


def test_nothing_is_answered_without_the_token_or_to_a_site_that_resolves_here(server: PageServer) -> None:
    for path in ("/", "/metrics", f"/{TOKEN[:-1]}/metrics", f"/{TOKEN}x/", "//", "*"):
        response, text = ask(server, path)
        assert response.status == 403, path
        assert TOKEN not in f"{text}{response.headers}", path
    # A tunnel to this machine is let in, and a site that resolves to it is not.
    for host in ("evil.example", "127.0.0.1.evil.example", "", "10.0.0.1", "[", "localhost.evil:80"):
        assert ask(server, f"/{TOKEN}/api/state", host=host)[0].status == 403, host
    for host in ("localhost", "LOCALHOST:80", "127.0.0.1:8080", "[::1]:80"):
        assert ask(server, f"/{TOKEN}/api/state", host=host)[0].status == 200, host


def test_only_get_is_answered_and_other_paths_reach_no_file(server: PageServer) -> None:
    for method in ("POST", "OPTIONS"):
        assert ask(server, f"/{TOKEN}/api/state", method)[0].status == 501
    for path in ("../metrics.py", "..%2fmetrics.py", "uPlot.LICENSE", "//etc/passwd"):
        assert ask(server, f"/{TOKEN}/{path}")[0].status == 404
    response, _ = ask(server, f"/{TOKEN}")
    assert (response.status, response.headers["Location"]) == (301, f"/{TOKEN}/")


def test_a_stream_has_all_first_then_what_is_new_and_says_goodbye(
    server: PageServer, publisher: Publisher, cluster: MadeCluster
) -> None:
    assert not publisher.is_watched
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=30)
    connection.request("GET", f"/{TOKEN}/api/stream")
    stream = connection.getresponse()
    assert stream.headers["Content-Type"] == "text/event-stream"

    def next_message() -> str:
        lines = iter(stream.readline, b"\n")
        return b"".join(lines).decode()

    first = json.loads(next_message().removeprefix("data: "))
    assert publisher.is_watched
    publisher.publish(cluster.run(1))
    second = json.loads(next_message().removeprefix("data: "))
    assert second["finished"] > first["finished"]
    assert 0 < len(second["stream"]) < len(first["stream"])
    publisher.close()
    assert next_message() == "event: end\ndata: \n"
    connection.close()


def test_no_counter_of_prometheus_falls(server: PageServer, publisher: Publisher, cluster: MadeCluster) -> None:
    """A fall would be taken for a restart, and all that is left would be counted again."""
    snapshot = cluster.run(1)
    (rule,), (server_row,) = snapshot.rules, snapshot.servers

    def shown(pushes: int, histogram: tuple[int, ...], received: int) -> dict[str, int]:
        rules = (dataclasses.replace(rule, pushes=pushes, histogram=histogram),)
        usage = dataclasses.replace(server_row.usage, received=received)
        servers = (dataclasses.replace(server_row, usage=usage),)
        publisher.publish(dataclasses.replace(snapshot, rules=rules, servers=servers))
        values = dict(line.rsplit(" ", 1) for line in ask(server, f"/{TOKEN}/metrics")[1].splitlines())
        names = {
            "pushes": 'coordinator_rule_pushes_total{rule="BoundedDelay",number="0"}',
            "fresh": 'coordinator_rule_staleness_updates_bucket{rule="BoundedDelay",number="0",le="0"}',
            "gradients": 'coordinator_rule_staleness_updates_count{rule="BoundedDelay",number="0"}',
            "staleness": 'coordinator_rule_staleness_updates_sum{rule="BoundedDelay",number="0"}',
            "received": 'coordinator_parameter_server_host_received_bytes_total{task="ps 0"}',
        }
        return {word: int(values[name]) for word, name in names.items()}

    at_first = {"pushes": 10_000, "fresh": 9_000, "gradients": 10_000, "staleness": 1_000, "received": 5_000}
    assert shown(10_000, (9_000, 1_000), 5_000) == at_first
    # A checkpoint was restored, and a network interface has gone.
    assert shown(8_900, (8_900,), 400) == at_first
    later = {"pushes": 10_020, "fresh": 9_010, "gradients": 10_020, "staleness": 1_010, "received": 5_100}
    assert shown(8_920, (8_910, 10), 500) == later
    # The page shows what the rule itself has counted.
    assert publisher.watch().rules[0].pushes == 8_920


def test_a_port_in_use_is_one_clear_error(server: PageServer, publisher: Publisher) -> None:
    with pytest.raises(LaunchError, match=r"^The dashboard cannot listen at 127\.0\.0\.1, port \d+: Address already"):
        PageServer(PageAddress("127.0.0.1", server.server_port), publisher)


COUNTS = ClusterStatistics(waiting=0, running=0, finished=0, failed=0, cancelled=0, retried=0)


def test_the_page_goes_on_after_counts_that_could_not_be_read(
    clock: VirtualClock, caplog: pytest.LogCaptureFixture
) -> None:
    read: list[int] = []
    asked_servers_at: list[float] = []

    def statistics() -> ClusterStatistics:
        read.append(1)
        if 1 < len(read) < 5:
            raise ValueError("not now")
        return dataclasses.replace(COUNTS, finished=len(read))

    def usage() -> list[ServerUsage]:
        asked_servers_at.append(clock.now())
        return []

    def finished() -> int:
        clock.advance(0.5)
        with urllib.request.urlopen(dashboard.url + "api/state", timeout=30) as answer:
            return json.load(answer)["finished"]

    with caplog.at_level(logging.ERROR, logger="coordinator"):
        dashboard = Dashboard(PageAddress("127.0.0.1", 0), statistics, EventStream(), usage, list, clock)
        try:
            wait_until(lambda: clock.advance(0.5) or len(read) > 2)
            watched_from = clock.now()
            wait_until(lambda: finished() >= 5 and asked_servers_at)
        finally:
            dashboard.close()
    assert min(asked_servers_at) > watched_from, "nobody looked before"
    assert [record.getMessage() for record in caplog.records] == [
        "The dashboard could not show what is new; it keeps trying."
    ]
