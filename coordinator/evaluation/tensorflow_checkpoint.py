"""Reads the objects, variables and training step in a TensorFlow checkpoint.

Supports object-based checkpoints, as written by `tf.train.Checkpoint` and `tf.train.CheckpointManager`.
"""

import dataclasses
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2

from coordinator.errors import EvaluationError

_GRAPH_KEY = "_CHECKPOINTABLE_OBJECT_GRAPH"
_USER_COUNTERS = ("step", "global_step")
_OPTIMIZER_COUNTERS = ("_iterations", "iterations", "iter")


@dataclasses.dataclass(frozen=True)
class SavedVariable:
    """The key of a variable in the checkpoint, and its shape."""

    key: str
    shape: tuple[int, ...]


def named_objects(trackable: Any) -> dict[str, Any]:
    """Returns the objects that `trackable` saves, by name.

    Args:
      trackable: any trackable object. For a `tf.train.Checkpoint` with a root, the result holds the root's objects and
        its own side by side, as in the checkpoint.
    """
    objects = dict(tf.train.TrackableView(trackable).children(trackable))
    if isinstance(trackable, tf.train.Checkpoint):
        objects = {name: item for name, item in objects.items() if name not in ("_root", "save_counter")}
        root = objects.pop("root", None)
        return objects if root is None else {**named_objects(root), **objects}
    return objects


class TensorFlowCheckpoint:
    """An open checkpoint.

    Args:
      path: its path, without `.index`.
      label: the path to show in messages, if it differs.

    Raises:
      tf.errors.OpError, OSError, IndexError: the files cannot be read: incomplete, or deleted in the meantime.
      EvaluationError: the checkpoint is not object-based.
    """

    def __init__(self, path: str, label: str | None = None):
        self._path = path
        self._label = label or path
        self._reader = tf.train.load_checkpoint(path)
        self._shapes: dict[str, list[int]] = self._reader.get_variable_to_shape_map()
        self._dtypes: dict[str, tf.DType] = self._reader.get_variable_to_dtype_map()
        if _GRAPH_KEY not in self._shapes:
            raise EvaluationError(
                f"The checkpoint {self._label!r} has no objects in it, only named tensors. Write it with "
                "tf.train.Checkpoint(model=model, optimizer=optimizer)."
            )
        graph = trackable_object_graph_pb2.TrackableObjectGraph.FromString(self._reader.get_tensor(_GRAPH_KEY))
        self._nodes = graph.nodes

    def names(self) -> list[str]:
        """Returns the names of the objects that were passed to `tf.train.Checkpoint`."""
        return sorted(self._children(0))

    def value(self, saved: SavedVariable) -> Any:
        """Returns the value of a variable as a NumPy array; shards are concatenated."""
        return self._reader.get_tensor(saved.key)

    def matches(self, root: Any) -> dict[int, SavedVariable]:
        """Finds the variables of `root` in the checkpoint.

        Args:
          root: a trackable object with the structure of the saved one.

        Returns:
          The saved variable for each `id(variable)`.
        """
        found = {}
        for node, trackable in tf.train.CheckpointView(self._path).match(root).items():
            saved = self._variable(node)
            if saved is not None:
                found[id(trackable)] = saved
        return found

    def trained_step(self) -> int | None:
        """Returns the number of training steps before the checkpoint; None if it holds no counter.

        A counter saved by the user (`tf.train.Checkpoint(step=..., ...)`, or `global_step`) takes precedence, because
        another strategy's Keras optimizer may lose counts when workers race. Otherwise this is the `iterations` of the
        optimizer nearest to the root; of several at the same depth, the largest.
        """
        for name in _USER_COUNTERS:
            step = self._count(self._children(0).get(name))
            if step is not None:
                return step
        level, seen = [0], {0}
        while level:
            steps = [self._iterations(node) for node in level]
            known = [step for step in steps if step is not None]
            if known:
                return max(known)
            level = sorted({child for node in level for child in self._children(node).values()} - seen)
            seen.update(level)
        return None

    def _iterations(self, optimizer: int) -> int | None:
        children = self._children(optimizer)
        if (
            "inner_optimizer" in children
        ):  # a loss-scaling optimizer also has a counter, but only the inner one is right
            return self._iterations(children["inner_optimizer"])
        counts = (self._count(children.get(name)) for name in _OPTIMIZER_COUNTERS)
        return next((count for count in counts if count is not None), None)

    def _children(self, node: int) -> dict[str, int]:
        return {child.local_name: child.node_id for child in self._nodes[node].children}

    def _variable(self, node: int) -> SavedVariable | None:
        for attribute in self._nodes[node].attributes:
            if attribute.name == "VARIABLE_VALUE" and attribute.checkpoint_key in self._shapes:
                key = attribute.checkpoint_key
                return SavedVariable(key, tuple(self._shapes[key]))
        return None

    def _count(self, node: int | None) -> int | None:
        saved = None if node is None else self._variable(node)
        if saved is None or saved.shape or not self._dtypes[saved.key].is_integer:
            return None
        return int(self.value(saved))
