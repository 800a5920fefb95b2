"""All uses of TensorFlow's private API.

Nothing else in the library imports from `tensorflow.python`. A comment at each use says why no public name serves; the
tests in `tests/ps_strategy/tensorflow_internals/` fail if a release of TensorFlow changes one of them.
"""
