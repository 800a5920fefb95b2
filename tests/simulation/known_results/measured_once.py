"""What a known result measures, measured once for all tests: it is the same each time."""

import functools
from types import ModuleType
from typing import Any


@functools.cache
def measured_once(known: ModuleType) -> Any:
    """What the module's `measure` returns."""
    return known.measure()
