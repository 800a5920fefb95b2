"""Lookup tables, and what checkpoints and their managers remember."""

from collections.abc import Callable
from typing import Any

from tensorflow.python.framework import ops
from tensorflow.python.trackable import resource as trackable_resource

# Of a checkpoint: what saves and restores it asynchronously, once it was needed, and the method that makes it.
_ASYNCHRONOUS, _MAKES_ASYNCHRONOUS = "_async_checkpointer_impl", "_async_checkpointer"


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


def saves_asynchronously(checkpoint: Any) -> bool:
    """Whether a `tf.train.Checkpoint` was saved or restored with `enable_async` before: it goes on like that."""
    # Private: nothing public tells.
    return getattr(checkpoint, _ASYNCHRONOUS, None) is not None


def refuse_asynchronous(checkpoint: Any, error: Callable[[], Exception]) -> None:
    """Has a `tf.train.Checkpoint` raise what `error` returns when it is saved or restored with `enable_async`."""

    def refuse() -> None:
        # It is set before this is called, and would make the next restore without options an asynchronous one.
        checkpoint._checkpoint_options = None
        raise error()

    # Private: a manager saves its checkpoint by a private method, and this is where all ways to do so meet. The
    # attribute is set past the checkpoint's own tracking of attributes.
    vars(checkpoint)[_MAKES_ASYNCHRONOUS] = refuse


def accept_asynchronous(checkpoint: Any) -> None:
    """Undoes `refuse_asynchronous`."""
    vars(checkpoint).pop(_MAKES_ASYNCHRONOUS, None)
