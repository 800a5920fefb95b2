"""What a user may tune, checked when it is made."""

import dataclasses
import threading
from typing import Literal


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of a `ParameterServerStrategy`. All times are in seconds.

    Attributes:
      max_queued_closures: `schedule` blocks while this many closures wait for a worker.
      schedule_timeout: how long `schedule` may block on a full queue before it raises `TimeoutError`; None waits
        as long as it takes, with a report in the log every `stall_report_interval`.
      transient_retries: how often one closure is run again after a transient failure (an RPC that was refused
        although every task is alive) before the failure counts as its result.
      max_attempts: a closure whose worker was lost under it this often is quarantined: its future and `join` raise
        `ClosureQuarantined`.
      stop_on_error: whether the first error of a scheduled function withdraws everything else and is raised by the
        next `schedule` or `join`, as in the RFC; otherwise it is told by its own future alone.
      closure_timeout: a closure that runs for longer is run on another worker as well, and the first result counts;
        None for never. `schedule(..., timeout=)` says otherwise for one closure.
      steps_per_dispatch: at most so many closures of one function that wait one behind the other are run in one call on
        a worker, which saves most of what it takes to bring each there; None adapts the number to how long they take,
        1 runs each alone. See docs/dispatch.md.
      affinity_timeout: a closure for one certain worker (`schedule(..., worker=)`) fails with `WorkerLost` when it has
        waited this long for that worker's return.
      parameter_server_timeout: how long a lost parameter server is awaited, if `restore_from` was called, before
        `ParameterServerLost` is raised.
      connect_timeout: how long making a strategy may wait for all parameter servers and the first worker.
      probe_timeout: a task that leaves a health probe unanswered for this long counts as unreachable.
      heartbeat_interval: every server is asked this often whether it is there.
      heartbeat_timeout: a server that has been silent for this long counts as lost, and every call to it fails.
      reconnect_interval: pause between two attempts to reach a lost worker, and before a closure is run again after
        a transient failure.
      stall_report_interval: a wait that lasts this long says in the log what it waits for, and again after each
        further interval.
      client_timeout: a server frees what this client made on it when it has not heard of the client for this long: the
        client's host vanished, or the program was stopped, or the two could not reach each other. A client that was
        killed is noticed by the next one, and what it left is freed then.
      version_mismatch: what to do about a server that runs another TensorFlow than this program: "error" refuses it,
        "warn" says so in the log and takes it.
      close_timeout: how long `close` waits for what runs to end before it gives it up and says so. Disconnecting
        from the servers may take up to some 40 seconds more if one of them does not end what it runs.

    Raises:
      ValueError: a switch is no bool, a count not a positive whole number, or a time not a positive number below
        `threading.TIMEOUT_MAX` (some 292 years), or `version_mismatch` another word.
    """

    max_queued_closures: int = 262_144
    schedule_timeout: float | None = None
    transient_retries: int = 10
    max_attempts: int = 3
    stop_on_error: bool = True
    closure_timeout: float | None = None
    steps_per_dispatch: int | None = None
    affinity_timeout: float = 300.0
    parameter_server_timeout: float = 600.0
    connect_timeout: float = 300.0
    probe_timeout: float = 5.0
    heartbeat_interval: float = 1.0
    heartbeat_timeout: float = 5.0
    reconnect_interval: float = 0.5
    stall_report_interval: float = 60.0
    client_timeout: float = 600.0
    version_mismatch: Literal["error", "warn"] = "error"
    close_timeout: float = 30.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name == "version_mismatch":
                if value not in ("error", "warn"):
                    raise ValueError(f'Options.version_mismatch must be "error" or "warn", got {value!r}.')
                continue
            if isinstance(field.default, bool):
                if not isinstance(value, bool):
                    raise ValueError(f"Options.{field.name} must be True or False, got {value!r}.")
                continue
            if value is None and field.default is None:
                continue
            whole = field.type in (int, "int", int | None)
            allowed = (int,) if whole else (int, float)
            least = 0 if field.name == "transient_retries" else None
            is_number = isinstance(value, allowed) and not isinstance(value, bool)
            is_finite = is_number and (whole or value <= threading.TIMEOUT_MAX)
            if not (is_finite and (value > 0 or value == least)):
                kind = "whole number" if whole else "finite number of seconds"
                bound = "of at least 0" if least == 0 else "above 0"
                raise ValueError(f"Options.{field.name} must be a {kind} {bound}, got {value!r}.")
