"""Keras 3 on parameter servers: `fit`, and the private API of Keras that it needs."""
