"""What the dashboard shows of a strategy at one moment: values without behavior, which become JSON as they are.

The page, `/api/state`, `/metrics` and `coordinator top` all show this. All times are in seconds since the epoch, all
durations in seconds.
"""

import dataclasses

from coordinator.dashboard.scale_advice import ScaleAdvice
from coordinator.dashboard.usage import ServerUsage


@dataclasses.dataclass(frozen=True)
class WorkerRow:
    """A worker.

    Attributes:
      index: its task index.
      state: `live`, `lost` or `stopped`.
      function: what it runs now; empty if nothing.
      calls: how many closures that call has.
      running_since: when that call began; 0 if nothing runs.
      rate: closures that it has finished per second, in the last 10 s.
      share: its rate, as a share of the fastest worker's.
      idle: the share of the last minute in which it ran nothing.
      waited: the share of its time, of all of training, that it has waited in the update rules; None without a rule.
      finished, failed, retried, losses, reconnections, reconnecting_seconds: see `coordinator.WorkerStatistics`.
    """

    index: int
    state: str
    function: str
    calls: int
    running_since: float
    rate: float
    share: float
    idle: float
    waited: float | None
    finished: int
    failed: int
    retried: int
    losses: int
    reconnections: int
    reconnecting_seconds: float


@dataclasses.dataclass(frozen=True)
class ServerRow:
    """A parameter server.

    Attributes:
      usage: what it has used so far.
      cores: how many processors it keeps busy, between the latest two readings.
      receiving: bytes per second that its host receives, likewise.
      sending: bytes per second that its host sends, likewise.
    """

    usage: ServerUsage
    cores: float
    receiving: float
    sending: float


@dataclasses.dataclass(frozen=True)
class RuleRow:
    """The counters of an update rule; see `coordinator.updates.RuleStatistics`.

    Attributes:
      number: tells rules of the same name apart.
      name: its class.
      histogram: the number of gradients of each staleness; the last also counts all larger ones.
      waited: the share of its time that each worker has waited for the rule, by task index.
    """

    number: int
    name: str
    updates: int
    pushes: int
    rejected: int
    bytes_pulled: int
    bytes_pushed: int
    mean: float
    p99: int
    histogram: tuple[int, ...]
    waited: dict[int, float]


@dataclasses.dataclass(frozen=True)
class TimelineEntry:
    """Something that happened, other than that closures run.

    Attributes:
      number: grows with each.
      time: when.
      kind: that of the event.
      level: `good`, `info`, `warning` or `error`.
      task: of the server it happened to, such as `worker 0`; empty if to none.
      text: says it.
    """

    number: int
    time: float
    kind: str
    level: str
    task: str
    text: str


@dataclasses.dataclass(frozen=True)
class Segment:
    """A time in which a worker ran calls of one function, with short breaks at most.

    Attributes:
      worker: its index.
      start: when the first of them began.
      end: when the last of them ended, or the time of the snapshot if it still runs.
      function: what was called.
      outcome: `finished`, `failed`, `cancelled`, `retried`, `lost` or, while it runs, `running`.
      closures: how many.
    """

    worker: int
    start: float
    end: float
    function: str
    outcome: str
    closures: int


@dataclasses.dataclass(frozen=True)
class History:
    """How the rate and the reported values changed, as columns of equal length.

    Attributes:
      times: the ends of equally long periods.
      rates: closures finished per second.
      values: for each reported name, its mean in each period, None where it was not reported.
    """

    times: tuple[float, ...] = ()
    rates: tuple[float, ...] = ()
    values: dict[str, tuple[float | None, ...]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """All that is shown.

    Attributes:
      time: of this snapshot.
      started: when the strategy was created.
      program: its file name.
      rate: closures that all workers together have finished per second, in the last 10 s.
      waiting, running, finished, failed, cancelled, retried: see `coordinator.ClusterStatistics`.
      checkpoint_time: when the latest checkpoint was complete; 0 if there is none.
      checkpoint: its path.
      values: the latest of each reported value, such as the loss.
      steps_lost: steps that were undone because a parameter server was lost and a checkpoint restored.
      event_counts: how many events of each kind there were.
      workers: in the order of their indices.
      servers: the parameter servers, in the order of their indices.
      rules: the update rules.
      history: since the strategy was created.
      timeline: the latest, in order.
      stream: what each worker has run in the last minute.
      advice: how many workers to have; None before enough was measured.
    """

    time: float
    started: float
    program: str
    rate: float = 0.0
    waiting: int = 0
    running: int = 0
    finished: int = 0
    failed: int = 0
    cancelled: int = 0
    retried: int = 0
    checkpoint_time: float = 0.0
    checkpoint: str = ""
    values: dict[str, float] = dataclasses.field(default_factory=dict)
    steps_lost: int = 0
    event_counts: dict[str, int] = dataclasses.field(default_factory=dict)
    workers: tuple[WorkerRow, ...] = ()
    servers: tuple[ServerRow, ...] = ()
    rules: tuple[RuleRow, ...] = ()
    history: History = History()
    timeline: tuple[TimelineEntry, ...] = ()
    stream: tuple[Segment, ...] = ()
    advice: ScaleAdvice | None = None
