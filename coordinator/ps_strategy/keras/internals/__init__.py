"""All uses of Keras 3's private API.

A comment at each use says why no public name serves. The tests in `tests/ps_strategy/keras/internals/` fail if Keras
changes a private name that is used.
"""
