"""Sidecar evaluation: a separate process evaluates the checkpoints that training writes.

A name is imported at its first use. Only `SidecarEvaluator`, `SidecarMetrics` and URLs of directories need TensorFlow.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
