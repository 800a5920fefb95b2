"""Keras 3 on parameter servers: `fit`, `evaluate` and `predict` run their steps on workers; `strategy.evaluate`."""
