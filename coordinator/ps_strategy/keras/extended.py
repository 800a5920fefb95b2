"""The patches of Keras that are active while a strategy is open.

The module `fit_extension`, which schedules the steps of `fit`, `evaluate` and `predict`, is imported when the first
model of a strategy is compiled. A program that trains in its own loop does not wait for the import.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import keras

from coordinator.options import Options
from coordinator.ps_strategy.keras.internals.patches import backups_extended, row_lookups, trainer_extended
from coordinator.ps_strategy.keras.internals.row_updates import row_updates, table_updates


def check_backend() -> None:
    """Raises RuntimeError if Keras does not run on TensorFlow in this process."""
    if keras.backend.backend() != "tensorflow":
        raise RuntimeError(
            f"Keras runs on {keras.backend.backend()!r} in this process, and parameter servers are of TensorFlow. Set "
            "KERAS_BACKEND=tensorflow in the environment, or the backend in ~/.keras/keras.json, before Keras is "
            "imported."
        )


@contextlib.contextmanager
def keras_extended(strategy_class: type[Any], options: Options) -> Iterator[None]:
    """A scope in which Keras reads and changes single rows of embeddings, and trains strategies' models on workers."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(row_lookups())
        stack.enter_context(row_updates(by_rows=options.sparse_updates == "rows"))
        # Entered after `row_updates`, because `table_updates` must take out the gradients of tables first.
        stack.enter_context(table_updates())
        extension = _Extension(strategy_class)
        stack.enter_context(trainer_extended(extension))
        stack.enter_context(backups_extended(extension))
        yield


class _Extension:
    """A `FitExtension` that is imported and created when its first attribute is read."""

    def __init__(self, strategy_class: type[Any]) -> None:
        self._strategy_class = strategy_class

    def is_for(self, strategy: Any) -> bool:
        """Returns True if models of this strategy are trained on workers."""
        return isinstance(strategy, self._strategy_class)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._fit_extension, name)

    @functools.cached_property
    def _fit_extension(self) -> Any:
        from coordinator.ps_strategy.keras.fit_extension import FitExtension

        return FitExtension()
