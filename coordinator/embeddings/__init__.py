"""Embeddings: large tables on the parameter servers. A step reads and changes few of their rows."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
