"""Embeddings: large tables on the parameter servers, of which a step reads and changes few rows.

Names are imported when they are first used.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
