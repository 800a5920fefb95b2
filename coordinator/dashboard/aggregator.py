"""Computes what the dashboard shows from the counts of a cluster and its events.

    statistics() --\
    events ---------+--> Aggregator --> Snapshot --> page, /api/state, /metrics, coordinator top
    server usage --/

Guarantees: the aggregator reads no clock and starts no thread. All times come from the events and the caller. The
aggregator's memory is bounded.
"""

import dataclasses
import itertools
import math
import pathlib
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Sequence

from coordinator.dashboard.scale_advice import Load, ScaleAdvice, scale_advice
from coordinator.dashboard.snapshot import (
    RateHistory,
    RuleRow,
    Segment,
    ServerRow,
    ServerUsage,
    Snapshot,
    TimelineEntry,
    UsageRecord,
    WorkerRow,
    is_comparable,
)
from coordinator.events.event_stream import Event
from coordinator.statistics import ClusterStatistics, WorkerStatistics

# The maximum number of periods in a history, an even number. The length of each period at first, in seconds.
_MOST_PERIODS, _FIRST_PERIOD = 600, 1.0
# The maximum number of reported names in a history; further names are left out.
_MOST_NAMES = 8


class HistoryRecorder:
    """Collects the finished closures and the reported values of each period of the training.

    Periods have equal lengths. When there are too many periods, pairs of periods are merged. A history shows every
    second of a run of a minute, and the whole course of a run of a week.
    """

    def __init__(self, started: float) -> None:
        self._period = _FIRST_PERIOD
        self._began = started
        self._finished = 0
        self._sums: dict[str, tuple[float, int]] = {}
        self._times: list[float] = []
        self._rates: list[float] = []
        self._columns: dict[str, list[float | None]] = {}
        self.latest: dict[str, float] = {}

    def report(self, name: str, value: float) -> None:
        """Adds a value to the present period. Infinity and NaN are left out, because they cannot be drawn."""
        if not math.isfinite(value) or (name not in self.latest and len(self.latest) >= _MOST_NAMES):
            return
        self.latest[name] = value
        total, count = self._sums.get(name, (0.0, 0))
        self._sums[name] = total + value, count + 1

    def advance(self, now: float, finished: int) -> None:
        """Ends the present period if it is over. `finished` counts closures since the strategy was created."""
        seconds = now - self._began
        if seconds < self._period:
            return
        self._times.append(now)
        self._rates.append((finished - self._finished) / seconds)
        for name in self._sums:
            self._columns.setdefault(name, [None] * (len(self._times) - 1))
        for name, column in self._columns.items():
            total, count = self._sums.get(name, (0.0, 0))
            column.append(total / count if count else None)
        self._began, self._finished, self._sums = now, finished, {}
        if len(self._times) == _MOST_PERIODS:
            self._period *= 2
            self._times = self._times[1::2]
            self._rates = [sum(pair) / 2 for pair in zip(self._rates[::2], self._rates[1::2], strict=True)]
            self._columns = {name: _halved(column) for name, column in self._columns.items()}

    def history(self) -> RateHistory:
        values = {name: tuple(column) for name, column in self._columns.items()}
        return RateHistory(tuple(self._times), tuple(self._rates), values)


def _halved(column: list[float | None]) -> list[float | None]:
    """Returns the mean of each pair of values, leaving out None."""
    halved: list[float | None] = []
    for pair in zip(column[::2], column[1::2], strict=True):
        known = [value for value in pair if value is not None]
        halved.append(sum(known) / len(known) if known else None)
    return halved


# The length of the task stream, in seconds.
STREAM_LENGTH = 60.0
# The shortest break that is shown, in seconds: a tenth of a percent of the width. For many workers, whose rows are a
# few pixels high, the shortest break is longer.
_BREAK, _BREAK_OF_MANY = 0.06, 0.5
_MANY = 64


@dataclasses.dataclass
class _Worker:
    running: Segment | None = None
    busy: float = 0.0
    segments: deque[Segment] = dataclasses.field(default_factory=deque)


