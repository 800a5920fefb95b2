"""The options of a strategy, which are checked on creation, and check functions that other settings use too.

An error names the setting, the allowed values and the given value.

`coordinator run` passes settings to the program through environment variables. A setting of the program's own `Options`
takes precedence. So a program can be watched without a change of its code.
"""

import dataclasses
import math
import numbers
import os
import threading
from collections.abc import Mapping
from typing import Any, Literal, TypeGuard, get_args, get_origin

from coordinator.addresses import local_path, parse_page_address
from coordinator.errors import SettingError


class SettingTypeError(SettingError, TypeError):
    """A setting has the wrong type. The error is also a `TypeError`, as Python programs expect."""


def is_integer(value: Any, minimum: int | None = None, maximum: int | None = None) -> TypeGuard[int]:
    """Returns True if a value is an int (not a bool) within the bounds."""
    if isinstance(value, bool) or not isinstance(value, int):
        return False
    return (minimum is None or value >= minimum) and (maximum is None or value <= maximum)


def check_integer(name: str, value: Any, minimum: int, maximum: int | None = None, *, note: str = "") -> None:
    """Raises SettingTypeError if a setting is not an int, SettingError if the int is outside of the inclusive bounds.

    `note` follows the bounds in the message, such as ", or inf" if the caller also allows inf.
    """
    if not is_integer(value, minimum, maximum):
        bounds = f"of at least {minimum}" if maximum is None else f"from {minimum} to {maximum}"
        error = SettingError if is_integer(value) else SettingTypeError
        raise error(name, f"must be an integer {bounds}{note}, got {value!r}.")


def check_number(
    name: str,
    value: Any,
    minimum: float | None = None,
    maximum: float | None = None,
    *,
    above: float | None = None,
    unit: str = "",
    note: str = "",
) -> None:
    """Raises SettingTypeError if a setting is not a number, SettingError if the number is NaN or outside of the bounds.

    `minimum` and `maximum` are allowed values, `above` is not. Without `maximum` the number must be finite; a `maximum`
    of `inf` allows `inf`. For `note` see `check_integer`.
    """
    is_number = isinstance(value, numbers.Real) and not isinstance(value, bool)
    if (
        is_number
        and (minimum is None or value >= minimum)
        and (above is None or value > above)
        and (value < math.inf if maximum is None else value <= maximum)
    ):
        return
    is_bounded = maximum is not None and maximum < math.inf
    if above is not None:
        bounds = f" above {above:g}" + (f" and at most {maximum:g}" if is_bounded else "")
    elif minimum is not None:
        bounds = f" from {minimum:g} to {maximum:g}" if is_bounded else f" of at least {minimum:g}"
    else:
        bounds = ""
    error = SettingError if is_number else SettingTypeError
    raise error(name, f"must be a number{unit and ' of ' + unit}{bounds}{note}, got {value!r}.")


