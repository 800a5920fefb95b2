"""All uses of Keras 3's private API.

A comment at each use says why no public name serves. The tests in `tests/ps_strategy/keras/internals/` fail if Keras
changes a private name that is used.
"""

from coordinator.versions import private_names_needed

# As in `tensorflow_internals`.
with private_names_needed():
    from coordinator.ps_strategy.keras.internals import initial_values, optimizers, patches, row_updates  # noqa: F401
