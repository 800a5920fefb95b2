"""All uses of TensorFlow's private API.

No other package of the library imports from `tensorflow.python`. A comment at each use says why no public name serves.
The tests in `tests/ps_strategy/tensorflow_internals/` fail if a release of TensorFlow changes a private name in use.
"""
