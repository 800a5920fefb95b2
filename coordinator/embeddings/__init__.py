"""Large embedding tables on the parameter servers. A step reads and changes only a few rows of a table."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
