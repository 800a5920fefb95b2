"""What a user may tune, checked when it is made."""

import dataclasses
import threading


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of a `ParameterServerStrategy`. All times are in seconds.

    Attributes:
      max_queued_closures: `schedule` blocks while this many closures wait for a worker.
      schedule_timeout: how long `schedule` may block on a full queue before it raises `TimeoutError`; None waits
        as long as it takes, with a report in the log every `stall_report_interval`.
      transient_retries: how often one closure is run again after a transient failure (an RPC that was refused
        although every task is alive) before the failure counts as its result.
      max_worker_losses: a closure that has lost this many workers is quarantined: its future raises
        `ClosureQuarantinedError`.
      connect_timeout: how long making a strategy may wait for all parameter servers and the first worker.
      probe_timeout: a task that leaves a health probe unanswered for this long counts as unreachable.
      probe_interval: an idle worker is probed this often, so that one that was restarted is connected to again before
        it is needed.
      reconnect_interval: pause between two attempts to reach a lost worker, and before a closure is run again after
        a transient failure.
      stall_report_interval: a wait that lasts this long says in the log what it waits for, and again after each
        further interval.
      close_timeout: how long `close` waits for each thread to end before it gives it up and says so.

    Raises:
      ValueError: a count is not a positive whole number, or a time is not a positive number below
        `threading.TIMEOUT_MAX` (some 292 years).
    """

    max_queued_closures: int = 262_144
    schedule_timeout: float | None = None
    transient_retries: int = 10
    max_worker_losses: int = 5
    connect_timeout: float = 300.0
    probe_timeout: float = 5.0
    probe_interval: float = 5.0
    reconnect_interval: float = 0.5
    stall_report_interval: float = 60.0
    close_timeout: float = 30.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if value is None and field.default is None:
                continue
            whole = field.type in (int, "int")
            allowed = (int,) if whole else (int, float)
            least = 0 if field.name == "transient_retries" else None
            is_number = isinstance(value, allowed) and not isinstance(value, bool)
            is_finite = is_number and (whole or value <= threading.TIMEOUT_MAX)
            if not (is_finite and (value > 0 or value == least)):
                kind = "whole number" if whole else "finite number of seconds"
                bound = "of at least 0" if least == 0 else "above 0"
                raise ValueError(f"Options.{field.name} must be a {kind} {bound}, got {value!r}.")
