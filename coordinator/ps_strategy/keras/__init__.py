"""Runs the steps of Keras 3's `fit`, `evaluate` and `predict`, and of `strategy.evaluate`, on workers."""
