"""Sidecar evaluation: a separate process evaluates the checkpoints that training writes.

Each name is imported when it is first used. Only `SidecarEvaluator`, `SidecarMetrics` and directories that are URLs
need TensorFlow.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