def check_transfer_dtype(name: str, value: Any) -> None:
    """Raises SettingError for a dtype of messages other than `tf.bfloat16`, `tf.float32` and None.

    `tf.float32` and None round nothing. A value that is no dtype raises SettingTypeError.
    """
    # The dtype's name is compared, because this module does not import TensorFlow.
    dtype = None if value is None or isinstance(value, str) else getattr(value, "name", None)
    if value is None or dtype in ("bfloat16", "float32"):
        return
    reason = " (its numbers end at 65,504, and smaller ones than 6e-8 become 0)" if dtype == "float16" else ""
    error = SettingTypeError if dtype is None else SettingError
    raise error(name, f"must be tf.bfloat16, tf.float32 or None, got {value!r}{reason}.")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Options:
    """Settings of a `ParameterServerStrategy`. All times are in seconds.

    Attributes:
      max_queued_closures: `schedule` blocks while this many closures wait for a worker. Each waiting closure costs
        about 0.5 kB, and time in each garbage collection, during which no worker receives work.
      schedule_timeout: how long `schedule` may block on a full queue before it raises `TimeoutError`. None for no
        limit; the log then reports the wait every `stall_report_interval`.
      transient_retries: how often a closure is run again after a transient failure (an RPC was refused although every
        task is alive) before the failure becomes its result. 0 also disables fused calls, since a transient failure of
        a fused call counts for every closure in the call.
      max_attempts: a closure that was lost with its worker this often is quarantined: the closure's future and `join`
        raise `ClosureQuarantined`. If the closure was lost on one worker only, another worker tries it first. 1 also
        disables fused calls, since the loss of a fused call counts for every closure in the call.
      stop_on_error: whether the first error of a scheduled function cancels all other functions and is raised by the
        next `schedule` or `join`, as in the RFC. If False, only the function's own future raises the error.
      closure_timeout: a closure that runs longer is started on another worker as well, and the first result counts;
        None for never. `schedule(..., timeout=)` overrides it for one closure.
      steps_per_dispatch: the maximum number of waiting closures of one function that a worker runs in one call. Sharing
        a call saves most of each closure's overhead. None adapts the number to the duration of the closures, 1 runs
        each closure separately. See docs/dispatch.md.
      affinity_timeout: a closure for one worker (`schedule(..., worker=)`) fails with `WorkerLost` after it has waited
        this long for that worker's return.
      parameter_server_timeout: how long to wait for a lost parameter server before `ParameterServerLost` is raised.
        Applies only after a call of `restore_from`.
      connect_timeout: how long the constructor of a strategy may wait for all parameter servers and one worker.
      probe_timeout: a task that does not answer a health probe in this time counts as unreachable.
      heartbeat_interval: the time between two heartbeats of each server.
      heartbeat_timeout: a server that has not answered for this long counts as lost, and every call to it fails. A
        worker whose call takes long also counts as lost if it does not reach a parameter server.
      reconnect_interval: the time between two attempts to reach a lost worker, and the pause before a retry after a
        transient failure.
      stall_report_interval: a wait that lasts this long logs what it waits for, and again after each further interval.
      client_timeout: a server that has not heard from this client for this long frees the client's objects. Causes are
        a vanished host, a stopped program or a broken network. The next client frees a killed client's objects.
      sparse_updates: what a Keras 3 optimizer does with a sparse gradient of a variable on a parameter server. "rows"
        changes only the rows that the gradient has, in the variable and in its optimizer slots. "dense" does what Keras
        does: most optimizers compute the update of all rows of the table in each step. See docs/embeddings.md.
      transfer_dtype: the default of the update rules' argument `transfer_dtype`. With `tf.bfloat16`, update rules round
        the values that they pull and push to 16 bits in transit. `ModelAverage` and steps without a rule round
        nothing, so their results do not depend on this option. See docs/updates/README.md.
      reshard_inputs: whether workers that join or leave change the shares that dataset functions read from their
        `tf.distribute.InputContext`. If True, endless data restarts with the new shares, and other data has new shares
        from the next `iter()` on. If False, a new worker has a share, and the others keep theirs.
        See docs/elastic.md.
      checkpoint_memory: how many bytes of a parameter server's memory a save or restore of a checkpoint may use, in
        addition to the variables. Larger variables are saved and restored in blocks, while updates go on. See
        docs/guarantees.md.
      version_mismatch: what to do about a server that runs another version of TensorFlow than this program: "error"
        refuses the server, "warn" logs a warning and accepts the server.
      log_format: "text", or "json" for one JSON object per line on standard error. "json" also logs events, except
        the events of each call. See docs/events.md.
      dashboard: the address of a page that shows what happens, `host:port` or `host:port/token`: "127.0.0.1:0" for any
        free port of this machine. None for no page, unless `--dashboard` of `coordinator run` or `slurm` requests it.
        See docs/dashboard.md.
      trace: the path of a trace file. None for no trace, unless `--trace` of `coordinator run` or `slurm` requests it.
        See docs/trace.md.
      close_timeout: how long `close` and `cancel_all` wait for running calls before they abandon these calls with a
        warning. If a server does not end a running call, disconnecting may take about 40 seconds more.

    Raises:
      ValueError: a switch is not a bool, a count not a positive integer (`transient_retries` may be 0), or a time not a
        positive number of at most `threading.TIMEOUT_MAX` (some 292 years); or `sparse_updates`, `version_mismatch`,
        `log_format`, `dashboard`, `trace` or `transfer_dtype` has a value that is not listed above.
    """

    max_queued_closures: int = 65_536
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
    sparse_updates: Literal["rows", "dense"] = "rows"
    transfer_dtype: Any = None
    reshard_inputs: bool = False
    checkpoint_memory: int = 2**26
    version_mismatch: Literal["error", "warn"] = "error"
    log_format: Literal["text", "json"] = "text"
    dashboard: str | None = None
    trace: str | os.PathLike[str] | None = None
    close_timeout: float = 30.0

    def __post_init__(self) -> None:
        check_transfer_dtype("Options.transfer_dtype", self.transfer_dtype)
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if get_origin(field.type) is Literal:
                words = get_args(field.type)
                if value not in words:
                    expected = " or ".join(f'"{word}"' for word in words)
                    raise ValueError(f"Options.{field.name} must be {expected}, got {value!r}.")
                continue
            if isinstance(field.default, bool):
                if not isinstance(value, bool):
                    raise ValueError(f"Options.{field.name} must be True or False, got {value!r}.")
                continue
            name = f"Options.{field.name}"
            if field.name == "trace" and value is not None:
                _check_local_path(name, value)
            if field.name in ("trace", "transfer_dtype") or (value is None and field.default is None):
                continue
            if field.type == str | None:
                parse_page_address(value, name)
            elif field.type in (int, int | None):
                check_integer(name, value, minimum=0 if field.name == "transient_retries" else 1)
            else:
                check_number(name, value, above=0, maximum=threading.TIMEOUT_MAX, unit="seconds")


def _check_local_path(name: str, value: Any) -> None:
    if not isinstance(value, str | os.PathLike):
        raise ValueError(f"{name} must be a path, got {value!r}.")
    local_path(value, name)


# Environment variables for the chief only: the first has the dashboard's `host:port/token`, the second a file's path.
DASHBOARD = "COORDINATOR_DASHBOARD"
TRACE = "COORDINATOR_TRACE"
# The environment variable that counts how often the program was started again.
RESTART_COUNT = "COORDINATOR_RESTART_COUNT"


def with_program_settings(options: Options | None, environment: Mapping[str, str]) -> Options:
    """Returns a program's options (None for the defaults), completed from environment variables. Checks both."""
    options = Options() if options is None else options
    if not isinstance(options, Options):
        raise TypeError(f"options must be a coordinator.Options, got {options!r}.")
    if options.dashboard is None and (dashboard := environment.get(DASHBOARD)):
        options = dataclasses.replace(options, dashboard=dashboard)
    if options.trace is None and (trace := environment.get(TRACE)):
        # A program that was started again does not overwrite the trace of an earlier start.
        if (restarts := environment.get(RESTART_COUNT, "0")) != "0":
            stem, suffix = os.path.splitext(trace)
            trace = f"{stem}.{restarts}{suffix}"
        options = dataclasses.replace(options, trace=trace)
    return options
