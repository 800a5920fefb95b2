"""The page about metrics lists exactly what `/metrics` exposes: names, types, labels and what they are."""

import re

from coordinator.dashboard.metrics import metrics_of
from coordinator.launch.serve import Health
from coordinator.launch.task_config import TaskConfig
from tests import ROOT
from tests.dashboard.made_cluster import MadeCluster

PAGE = (ROOT / "docs/reference/metrics.md").read_text(encoding="utf-8")
_ROW = re.compile(r"^\| `(\w+)` \| (\w+) \| (.*) ?\| (.+) \| (.+) \|$", re.MULTILINE)


def rows_of(section: str) -> list[tuple[str, str, frozenset[str], str]]:
    """Returns name, type, labels and meaning of each metric in a section of the page."""
    text = PAGE.partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    return [
        (name, kind, frozenset(re.findall(r"`(\w+)`", labels)), meaning)
        for name, kind, labels, _, meaning in _ROW.findall(text)
    ]


def exposed(text: str) -> list[tuple[str, str, frozenset[str], str]]:
    """Returns the same of each metric in the format of Prometheus."""
    metrics = re.findall(r"^# HELP (\w+) (.+)\n# TYPE \1 (\w+)\n((?:[^#].*\n)+)", text, re.MULTILINE)
    assert len(metrics) == text.count("# HELP ")
    return [
        (name, kind, frozenset(re.findall(r'[{,](\w+)="', samples)), meaning)
        for name, meaning, kind, samples in metrics
    ]


def test_the_page_lists_the_metrics_of_the_client() -> None:
    cluster = MadeCluster(3)
    cluster.checkpoint()
    assert rows_of("Of the client") == exposed(metrics_of(cluster.run(5)))


def test_the_page_lists_the_metrics_of_a_server() -> None:
    health = Health(TaskConfig({"worker": {0: "127.0.0.1:1"}}, "worker", 0), 0, "127.0.0.1")
    try:
        assert rows_of("Of a server") == exposed(health.answer("/metrics")[2])
    finally:
        health.close()


def test_a_unit_is_that_of_the_name() -> None:
    units = [(name, unit) for name, _, _, unit, _ in _ROW.findall(PAGE)]
    assert len(units) > 30
    for name, unit in units:
        for measured in ("seconds", "bytes"):
            assert (f"_{measured}" in name) == (measured in unit), (name, unit)


def test_every_label_of_the_client_is_explained() -> None:
    labels = frozenset[str]().union(*(row[2] for row in rows_of("Of the client")))
    explained = re.findall(r"^\| (`\w+`(?:, `\w+`)*) \| [^|]+ \|$", PAGE, re.MULTILINE)
    assert labels == set(re.findall(r"\w+", " ".join(explained)))
