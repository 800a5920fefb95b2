"""The inputs of Keras 3's models."""

from typing import Any

import keras


def structured_inputs(model: keras.Model) -> Any | None:
    """Returns the symbolic inputs of a functional or `Sequential` model, nested as it is called; None for others."""
    # Private: `model.inputs` is a flat list, whatever the model takes, and what of a model is functional has no public
    # name. A `Sequential` has a functional model inside.
    functional = getattr(model, "_functional", model)
    return getattr(functional, "_inputs_struct", None)
