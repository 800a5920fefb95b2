"""Backups of `keras.callbacks.BackupAndRestore` with the position in the data."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import keras

from coordinator.ps_strategy.tensorflow_internals.process import attribute_replaced


@contextlib.contextmanager
def backups_extended(extension: Any) -> Iterator[None]:
    """Has the callback save and restore the position in the data along with the model, for an extension's models.

    Args:
      extension: a `FitExtension`. `saving(model, folder)` is a scope in which a backup is written; `restored(model,
        folder, epoch)` is called when there was one, or none, and returns the epoch to begin with.
    """
    # Private: the callback has no hook, and decides by itself when it saves.
    callback = keras.callbacks.BackupAndRestore
    stock_save, stock_load = callback._save_model, callback._load_model

    @functools.wraps(stock_save)
    def save(self: Any) -> None:
        if not extension.is_for(self.model.distribute_strategy):
            stock_save(self)
            return
        with extension.saving(self.model, self.backup_dir):
            stock_save(self)

    @functools.wraps(stock_load)
    def load(self: Any) -> None:
        stock_load(self)
        if extension.is_for(self.model.distribute_strategy):
            # Private: where the loop begins.
            epoch = self.model._initial_epoch
            self.model._initial_epoch = extension.restored(self.model, self.backup_dir, epoch)

    with (
        attribute_replaced(callback, "_save_model", save),
        attribute_replaced(callback, "_load_model", load),
    ):
        yield
