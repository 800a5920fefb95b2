"""Evaluates a compiled Keras model on its data, by the model's own `evaluate`."""

from collections.abc import Sequence
from typing import Any

import keras

from coordinator.errors import EvaluationError


class KerasEvaluation:
    """Called with the trained step, returns the model's loss and metrics; prints nothing.

    Args:
      model: the compiled model.
      data: whatever `keras.Model.evaluate` takes as `x`.
      steps: how many batches make one evaluation; None for all.
      callbacks: Keras callbacks.
    """

    def __init__(self, model: keras.Model, data: Any, steps: int | None, callbacks: Sequence[keras.callbacks.Callback]):
        self._model = model
        self._data = data
        self._steps = steps
        self._callbacks = list(callbacks)

    def require_compiled(self) -> None:
        """Raises `EvaluationError` if the model has no loss and metrics to evaluate."""
        if not self._model.compiled:
            raise EvaluationError(
                f"The model {self._model.name!r} is not compiled, so it has no loss and metrics to evaluate. Compile "
                "it, or pass evaluate=."
            )

    def __call__(self, _step: int) -> dict[str, Any]:
        """Evaluates once; metrics whose result is a dict come flattened."""
        return self._model.evaluate(
            self._data, steps=self._steps, callbacks=self._callbacks, verbose=0, return_dict=True
        )

    def __repr__(self) -> str:
        return f"KerasEvaluation({self._model.name!r}, steps={self._steps})"
