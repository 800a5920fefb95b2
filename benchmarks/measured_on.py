"""What figures were measured on: a table is worth nothing without it."""

import importlib.metadata
import os
import platform
from typing import Any

import coordinator


def measured_on() -> dict[str, Any]:
    """The machine, its load now, and the versions, in the types of JSON."""
    return {
        "cpus": os.cpu_count(),
        "load": os.getloadavg()[0],
        "machine": platform.platform(),
        "python": platform.python_version(),
        "versions": {
            "coordinator": coordinator.__version__,
            **{name: importlib.metadata.version(name) for name in ("tensorflow", "keras", "grpcio")},
        },
    }


def machine_line() -> str:
    """The same in a line, without the versions."""
    return f"{os.cpu_count()} cpus, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}"
