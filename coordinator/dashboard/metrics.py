"""Writes the figures of the dashboard in the text format of Prometheus (version 0.0.4).

There are few labels: a worker's index, a parameter server's task, the name of a reported value, the kind of an event,
and the name and number of an update rule.
"""

import dataclasses
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from coordinator.dashboard.snapshot import RuleRow, ServerRow, Snapshot

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# The suffix of the metric's name (only in a histogram), the labels and the value.
_Sample = tuple[str, Mapping[str, Any], float]
# Name, type, help and samples.
_Metric = tuple[str, str, str, Sequence[_Sample]]
# Attribute of a `RuleRow` that is a count -> the end of the metric's name, and the metric's help.
_RULE_COUNTS = {
    "updates": ("updates_total", "Updates of the model."),
    "pushes": ("pushes_total", "Pushed gradients, rejected ones included."),
    "rejected": ("rejected_total", "Rejected gradients."),
    "bytes_pulled": ("pulled_bytes_total", "Size of the pulls."),
    "bytes_pushed": ("pushed_bytes_total", "Size of the pushes."),
}


class Metrics:
    """Writes the metrics of the latest snapshot. No count falls from one call to the next.

    Prometheus takes a falling count for a restart of the program, and adds the whole new value. A rule's counts fall
    when a checkpoint is restored, and a host's bytes when a network interface disappears. The written count then stays
    the same, and later grows with its source again.
    """

    def __init__(self, latest: Callable[[], Snapshot]) -> None:
        self._latest = latest
        # Rule or parameter server -> the counts that were read last, and the counts that were written last.
        self._written: dict[Any, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self._lock = threading.Lock()

    def text(self) -> str:
        with self._lock:
            snapshot = self._latest()
            rules, servers = map(self._rule, snapshot.rules), map(self._server, snapshot.servers)
            snapshot = dataclasses.replace(snapshot, rules=tuple(rules), servers=tuple(servers))
        return metrics_of(snapshot)

    def _rule(self, rule: RuleRow) -> RuleRow:
        counts = (*(getattr(rule, name) for name in _RULE_COUNTS), *rule.histogram)
        counts = self._grown((rule.name, rule.number), counts)
        named: dict[str, Any] = dict(zip(_RULE_COUNTS, counts, strict=False))
        return dataclasses.replace(rule, **named, histogram=counts[len(_RULE_COUNTS) :])

    def _server(self, row: ServerRow) -> ServerRow:
        received, sent = self._grown(row.usage.task, (row.usage.received, row.usage.sent))
        return dataclasses.replace(row, usage=dataclasses.replace(row.usage, received=received, sent=sent))

    def _grown(self, key: Any, counts: tuple[int, ...]) -> tuple[int, ...]:
        """Returns the counts that were written last, each increased by the growth of its source since then."""
        before, written = self._written.get(key, ((), ()))
        rows = itertools.zip_longest(counts, before, written, fillvalue=0)
        written = tuple(total + max(0, count - earlier) for count, earlier, total in rows)
        self._written[key] = counts, written
        return written


def metrics_of(snapshot: Snapshot) -> str:
    """Returns the metrics of a snapshot as text, leaving out metrics without samples."""
    parts = (_of_cluster, _of_workers, _of_servers, _of_rules)
    return "".join(_text(*metric) for part in parts for metric in part(snapshot))


def _text(name: str, kind: str, text: str, samples: Sequence[_Sample]) -> str:
    lines = [f"{name}{suffix}{_labels(labels)} {_number(value)}\n" for suffix, labels, value in samples]
    return "".join([f"# HELP {name} {text}\n# TYPE {name} {kind}\n", *lines]) if lines else ""


def _labels(labels: Mapping[str, Any]) -> str:
    escapes = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})
    inner = ",".join(f'{name}="{str(value).translate(escapes)}"' for name, value in labels.items())
    return f"{{{inner}}}" if inner else ""


def _number(value: float) -> str:
    # The shortest exact form of a number; integers are written without ".0".
    return str(int(value)) if float(value).is_integer() else repr(float(value))


