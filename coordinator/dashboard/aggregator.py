"""Computes what the dashboard shows from the counts of a cluster and its events.

    statistics() --\
    events ---------+--> Aggregator --> Snapshot --> page, /api/state, /metrics, coordinator top
    server usage --/

It promises to read no clock and to start nothing: the times are those of the events and of the caller.
"""

import dataclasses
import itertools
from collections import Counter, deque
from collections.abc import Callable, Sequence

from coordinator.dashboard.history import HistoryRecorder
from coordinator.dashboard.scale_advice import Load, ScaleAdvice, scale_advice
from coordinator.dashboard.snapshot import RuleRow, ServerRow, Snapshot, WorkerRow
from coordinator.dashboard.task_stream import STREAM_LENGTH, TaskStream
from coordinator.dashboard.timeline import Timeline
from coordinator.dashboard.usage import ServerUsage, UsageRecord, is_comparable
from coordinator.events.event_stream import Event
from coordinator.statistics import ClusterStatistics, WorkerStatistics

# Rates are means of this time, in seconds.
_RATE_WINDOW = 10.0
# What the end of a call means to the task stream.
_OUTCOMES = {
    "closures_finished": "finished",
    "closures_failed": "failed",
    "closures_cancelled": "cancelled",
    "closures_retried": "retried",
    "worker_lost": "lost",
}


@dataclasses.dataclass(frozen=True)
class _Sample:
    """What was counted at one moment: in all, and by worker."""

    time: float
    total: int
    finished: dict[int, float]
    busy: dict[int, float]