class TaskStream:
    """Collects what each worker has run in the last minute, from the events of closures.

    Calls of one function with short breaks form one segment, so a thousand short calls a second are as cheap to show as
    one long call. Busy time is exact.
    """

    def __init__(self) -> None:
        self._workers: defaultdict[int, _Worker] = defaultdict(_Worker)

    def begin(self, worker: int, time: float, function: str, closures: int) -> None:
        self._workers[worker].running = Segment(worker, time, time, function, "running", closures)

    def end(self, worker: int, time: float, outcome: str) -> None:
        state = self._workers[worker]
        if state.running is None:
            return
        ended = dataclasses.replace(state.running, end=max(time, state.running.start), outcome=outcome)
        state.running = None
        state.busy += ended.end - ended.start
        last = state.segments[-1] if state.segments else None
        if last is not None and self._continues(last, ended):
            closures = last.closures + ended.closures
            state.segments[-1] = dataclasses.replace(last, end=ended.end, closures=closures)
        else:
            state.segments.append(ended)

    def running(self, worker: int) -> Segment | None:
        return self._workers[worker].running

    def busy_seconds(self, worker: int, now: float) -> float:
        """Returns how long a worker has been busy, in seconds."""
        state = self._workers[worker]
        return state.busy + (max(0.0, now - state.running.start) if state.running else 0.0)

    def segments(self, now: float) -> tuple[Segment, ...]:
        """Returns the segments of the last minute, by worker and time; drops older ones."""
        shown: list[Segment] = []
        for _, state in sorted(self._workers.items()):
            while state.segments and state.segments[0].end < now - STREAM_LENGTH:
                state.segments.popleft()
            shown += state.segments
            if state.running is not None:
                shown.append(dataclasses.replace(state.running, end=max(now, state.running.start)))
        return tuple(shown)

    def _continues(self, last: Segment, ended: Segment) -> bool:
        shortest = _BREAK if len(self._workers) <= _MANY else _BREAK_OF_MANY
        is_same = (last.function, last.outcome) == (ended.function, ended.outcome)
        # Segments are shorter than the stream, so that old segments can be dropped.
        return is_same and ended.start - last.end < shortest and ended.end - last.start < STREAM_LENGTH / 10


_MOST_ENTRIES = 200
# The maximum length of an error's message, in characters.
_LONGEST_DETAIL = 300
# Kind of an event in the timeline -> level and text.
_WORDS = {
    "worker_lost": ("error", "{event.task} was lost{detail}"),
    "worker_returned": ("good", "{event.task} is connected{after}"),
    "worker_joined": ("good", "{event.task} joined{detail}"),
    "worker_left": ("info", "{event.task} left{detail}"),
    # The entry omits the detail of this event, which is the whole message of an error.
    "parameter_server_lost": ("error", "{event.task} was lost"),
    "parameter_server_recovered": ("good", "The parameter servers are back{after}{source}, {event.count:,} steps lost"),
    "checkpoint_saved": ("info", "Checkpoint {file} saved in {event.seconds:.1f} s"),
    "checkpoint_failed": ("error", "Checkpoint {file} failed{detail}"),
    "function_quarantined": ("error", "{event.name} is quarantined{detail}"),
    "thread_failed": ("error", "The thread {event.name} met an error and goes on{detail}"),
    "rule_changed": ("info", "The update rule has changed{detail}"),
    "closures_failed": ("warning", "{event.name} failed{on}{detail}"),
}


class Timeline:
    """The latest events, without the events of running closures."""

    def __init__(self) -> None:
        # Oldest first.
        self.entries: deque[TimelineEntry] = deque(maxlen=_MOST_ENTRIES)
        self._number = 0

    def add(self, event: Event) -> None:
        if event.kind not in _WORDS:
            return
        level, words = _WORDS[event.kind]
        file = pathlib.PurePath(event.name).name
        text = words.format(
            event=event,
            file=file,
            source=f" from {file}" if event.name else "",
            detail=f": {event.detail[:_LONGEST_DETAIL]}" if event.detail else "",
            after=f" after {event.seconds:.1f} s" if event.seconds else "",
            on=f" on {event.task}" if event.task else "",
        )
        self._append(event.time, event.kind, level, event.task, text)

    def add_gap(self, time: float, dropped: int) -> None:
        """Adds an entry about events that were dropped because they came faster than the dashboard read them."""
        self._append(time, "events_dropped", "info", "", f"{dropped:,} events were not read in time")

    def _append(self, time: float, kind: str, level: str, task: str, text: str) -> None:
        last = self.entries[-1] if self.entries else None
        self._number += 1
        if last is not None and (last.kind, last.text) == (kind, text):
            # Equal entries are merged, because repeated failures of one function would displace all other entries.
            self.entries[-1] = dataclasses.replace(last, time=time)
        else:
            self.entries.append(TimelineEntry(self._number, time, kind, level, task, text))


