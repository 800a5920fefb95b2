"""Parameter-server training with one client: variables on parameter servers, functions on workers.

    strategy = coordinator.ParameterServerStrategy(resolver)
    with strategy.scope():
        model = ...
    future = strategy.schedule(step, args=(iterator,))
    strategy.join()

Importing the package costs a few milliseconds and loads only the standard library and `lazy_loader`. Each public name,
listed in `__init__.pyi`, is imported on first use.
"""

import lazy_loader

from coordinator.version import __version__

__getattr__, _, __all__ = lazy_loader.attach_stub(__name__, __file__)
__all__ += ["__version__"]


def __dir__() -> list[str]:
    return sorted(__all__)
