"""All uses of Keras 3's private API.

A comment at each says why no public name serves; the tests in `tests/ps_strategy/keras/internals/` fail if Keras
changes one of them.
"""