# The period over which rates are averaged, in seconds.
_RATE_WINDOW = 10.0
# The kind of event that ends a call -> the outcome in the task stream.
_OUTCOMES = {
    "closures_finished": "finished",
    "closures_failed": "failed",
    "closures_cancelled": "cancelled",
    "closures_retried": "retried",
    "worker_lost": "lost",
}
# The attributes of a `WorkerRow` that are copied from the worker's statistics.
_WORKER_COUNTS = ("finished", "failed", "retried", "losses", "reconnections", "reconnecting_seconds")


@dataclasses.dataclass(frozen=True)
class _Sample:
    """Counts at a `time`: finished closures in `total`, and by worker; `busy` has the busy seconds by worker."""

    time: float
    total: int
    finished: dict[int, float]
    busy: dict[int, float]


class Aggregator:
    """Makes snapshots from the events and counts of a strategy, which `program` created at the time `started`."""

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
        """Adds the events since the last call, in order; `dropped` events were lost before them."""
        if dropped:
            self._timeline.add_gap(now, dropped)
        for event in events:
            self._counts[event.kind] += 1
            job, _, index = event.task.partition(" ")
            if job == "worker" and event.kind == "closures_started":
                self._stream.begin(int(index), event.time, event.name, event.count)
            elif job == "worker" and event.kind in _OUTCOMES:
                self._stream.end(int(index), event.time, _OUTCOMES[event.kind])
            self._timeline.add(event)
            if event.kind == "checkpoint_saved":
                self._checkpoint = event.name, event.time
            elif event.kind == "value_reported":
                self._history.report(event.name, float(event.detail))
            elif event.kind == "parameter_server_recovered":
                self._steps_lost += event.count

    def add_usage(self, usage: Sequence[ServerUsage]) -> None:
        """Adds the present usage of the parameter servers and the client."""
        self._has_new_usage = self._usage.add(usage) or self._has_new_usage

    def snapshot(self, now: float, statistics: ClusterStatistics, rules: Sequence[RuleRow] = ()) -> Snapshot:
        """Adds the counts at `now`; returns a snapshot of all that the dashboard shows."""
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
            timeline=tuple(self._timeline.entries),
            stream=self._stream.segments(now),
            advice=self._advice,
        )

    def _update_advice(self, workers: Sequence[WorkerRow], waiting: int) -> None:
        idle, resources = [row.idle for row in workers if row.state == "live"], self._usage.resources()
        if not (self._has_new_usage and idle and resources):
            return
        begin, end = self._usage.period()
        if end <= begin:
            # Usages before and after the restart of a task, or the loss of a network interface, cannot be compared.
            return
        # The rate in the period in which the usage was measured.
        rate = (self._finished_at(end) - self._finished_at(begin)) / (end - begin)
        if rate > 0:  # `scale_advice` takes milliseconds for hundreds of workers, so it needs new usage.
            self._advice = scale_advice(Load(len(idle), rate, resources, sum(idle) / len(idle), waiting))
            self._has_new_usage = False

    def _finished_at(self, time: float) -> float:
        """Returns how many closures had finished at a time, interpolated linearly between two samples."""
        for before, after in itertools.pairwise(self._samples):
            if before.time < after.time and time <= after.time:
                share = max(0.0, time - before.time) / (after.time - before.time)
                return before.total + share * (after.total - before.total)
        return self._samples[-1].total

    def _add_sample(self, now: float, statistics: ClusterStatistics) -> None:
        finished = {worker.index: float(worker.finished) for worker in statistics.workers}
        busy = {index: self._stream.busy_seconds(index, now) for index in finished}
        self._samples.append(_Sample(now, statistics.finished, finished, busy))
        while len(self._samples) > 2 and self._samples[1].time <= now - STREAM_LENGTH:
            self._samples.popleft()

    def _window(self, seconds: float) -> list[_Sample]:
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
                    **{name: getattr(worker, name) for name in _WORKER_COUNTS},
                )
            )
        return tuple(rows)


def _per_second(worker: int, window: Sequence[_Sample], counts: Callable[[_Sample], dict[int, float]]) -> float:
    """Returns the rate of one worker's count, from the first sample that has the worker."""
    latest = window[-1]
    first = next(sample for sample in window if worker in counts(sample))
    seconds = latest.time - first.time
    return (counts(latest)[worker] - counts(first)[worker]) / seconds if seconds > 0 else 0.0


def _server_row(latest: ServerUsage, before: ServerUsage) -> ServerRow:
    if not is_comparable(latest, before):
        return ServerRow(latest, 0.0, 0.0, 0.0)
    seconds = latest.time - before.time
    rates = ((getattr(latest, name) - getattr(before, name)) / seconds for name in ("cpu", "received", "sent"))
    return ServerRow(latest, *rates)
