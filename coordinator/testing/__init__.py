"""Real clusters and fake runtimes, for the tests of this library and of programs that use it."""

import importlib

_MODULES = {"Chaos": "chaos", "LocalCluster": "local_cluster", "FakeRuntime": "fake_runtime"}

__all__ = ["Chaos", "FakeRuntime", "LocalCluster"]


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