def _of_cluster(snapshot: Snapshot) -> Iterator[_Metric]:
    for name, kind, text, value in (
        ("start_time_seconds", "gauge", "When the strategy was created.", snapshot.started),
        ("closures_waiting", "gauge", "Closures that wait for a worker.", snapshot.waiting),
        ("closures_running", "gauge", "Closures that a worker runs now.", snapshot.running),
        ("closures_finished_total", "counter", "Closures with a result.", snapshot.finished),
        ("closures_failed_total", "counter", "Closures with an error.", snapshot.failed),
        ("closures_cancelled_total", "counter", "Closures that were cancelled.", snapshot.cancelled),
        ("closures_retried_total", "counter", "Attempts after which a closure was queued again.", snapshot.retried),
        ("steps_lost_total", "counter", "Steps that were undone when a checkpoint was restored.", snapshot.steps_lost),
    ):
        yield f"coordinator_{name}", kind, text, [("", {}, value)]
    if saved_at := snapshot.checkpoint_time:
        text = "When the latest checkpoint was complete."
        yield "coordinator_checkpoint_time_seconds", "gauge", text, [("", {}, saved_at)]
    text = "Events, by their kind; closures of one call are one."
    counts = sorted(snapshot.event_counts.items())
    yield "coordinator_events_total", "counter", text, [("", {"kind": kind}, count) for kind, count in counts]
    text = "The latest of each value that the program reported."
    values = sorted(snapshot.values.items())
    yield "coordinator_reported_value", "gauge", text, [("", {"name": name}, value) for name, value in values]


def _of_workers(snapshot: Snapshot) -> Iterator[_Metric]:
    for name, kind, text, attribute in (
        ("closures_finished_total", "counter", "Closures with a result from the worker.", "finished"),
        ("closures_failed_total", "counter", "Closures with an error from the worker.", "failed"),
        ("closures_retried_total", "counter", "Attempts on the worker that were repeated.", "retried"),
        ("losses_total", "counter", "How often the worker was lost.", "losses"),
        ("reconnections_total", "counter", "How often the worker was reconnected.", "reconnections"),
        ("idle_ratio", "gauge", "Share of the last minute in which the worker ran nothing.", "idle"),
    ):
        samples = [("", {"worker": worker.index}, getattr(worker, attribute)) for worker in snapshot.workers]
        yield f"coordinator_worker_{name}", kind, text, samples
    states = [("", {"worker": worker.index}, worker.state == "live") for worker in snapshot.workers]
    yield "coordinator_worker_up", "gauge", "Whether the worker is live.", states


def _of_servers(snapshot: Snapshot) -> Iterator[_Metric]:
    usages = [row.usage for row in snapshot.servers]
    states = [("", {"task": usage.task}, usage.is_reachable) for usage in usages]
    yield "coordinator_parameter_server_up", "gauge", "Whether the parameter server answers.", states
    for name, kind, text, attribute in (
        ("resident_memory_bytes", "gauge", "Resident memory of the parameter server.", "memory"),
        ("cpu_seconds_total", "counter", "Processor time of the parameter server.", "cpu"),
        ("host_received_bytes_total", "counter", "What the host of the server received.", "received"),
        ("host_sent_bytes_total", "counter", "What the host of the server sent.", "sent"),
    ):
        samples = [("", {"task": usage.task}, getattr(usage, attribute)) for usage in usages if usage.time]
        yield f"coordinator_parameter_server_{name}", kind, text, samples


def _of_rules(snapshot: Snapshot) -> Iterator[_Metric]:
    labels = [{"rule": rule.name, "number": rule.number} for rule in snapshot.rules]
    for attribute, (name, text) in _RULE_COUNTS.items():
        counts = [getattr(rule, attribute) for rule in snapshot.rules]
        samples = [("", own, count) for own, count in zip(labels, counts, strict=True)]
        yield f"coordinator_rule_{name}", "counter", text, samples
    text = "Staleness of the pushed gradients, in updates."
    buckets = [each for rule, own in zip(snapshot.rules, labels, strict=True) for each in _buckets(rule.histogram, own)]
    yield "coordinator_rule_staleness_updates", "histogram", text, buckets


def _buckets(histogram: tuple[int, ...], labels: Mapping[str, Any]) -> Iterable[_Sample]:
    """Yields the samples of a rule's staleness, in buckets of doubling width."""
    limit, total = 1, sum(histogram)
    yield "_bucket", {**labels, "le": 0}, sum(histogram[:1])
    while limit < len(histogram):
        yield "_bucket", {**labels, "le": limit}, sum(histogram[: limit + 1])
        limit *= 2
    yield "_bucket", {**labels, "le": "+Inf"}, total
    yield "_sum", labels, sum(staleness * count for staleness, count in enumerate(histogram))
    yield "_count", labels, total
