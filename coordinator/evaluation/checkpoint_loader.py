"""Loads checkpoints into the object that is evaluated, and finds their training step.

TensorFlow checkpoints with objects, as `tf.train.Checkpoint` and `tf.train.CheckpointManager` write them, are loaded
into any trackable object. `.weights.h5` files are loaded into a Keras model.

Promise: after `load`, every variable holds the value from the checkpoint. If a value does not fit, `load` raises.
"""

import os
import tempfile
import warnings
from collections.abc import Collection, Iterable
from typing import Any

import h5py
import keras
import tensorflow as tf
from tensorflow.core.protobuf import trackable_object_graph_pb2

from coordinator.errors import EvaluationError
from coordinator.evaluation.checkpoint_watch import CheckpointFile
from coordinator.ps_strategy.keras.internals.row_updates import is_table
from coordinator.ps_strategy.tensorflow_internals.checkpoint_savers import SelfSaving

_GRAPH_KEY = "_CHECKPOINTABLE_OBJECT_GRAPH"
_VARIABLE = "VARIABLE_VALUE"
_USER_COUNTERS = ("step", "global_step")
_OPTIMIZER_COUNTERS = ("_iterations", "iterations", "iter")
# In a loss-scaling optimizer, the inner optimizer holds the counter.
_WEIGHTS_FILE_COUNTERS = ("optimizer/inner_optimizer/vars/0", "optimizer/vars/0")


class TensorFlowCheckpoint:
    """An open checkpoint at a path without `.index`. Messages name the checkpoint by `label`, if given, or by its path.

    `reader` returns the checkpoint's values, in which shards are concatenated.

    Raises:
      tf.errors.OpError, OSError, IndexError: the files cannot be read, because they are incomplete or were deleted.
      EvaluationError: the checkpoint is not object-based.
    """

    def __init__(self, path: str, label: str | None = None):
        self._path = path
        self._label = label or path
        self.reader = tf.train.load_checkpoint(path)
        self._shapes: dict[str, list[int]] = self.reader.get_variable_to_shape_map()
        self._dtypes: dict[str, tf.DType] = self.reader.get_variable_to_dtype_map()
        if _GRAPH_KEY not in self._shapes:
            raise EvaluationError(
                f"The checkpoint {self._label!r} has no objects in it, only named tensors. Write it with "
                "tf.train.Checkpoint(model=model, optimizer=optimizer)."
            )
        graph = trackable_object_graph_pb2.TrackableObjectGraph.FromString(self.reader.get_tensor(_GRAPH_KEY))
        self._nodes = graph.nodes

    def names(self) -> list[str]:
        """Returns the names of the objects that were passed to `tf.train.Checkpoint`."""
        return sorted(self._children(0))

    def find(self, root: Any, variables: Iterable[tuple[str, Any]]) -> list[str]:
        """Returns the keys of variables below `root`, an object with the saved structure.

        `variables` has pairs (name, variable). Raises EvaluationError if one is missing or has another shape.
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

    def find_tables(self, root: Any, tables: Collection[SelfSaving]) -> list[tuple[SelfSaving, str]]:
        """Returns each table with the key of its saved content. Raises EvaluationError if a table was not saved."""
        saved = self._saved(root, SelfSaving.ATTRIBUTE)
        for table in tables:
            if id(table) not in saved:
                raise EvaluationError(
                    f"The checkpoint {self._label!r} holds nothing of {table!r}. Save the model whose layers have the "
                    "table, or the table itself: tf.train.Checkpoint(model=model, table=table)."
                )
        return [(table, saved[id(table)]) for table in tables]

    def trained_step(self) -> int | None:
        """Returns the number of training steps before the checkpoint; None if the checkpoint holds no counter.

        A counter saved by the user (`tf.train.Checkpoint(step=..., ...)`, or `global_step`) takes precedence, because
        another strategy's Keras optimizer may lose counts when workers race. Without such a counter, the result is the
        `iterations` of the optimizer nearest to the root, or the largest `iterations` of optimizers at the same depth.
        """
        if (step := self._first_count(0, _USER_COUNTERS)) is not None:
            return step
        level, seen = [0], {0}
        while level:
            known = [step for node in level if (step := self._iterations(node)) is not None]
            if known:
                return max(known)
            level = sorted({child for node in level for child in self._children(node).values()} - seen)
            seen.update(level)
        return None

    def _iterations(self, optimizer: int) -> int | None:
        inner = self._children(optimizer).get("inner_optimizer")
        # A loss-scaling optimizer also has a counter, but only the counter of the inner optimizer is right.
        return self._first_count(optimizer, _OPTIMIZER_COUNTERS) if inner is None else self._iterations(inner)

    def _first_count(self, node: int, names: Iterable[str]) -> int | None:
        children = self._children(node)
        counts = (self._count(children[name]) for name in names if name in children)
        return next((count for count in counts if count is not None), None)

    def _children(self, node: int) -> dict[str, int]:
        return {child.local_name: child.node_id for child in self._nodes[node].children}

    def _saved(self, root: Any, attribute: str) -> dict[int, str]:
        """Returns the keys of the saved objects below `root` that have this attribute, by object id."""
        matches = tf.train.CheckpointView(self._path).match(root).items()
        return {id(trackable): key for node, trackable in matches if (key := self._key(node, attribute)) is not None}

    def _key(self, node: int, name: str = _VARIABLE) -> str | None:
        """Returns the key of a node's variable, or of another attribute; None if there is none."""
        for attribute in self._nodes[node].attributes:
            if attribute.name == name and attribute.checkpoint_key in self._shapes:
                return attribute.checkpoint_key
        return None

    def _count(self, node: int) -> int | None:
        key = self._key(node)
        if key is None or self._shapes[key] or not self._dtypes[key].is_integer:
            return None
        return int(self.reader.get_tensor(key))


