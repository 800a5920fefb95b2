"""The states of Keras' recurrent layers with `stateful=True`.

Such a state is what a batch leaves for the next batch of the same sequences. Workers that shared it would train on the
sequences of each other; so each worker has its own. (Keras 2 refuses such layers in the scope of a strategy.)
"""

import sys
from typing import Any

import keras


def is_state_of_sequences() -> bool:
    """Returns True if the variable that is now created is the state of such a layer."""
    # Private: TensorFlow does not tell a creator who creates, and the layers have no hook.
    creator = getattr(keras.layers.RNN._create_state_variables, "__wrapped__", keras.layers.RNN._create_state_variables)
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code is not creator.__code__:
        frame = frame.f_back
    return frame is not None


def stateful_layers(model: keras.Model) -> list[keras.Layer]:
    """Returns the layers of a model, also of models in it, that have such a state."""
    # Private: `model.layers` has the layers of the outermost model alone.
    return [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.RNN) and layer.stateful]
