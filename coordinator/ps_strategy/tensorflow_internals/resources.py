"""Lookup tables, and what a checkpoint manager remembers."""

from collections.abc import Callable
from typing import Any

from tensorflow.python.framework import ops
from tensorflow.python.trackable import resource as trackable_resource


def resource_creator_scope(kind: str, creator: Callable[..., Any]) -> Any:
    """A scope in which lookup tables of a kind are made by `creator(next_creator, *args, **kwargs)`."""
    # Private: the hook of `tf.distribute.StrategyExtended` for it has no public counterpart.
    return ops.resource_creator_scope(kind, creator)


def is_restored_resource(table: Any) -> bool:
    """Whether a table came from a SavedModel, so that saved functions create and fill it."""
    # Private: loaded tables have no public class.
    return isinstance(table, trackable_resource.RestoredResource)


def restored_functions(table: Any) -> tuple[Any, Any]:
    """The concrete functions that create and fill a table that came from a SavedModel."""
    # Private: SavedModel stores them under these names.
    create, initialize = table._create_resource, table._initialize
    return create.concrete_functions[0], initialize.concrete_functions[0]


def forget_last_saved_step(manager: Any) -> None:
    """Lets a `tf.train.CheckpointManager` with a `checkpoint_interval` save at whichever step comes next."""
    # Private: it remembers the step of its last attempt, which may lie ahead once a checkpoint was restored.
    manager._last_checkpoint_step = None
