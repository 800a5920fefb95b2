"""Real clusters and fake runtimes, for tests of this library and of programs that use it."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
