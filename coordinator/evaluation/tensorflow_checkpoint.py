"""Reads the objects, variables and training step in a TensorFlow checkpoint.

Supports object-based checkpoints, as written by `tf.train.Checkpoint` and `tf.train.CheckpointManager`.
"""

from collections.abc import Iterable
from typing import Any

import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2

from coordinator.errors import EvaluationError
from coordinator.ps_strategy.tensorflow_internals.checkpoint_savers import SelfSaving

_GRAPH_KEY = "_CHECKPOINTABLE_OBJECT_GRAPH"
_VARIABLE = "VARIABLE_VALUE"
_USER_COUNTERS = ("step", "global_step")
_OPTIMIZER_COUNTERS = ("_iterations", "iterations", "iter")


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

    def value(self, key: str) -> Any:
        """Returns the value of a variable as a NumPy array; shards are concatenated."""
        return self._reader.get_tensor(key)

    def find(self, root: Any, variables: Iterable[tuple[str, Any]]) -> list[str]:
        """Finds variables in the checkpoint.

        Args:
          root: a trackable object with the structure of the saved one.
          variables: (name, variable) pairs, of variables below `root`.

        Returns:
          The key of each variable, for `value`.

        Raises:
          EvaluationError: a variable is missing or has another shape.
        """
        saved = self._saved(root, _VARIABLE)
        keys = []
        for name, variable in variables:
            key = saved.get(id(variable))
            if key is None:
                raise EvaluationError(
                    f"The checkpoint {self._label!r} holds no value for the variable {name!r}; it holds {self.names()} "
                    "at its root. Evaluate the model that was trained, saved under the name 'model', or pass as model "
                    "a tf.train.Checkpoint with the names under which training saves."
                )
            shape, saved_shape = tuple(variable.shape), tuple(self._shapes[key])
            if shape != saved_shape:
                raise EvaluationError(
                    f"The variable {name!r} has shape {shape} in the evaluator and {saved_shape} in the checkpoint "
                    f"{self._label!r}. Build the evaluator's model as the trained one was built."
                )
            keys.append(key)
        return keys

    def find_tables(self, root: Any, tables: Iterable[SelfSaving]) -> list[tuple[SelfSaving, str]]:
        """Finds tables that grow in the checkpoint; see `find`.

        Returns:
          Each table and the name that its content has, for `read_from_checkpoint`.
        """
        saved = self._saved(root, SelfSaving.ATTRIBUTE)
        found = []
        for table in tables:
            if id(table) not in saved:
                raise EvaluationError(
                    f"The checkpoint {self._label!r} holds nothing of {table!r}. Save the model whose layers have the "
                    "table, or the table itself: tf.train.Checkpoint(model=model, table=table)."
                )
            found.append((table, saved[id(table)]))
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
        if "inner_optimizer" in children:
            # A loss-scaling optimizer also has a counter, but only the inner one is right.
            return self._iterations(children["inner_optimizer"])
        counts = (self._count(children.get(name)) for name in _OPTIMIZER_COUNTERS)
        return next((count for count in counts if count is not None), None)

    def _children(self, node: int) -> dict[str, int]:
        return {child.local_name: child.node_id for child in self._nodes[node].children}

    def _saved(self, root: Any, attribute: str) -> dict[int, str]:
        """Returns the keys of the objects below `root` that have such an attribute in the checkpoint, by their ids."""
        matches = tf.train.CheckpointView(self._path).match(root).items()
        return {id(trackable): key for node, trackable in matches if (key := self._key(node, attribute)) is not None}

    def _key(self, node: int, name: str = _VARIABLE) -> str | None:
        """Returns the key of the variable, or another attribute, of a node; None if there is none."""
        for attribute in self._nodes[node].attributes:
            if attribute.name == name and attribute.checkpoint_key in self._shapes:
                return attribute.checkpoint_key
        return None

    def _count(self, node: int | None) -> int | None:
        key = None if node is None else self._key(node)
        if key is None or self._shapes[key] or not self._dtypes[key].is_integer:
            return None
        return int(self.value(key))