class CheckpointLoader:
    """Loads checkpoints into one object.

    Only the weights of a Keras model are loaded, because evaluation does not need the optimizer's slots. The
    optimizer's `iterations` are set to the training step, for callbacks that read them.

    `target` is a Keras model or another trackable object, which training saves under the name `model` or as the root.
    It may also be a `tf.train.Checkpoint` with the names that training uses, without objects that only training needs.
    A Keras model that is compiled but not built is built with the first batch of `data`.
    """

    def __init__(self, target: Any, data: Any = None):
        self._target = target
        self._data = data
        self._is_model = isinstance(target, keras.Model)

    def require_variables(self) -> None:
        """Builds a compiled model if necessary; raises `EvaluationError` if the object has no variables to load."""
        target = self._target
        if not self._is_model:
            if not self._variables(tf.train.Checkpoint(**self._objects(is_named=True))):
                raise EvaluationError(
                    f"Nothing to load: {type(target).__name__} has no variables yet. Create them before it is "
                    "evaluated, for example by calling it once."
                )
            return
        if not target.weights and target.compiled and isinstance(self._data, tf.data.Dataset):
            target.evaluate(self._data.take(1), verbose=0)
        if not target.weights:
            raise EvaluationError(
                f"Nothing to load: the model {target.name!r} has no weights yet. Build it before it is "
                "evaluated: give it an Input, call model.build(shape), or call it on one batch."
            )

    def load(self, checkpoint: CheckpointFile, path: str) -> int:
        """Loads a checkpoint from its own path, or the path of a copy; returns its training step.

        Raises:
          EvaluationError: the checkpoint does not fit the object, or holds no counter of training steps.
          tf.errors.OpError, OSError, IndexError, KeyError: its files cannot be read at the moment.
        """
        read = self._load_weights_file if checkpoint.is_keras_weights else self._load_tensorflow
        step = read(checkpoint, path)
        if self._is_model and getattr(self._target, "optimizer", None) is not None:
            self._target.optimizer.iterations.assign(step)
        return step

    def _load_tensorflow(self, checkpoint: CheckpointFile, path: str) -> int:
        opened = TensorFlowCheckpoint(path, label=checkpoint.path)
        # Each checkpoint gets a new root, because a root keeps every value for which it has no object.
        root = tf.train.Checkpoint(**self._objects(is_named="model" in opened.names()))
        step = _require_step(opened.trained_step(), checkpoint.path)
        variables = self._variables(root)
        found = [item for item in tf.train.TrackableView(root).descendants() if isinstance(item, SelfSaving)]
        keys, tables = opened.find(root, variables), opened.find_tables(root, found)
        if self._is_model:
            # `root.read` would keep the values for which the evaluator's optimizer has no variables, and keep further
            # values with each checkpoint.
            for (_, weight), key in zip(variables, keys, strict=True):
                weight.assign(opened.reader.get_tensor(key))
            try:
                for table, name in tables:
                    table.read_from_checkpoint(name, path)
            except ValueError as error:
                raise EvaluationError(f"The checkpoint {checkpoint.path!r} does not fit: {error}") from error
            return step
        try:
            root.read(path).assert_existing_objects_matched().expect_partial()
        except (AssertionError, ValueError) as error:
            raise EvaluationError(
                f"The checkpoint {checkpoint.path!r} does not fit what is evaluated: {error} It holds {opened.names()}."
            ) from error
        return step

    def _load_weights_file(self, checkpoint: CheckpointFile, path: str) -> int:
        if not self._is_model:
            raise EvaluationError(
                f"{checkpoint.path!r} is a Keras weights file and can be loaded into a Keras model only, not into a "
                f"{type(self._target).__name__}."
            )
        # Reads a copy, because a reader locks an HDF5 file, and training fails if it rewrites a locked file.
        with tempfile.TemporaryDirectory(prefix="evaluated-") as directory:
            source = CheckpointFile.of_file(path)
            if source is None:
                raise FileNotFoundError(path)
            copy = source.copy_to(os.path.join(directory, "copy"))
            try:
                step = _require_step(_weights_file_step(copy), checkpoint.path)
                self._load_weights(copy, checkpoint.path)
            except (EvaluationError, KeyError):
                source.require_unchanged()
                raise
            return step

    def _load_weights(self, path: str, label: str) -> None:
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Skipping variable loading for optimizer")
                self._target.load_weights(path)
        except ValueError as error:
            raise EvaluationError(
                f"The weights file {label!r} does not fit the model {self._target.name!r}. Build the evaluator's model "
                f"as the trained one was built. Keras says: {error}"
            ) from error

    def _objects(self, is_named: bool) -> dict[str, Any]:
        """Returns the objects to load, by name at the root of the checkpoint."""
        if is_named and not isinstance(self._target, tf.train.Checkpoint):
            return {"model": self._target}
        return _named_objects(self._target)

    def _variables(self, root: tf.train.Checkpoint) -> list[tuple[str, Any]]:
        """Returns (name, variable) for every variable to load below `root`, without the variables of tables."""
        if self._is_model:
            return [(weight.path, weight) for weight in self._target.weights if not is_table(weight)]
        items = [item for item in tf.train.TrackableView(root).descendants() if not is_table(item)]
        keras_variables = [(item.path, item) for item in items if isinstance(item, keras.Variable)]
        return keras_variables + [(item.name, item) for item in items if isinstance(item, tf.Variable)]


def _named_objects(trackable: Any) -> dict[str, Any]:
    """Returns the objects that `trackable` saves, by name; for a checkpoint with a root, also the root's objects."""
    objects = dict(tf.train.TrackableView(trackable).children(trackable))
    if isinstance(trackable, tf.train.Checkpoint):
        objects = {name: item for name, item in objects.items() if name not in ("_root", "save_counter")}
        root = objects.pop("root", None)
        return objects if root is None else {**_named_objects(root), **objects}
    return objects


def _weights_file_step(path: str) -> int | None:
    with h5py.File(path, "r") as file:
        counters = [file[name] for name in _WEIGHTS_FILE_COUNTERS if name in file]
        steps = [int(counter[()]) for counter in counters if counter.shape == () and counter.dtype.kind in "iu"]
    return steps[0] if steps else None


def _require_step(step: int | None, path: str) -> int:
    if step is None:
        raise EvaluationError(
            f"The checkpoint {path!r} holds no counter of training steps, so its metrics have no step. Save the "
            "optimizer with the model, whose `iterations` count steps, or a counter of your own: "
            "tf.train.Checkpoint(model=model, optimizer=optimizer, step=step)."
        )
    return step
