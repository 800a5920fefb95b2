"""The page in a real Chromium, and its metrics in a real Prometheus."""

import importlib
import json
import shutil
import subprocess
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import portpicker
import pytest

from coordinator.addresses import PageAddress
from coordinator.dashboard.dashboard import PageServer, Publisher
from coordinator.dashboard.snapshot import Snapshot
from tests.dashboard.made_cluster import MadeCluster
from tests.deadline import wait_until

pytestmark = pytest.mark.release


@pytest.fixture
def browser() -> Iterator[object]:
    # Not an import statement: the other tests need no such package.
    webdriver = importlib.import_module("selenium.webdriver")
    options = webdriver.ChromeOptions()
    for argument in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    with webdriver.Chrome(options, webdriver.ChromeService("/usr/bin/chromedriver")) as browser:
        yield browser


def texts(browser: object, selector: str) -> list[str]:
    script = "return [...document.querySelectorAll(arguments[0])].map((each) => each.textContent)"
    return browser.execute_script(script, selector)


def test_all_of_a_cluster_is_shown_without_an_error_at_any_width(browser: object) -> None:
    for workers in (1, 4, 256):
        for width in (1440, 390):
            size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
            browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
            _show(browser, workers, width)
    # That the servers are gone at the end is no error.
    assert [entry["message"] for entry in browser.get_log("browser") if "ERR_" not in entry["message"]] == []


def _show(browser: object, workers: int, width: int) -> None:
    cluster = MadeCluster(workers)
    cluster.run(10)
    cluster.checkpoint()
    publisher = Publisher(cluster.run(2, away=[workers - 1]))
    server = PageServer(PageAddress("127.0.0.1", 0), publisher)
    try:
        browser.get(server.url)
        wait_until(lambda: len(texts(browser, "#workers tbody tr")) == workers)
        assert texts(browser, "#workers tr.lost td:first-child") == [str(workers - 1)]
        assert len(texts(browser, "#timeline li")) == 3
        assert texts(browser, "#connection") == ["Live"]
        assert len(texts(browser, "#rules .bars div")) in range(2, 25)
        # Nothing is wider than the page.
        assert browser.execute_script("return document.documentElement.scrollWidth") <= width
        publisher.publish(cluster.run(1))
        wait_until(lambda: not texts(browser, "#workers tr.lost"))
        publisher.close()
        wait_until(lambda: texts(browser, "#connection") == ["Ended"])
    finally:
        publisher.close()
        server.close(30.0)


CONFIGURATION = """
scrape_configs:
  - job_name: training
    scrape_interval: 1s
    metrics_path: /my-token/metrics
    static_configs:
      - targets: ["127.0.0.1:{port}"]
"""


@pytest.fixture
def scraped(tmp_path: Path) -> Iterator[tuple[str, Snapshot]]:
    """The address of a Prometheus that scrapes a dashboard, and what this shows."""
    program = shutil.which("prometheus")
    assert program, "prometheus is not installed: apt-get install prometheus"
    snapshot = MadeCluster(3).run(5)
    publisher = Publisher(snapshot)
    server = PageServer(PageAddress("127.0.0.1", 0, "my-token"), publisher)
    (tmp_path / "prometheus.yml").write_text(CONFIGURATION.format(port=server.server_port))
    own = f"127.0.0.1:{portpicker.pick_unused_port()}"
    options = [f"--config.file={tmp_path}/prometheus.yml", f"--storage.tsdb.path={tmp_path}/data"]
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([program, *options, f"--web.listen-address={own}"], stderr=log, cwd=tmp_path)
        yield own, snapshot
        process.terminate()
        process.wait(30)
    publisher.close()
    server.close(30.0)


def test_prometheus_has_each_worker_and_the_counts_of_the_cluster(scraped: tuple[str, Snapshot]) -> None:
    address, snapshot = scraped

    def found(query: str) -> dict[str, float]:
        """Returns the values that Prometheus has, by worker."""
        url = f"http://{address}/api/v1/query?{urllib.parse.urlencode({'query': query})}"
        try:
            with urllib.request.urlopen(url, timeout=10) as answer:
                results = json.load(answer)["data"]["result"]
        except OSError:
            return {}
        return {each["metric"].get("worker", ""): float(each["value"][1]) for each in results}

    wait_until(lambda: found("coordinator_closures_finished_total"), limit=60.0)
    assert found("coordinator_closures_finished_total") == {"": snapshot.finished}
    assert found("coordinator_worker_up") == {"0": 1.0, "1": 1.0, "2": 1.0}
    assert found("sum(coordinator_rule_staleness_updates_count)") == {"": snapshot.rules[0].pushes}
    assert found("up") == {"": 1.0}