class Aggregator:
    """Collects events and counts, and makes snapshots of them.

    Args:
      started: when the strategy was created.
      program: its file name.
    """

    def __init__(self, started: float, program: str) -> None:
        self._started = started
        self._program = program
        self._history = HistoryRecorder(started)
        self._stream = TaskStream()
        self._timeline = Timeline()
        self._counts: Counter[str] = Counter()
        self._checkpoint = "", 0.0
        self._steps_lost = 0
        self._samples: deque[_Sample] = deque([_Sample(started, 0, {}, {})])
        self._usage = UsageRecord(_RATE_WINDOW)
        self._has_new_usage = False
        self._advice: ScaleAdvice | None = None

    def add(self, events: Sequence[Event], dropped: int, now: float) -> None:
        """Adds events, in order.

        Args:
          events: those since the last call.
          dropped: how many were lost before the first of them.
          now: the present time.
        """
        if dropped:
            self._timeline.add_gap(now, dropped)
        for event in events:
            self._counts[event.kind] += 1
            self._add_to_stream(event)
            self._timeline.add(event)
            if event.kind == "checkpoint_saved":
                self._checkpoint = event.name, event.time
            elif event.kind == "value_reported":
                self._history.report(event.name, float(event.detail))
            elif event.kind == "parameter_server_recovered":
                self._steps_lost += event.count

    def add_usage(self, usage: Sequence[ServerUsage]) -> None:
        """Adds what the parameter servers and the client use now."""
        self._has_new_usage = self._usage.add(usage) or self._has_new_usage

    def snapshot(self, now: float, statistics: ClusterStatistics, rules: Sequence[RuleRow] = ()) -> Snapshot:
        """Adds the counts of one moment, and returns all that is shown.

        Args:
          now: the present time.
          statistics: the counts.
          rules: the counters of the update rules.
        """
        self._history.advance(now, statistics.finished)
        self._add_sample(now, statistics)
        path, saved_at = self._checkpoint
        counts = ("waiting", "running", "finished", "failed", "cancelled", "retried")
        workers, rate = self._rows(statistics.workers, rules), self._rate()
        self._update_advice(workers, statistics.waiting)
        return Snapshot(
            time=now,
            started=self._started,
            program=self._program,
            rate=rate,
            **{name: getattr(statistics, name) for name in counts},
            checkpoint_time=saved_at,
            checkpoint=path,
            values=dict(self._history.latest),
            steps_lost=self._steps_lost,
            event_counts=dict(self._counts),
            workers=workers,
            servers=tuple(_server_row(*pair) for pair in self._usage.pairs() if pair[0].task != "client"),
            rules=tuple(rules),
            history=self._history.history(),
            timeline=self._timeline.entries(),
            stream=self._stream.segments(now),
            advice=self._advice,
        )

    def _update_advice(self, workers: Sequence[WorkerRow], waiting: int) -> None:
        idle, resources = [row.idle for row in workers if row.state == "live"], self._usage.resources()
        if not (self._has_new_usage and idle and resources):
            return
        begin, end = self._usage.period()
        if end <= begin:
            # What the latest task had used before cannot be compared: it was started again, or has a network less.
            return
        # Of the time in which the usage was measured: both began and ended together.
        rate = (self._finished_at(end) - self._finished_at(begin)) / (end - begin)
        # It takes milliseconds for hundreds of workers.
        if rate > 0:
            self._advice = scale_advice(Load(len(idle), rate, resources, sum(idle) / len(idle), waiting))
            self._has_new_usage = False

    def _finished_at(self, time: float) -> float:
        """Returns how many closures had finished then, on a straight line between two samples."""
        for before, after in itertools.pairwise(self._samples):
            if before.time < after.time and time <= after.time:
                share = max(0.0, time - before.time) / (after.time - before.time)
                return before.total + share * (after.total - before.total)
        return self._samples[-1].total

    def _add_to_stream(self, event: Event) -> None:
        job, _, index = event.task.partition(" ")
        if job != "worker":
            return
        if event.kind == "closures_started":
            self._stream.begin(int(index), event.time, event.name, event.count)
        elif event.kind in _OUTCOMES:
            self._stream.end(int(index), event.time, _OUTCOMES[event.kind])

    def _add_sample(self, now: float, statistics: ClusterStatistics) -> None:
        self._samples.append(
            _Sample(
                now,
                statistics.finished,
                {worker.index: worker.finished for worker in statistics.workers},
                {worker.index: self._stream.busy_seconds(worker.index, now) for worker in statistics.workers},
            )
        )
        while len(self._samples) > 2 and self._samples[1].time <= now - STREAM_LENGTH:
            self._samples.popleft()

    def _window(self, seconds: float) -> list[_Sample]:
        """Returns the samples of the last `seconds`, at least the latest."""
        return [sample for sample in self._samples if sample.time >= self._samples[-1].time - seconds]

    def _rate(self) -> float:
        first, latest = self._window(_RATE_WINDOW)[0], self._samples[-1]
        return (latest.total - first.total) / (latest.time - first.time) if latest.time > first.time else 0.0

    def _rows(self, workers: Sequence[WorkerStatistics], rules: Sequence[RuleRow]) -> tuple[WorkerRow, ...]:
        indices = [worker.index for worker in workers]
        short, long = self._window(_RATE_WINDOW), self._window(STREAM_LENGTH)
        rates = {index: _per_second(index, short, lambda sample: sample.finished) for index in indices}
        busy = {index: _per_second(index, long, lambda sample: sample.busy) for index in indices}
        fastest = max(rates.values(), default=0.0)
        rows = []
        for worker in workers:
            running = self._stream.running(worker.index)
            waited = [rule.waited[worker.index] for rule in rules if worker.index in rule.waited]
            rows.append(
                WorkerRow(
                    index=worker.index,
                    state=worker.state,
                    function=running.function if running else "",
                    calls=running.closures if running else 0,
                    running_since=running.start if running else 0.0,
                    rate=rates[worker.index],
                    share=rates[worker.index] / fastest if fastest else 0.0,
                    idle=min(1.0, max(0.0, 1.0 - busy[worker.index])),
                    waited=max(waited, default=None),
                    finished=worker.finished,
                    failed=worker.failed,
                    retried=worker.retried,
                    losses=worker.losses,
                    reconnections=worker.reconnections,
                    reconnecting_seconds=worker.reconnecting_seconds,
                )
            )
        return tuple(rows)


def _per_second(worker: int, window: Sequence[_Sample], counts: Callable[[_Sample], dict[int, float]]) -> float:
    """Returns the rate of a count of one worker, from the first sample that has the worker."""
    latest = window[-1]
    first = next(sample for sample in window if worker in counts(sample))
    seconds = latest.time - first.time
    return (counts(latest)[worker] - counts(first)[worker]) / seconds if seconds > 0 else 0.0


def _server_row(latest: ServerUsage, before: ServerUsage) -> ServerRow:
    seconds = latest.time - before.time
    if not is_comparable(latest, before):
        return ServerRow(latest, 0.0, 0.0, 0.0)
    return ServerRow(
        latest,
        (latest.cpu - before.cpu) / seconds,
        (latest.received - before.received) / seconds,
        (latest.sent - before.sent) / seconds,
    )
