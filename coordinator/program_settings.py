"""Settings that `coordinator run` gives to the program it starts, through the environment.

They apply where the program's own `Options` do not set the same, so that no program has to be changed to be watched.
"""

import dataclasses
import os
from collections.abc import Mapping

from coordinator.options import Options

# `host:port/token`, for the chief alone.
DASHBOARD = "COORDINATOR_DASHBOARD"
# The path of a file, for the chief alone.
TRACE = "COORDINATOR_TRACE"
# How often the program was started again.
RESTART_COUNT = "COORDINATOR_RESTART_COUNT"


def with_program_settings(options: Options | None, environment: Mapping[str, str]) -> Options:
    """Returns options, with those of the environment where they have none.

    Args:
      options: of the program; None for the defaults.
      environment: of the process.

    Raises:
      TypeError: `options` is something else.
      ValueError: a setting of the environment is wrong.
    """
    options = Options() if options is None else options
    if not isinstance(options, Options):
        raise TypeError(f"options must be a coordinator.Options, got {options!r}.")
    if options.dashboard is None and (dashboard := environment.get(DASHBOARD)):
        options = dataclasses.replace(options, dashboard=dashboard)
    if options.trace is None and (trace := environment.get(TRACE)):
        options = dataclasses.replace(options, trace=_path_of_start(trace, environment.get(RESTART_COUNT, "0")))
    return options


def _path_of_start(path: str, restarts: str) -> str:
    """Returns the path of a trace: a program that was started again does not overwrite that of its start before."""
    if restarts == "0":
        return path
    stem, suffix = os.path.splitext(path)
    return f"{stem}.{restarts}{suffix}"
