"""Settings that `coordinator run` gives to the program it starts, through the environment.

They count where the program's own `Options` say nothing, so that no program has to be changed to be watched.
"""

import dataclasses
from collections.abc import Mapping

from coordinator.options import Options

# `host:port/token`, for the chief alone.
DASHBOARD = "COORDINATOR_DASHBOARD"


def with_program_settings(options: Options | None, environment: Mapping[str, str]) -> Options:
    """Returns options, with the settings of the environment where they say nothing.

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
    return options
