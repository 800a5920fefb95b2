"""Functions of Keras 3 that are replaced while a strategy is open: row look-ups and the training loop.

`Model.fit`, `evaluate` and `predict` stay Keras' code, with its callbacks. They need two things from a strategy: an
epoch iterator, and a function that is called for each turn of it. `coordinator.ps_strategy.keras.fit` provides both for
the models of its strategies; other models are trained as usual. The models of these strategies are built from the type
of their batches, where Keras would read the first batch, because not all data can be read twice; or, as Keras does
without a strategy, while their first step is traced.

Leaving the context managers restores Keras' own functions, unless other code has replaced them in the meantime.

The states of Keras' recurrent layers with `stateful=True`.

Such a state is what a batch leaves for the next batch of the same sequences. Workers that shared it would train on the
sequences of each other; so each worker has its own. (Keras 2 refuses such layers in the scope of a strategy.)
"""

import contextlib
import functools
import inspect
import logging
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

# Private: Keras' adapter has the arrays with their weights, but offers them only as a dataset of the client; its
# conversions are used for the same types and dtypes.
from keras.src import backend, tree
from keras.src.backend import config

# Private: the loop of `fit` looks up its epoch iterator in this module and accepts no other.
from keras.src.backend.tensorflow import trainer
from keras.src.backend.tensorflow.trainer import TFEpochIterator as StockEpochIterator
from keras.src.trainers.data_adapters.array_data_adapter import ArrayDataAdapter, can_convert_arrays
from keras.src.trainers.data_adapters.array_slicing import convert_to_sliceable

# Private: the loop accepts data that is neither a dataset, an array nor a generator only as a data adapter.
from keras.src.trainers.data_adapters.data_adapter import DataAdapter

from coordinator.data.source import without_autotuning
from coordinator.ps_strategy.keras.internals.evaluation_scope import EvaluationScope, stored_variable
from coordinator.ps_strategy.tensorflow_internals.handles import is_on_parameter_server
from coordinator.ps_strategy.tensorflow_internals.process import attribute_replaced
from coordinator.ps_strategy.tensorflow_internals.replicas import first_part_spec


def structured_inputs(model: keras.Model) -> Any | None:
    """Returns the symbolic inputs of a functional or `Sequential` model, nested as it is called; None for others."""
    # Private: `model.inputs` is a flat list, whatever the model takes, and what of a model is functional has no public
    # name. A `Sequential` has a functional model inside.
    functional = getattr(model, "_functional", model)
    return getattr(functional, "_inputs_struct", None)


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


@contextlib.contextmanager
def gradients_captured(optimizer: keras.optimizers.Optimizer) -> Iterator[list[tuple[Any, Any]]]:
    """A scope in which an optimizer collects what it is given, and applies nothing.

    Its value is a list with a pair of gradients and variables for each call of `apply` or `apply_gradients`.
    """
    captured: list[tuple[Any, Any]] = []

    def apply(grads: Any, trainable_variables: Any = None) -> None:
        captured.append((list(grads), list(trainable_variables or optimizer._trainable_variables)))

    # `apply_gradients` calls `apply`, before any clipping, which is the rule's.
    with attribute_replaced(optimizer, "apply", apply):
        yield captured


class RepeatedStepScope(keras.StatelessScope):
    """In it, a step leaves metrics, seeds and statistics as they are; it reads all variables as before."""

    def stored(self, variable: keras.Variable) -> Any:
        """Returns the TensorFlow variable whose rows may be read; None for one that the step has assigned."""
        return None if id(variable) in self.state_mapping else stored_variable(variable)


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


_logger = logging.getLogger("coordinator")

_KINDS = ("train", "test", "predict")

# Private: what Keras 3.15 and 3.16 name differently. The class that defines `compile` is `Trainer`, then `BaseTrainer`;
# the module that implements `keras.ops.take` is `backend.numpy`, then `backend.ops.numpy`.
Trainer: Any = next(kind for kind in keras.Model.__mro__ if "compile" in vars(kind))
numpy_operations: Any = getattr(backend, "ops", backend).numpy


@contextlib.contextmanager
def row_lookups() -> Iterator[None]:
    """Makes `keras.ops.take`, and so `keras.layers.Embedding`, read single rows of a variable on a parameter server.

    Keras itself sends the whole table to the worker at each look-up: `ops.take` converts it to a tensor twice, once to
    get its shape. Gradients are `tf.IndexedSlices` either way. Variables that are not on a parameter server, sparse
    indices, and other axes than the first are looked up by Keras.
    """
    # Private: TensorFlow looks up single rows of objects with a `sparse_read`, which Keras' variables lack; a look-up
    # cannot be distinguished from other conversions to a tensor, and no public hook comes before it.
    take = numpy_operations.take
    if list(inspect.signature(take).parameters) != ["x", "indices", "axis"]:
        _logger.warning("Embeddings are read as a whole in each step: this Keras (%s) is not known.", keras.__version__)
        yield
        return
    with attribute_replaced(numpy_operations, "take", functools.wraps(take)(functools.partial(_take, take))):
        yield


def _take(take: Callable[..., Any], x: Any, indices: Any, axis: int | None = None) -> Any:
    """Replaces `take`, the implementation of `keras.ops.take`."""
    table = _table_on_server(x) if axis == 0 and not isinstance(indices, tf.SparseTensor) else None
    if table is None:
        return take(x, indices, axis=axis)
    ids = indices if isinstance(indices, tf.RaggedTensor) else tf.convert_to_tensor(indices)
    if ids.dtype not in (tf.int32, tf.int64):
        return take(x, indices, axis=axis)
    return tf.ragged.map_flat_values(lambda flat: _rows(x, table, flat), ids)


def _rows(variable: Any, table: tf.Variable, ids: Any) -> Any:
    if table.shape[0] > tf.int32.max:
        ids = tf.cast(ids, tf.int64)
    # Negative indices count from the end, as in Keras.
    rows = tf.gather(table, tf.where(ids < 0, ids + table.shape[0], ids))
    # Private: reading the value in mixed precision would read and cast the whole table.
    return variable._maybe_autocast(rows)


def _table_on_server(value: Any) -> tf.Variable | None:
    """Returns the TensorFlow variable of a Keras variable, if it is on a parameter server and in use."""
    if not isinstance(value, keras.Variable):
        return None
    # Private: in a stateless scope a variable may have another value, and `value` would cast in mixed precision.
    scope = backend.get_stateless_scope()
    if scope is not None and not isinstance(scope, EvaluationScope | RepeatedStepScope):
        return None
    table = value._value if scope is None else scope.stored(value)
    is_known = isinstance(table, tf.Variable) and table.shape.rank and table.shape[0] is not None
    return table if is_known and is_on_parameter_server(table.device) else None


class EpochIterator(StockEpochIterator):
    """The turns of an epoch, which ends when all steps that were started in it have finished.

    Args:
      create_feed: creates a feed that reads a `tf.data.Dataset` (or the data of `OwnData`) from its beginning. A turn
        of the loop is given a feed: an iterator of the batches to come, with a method `wait_finished()`, which waits
        for all steps that were started and raises what failed.
      x: anything that `fit` takes, or `OwnData`.
      arguments: the other arguments of Keras' `EpochIterator`.
    """

    _current_feed: Any = None
    # Called once, when the steps of an epoch have finished.
    build_after_epoch: Callable[[], None] | None = None

    def __init__(self, create_feed: Callable[[Any], Any], x: Any, arguments: dict[str, Any]) -> None:
        # The constructor in between distributes the dataset as synchronous strategies do.
        super(StockEpochIterator, self).__init__(x=x, **arguments)
        self._is_own_and_uncounted = isinstance(x, OwnData) and self.steps_per_epoch is None
        data = x.dataset if isinstance(x, OwnData) else without_autotuning(self.data_adapter.get_tf_dataset())
        self._element_spec = first_part_spec(data.element_spec)
        self._distributed_dataset = _Feeds(lambda: create_feed(data))

    @property
    def batch_spec(self) -> Any:
        """The type of a batch as nested `tf.TypeSpec`s; None if a shape beside the batch size is not known."""
        size = self.data_adapter.batch_size

        def spec(part: Any) -> Any:
            if isinstance(part, tf.OptionalSpec):
                return None
            if not isinstance(part, tf.TensorSpec) or size is None or not part.shape.rank:
                return part
            return tf.TensorSpec([size, *part.shape[1:]], part.dtype)

        shapes = [getattr(part, "shape", None) for part in tf.nest.flatten(self._element_spec)]
        is_known = all(shape is None or (shape.rank is not None and None not in shape[1:]) for shape in shapes)
        return tf.nest.map_structure(spec, self._element_spec) if is_known else None

    def tf_sync(self) -> None:
        """Waits for the steps of the epoch."""
        if self._current_feed is not None:
            self._current_feed.wait_finished()
        if self.build_after_epoch is not None:
            build, self.build_after_epoch = self.build_after_epoch, None
            build()

    @contextlib.contextmanager
    def catch_stop_iteration(self) -> Iterator[None]:
        """Ends the epoch at the end of the data, but not before its steps have finished."""
        with super().catch_stop_iteration():
            try:
                yield
            except StopIteration:
                self.tf_sync()
                # Keras would warn, and expect the same number of turns in the next epoch. Here every epoch ends so.
                if not self._is_own_and_uncounted:
                    raise
                self._current_iterator = None

    def __next__(self) -> Any:
        turn = super().__next__()
        self._current_feed = turn[-1]
        return turn


class _Feeds:
    """An iterable, as Keras expects a dataset to be; each iterator is a new feed."""

    def __init__(self, create: Callable[[], Any]) -> None:
        self._create = create

    def __iter__(self) -> Any:
        return self._create()


class OwnData(DataAdapter):
    """Data that is read on the workers.

    Args:
      dataset: has an `element_spec`, as datasets have.
      num_batches: of an epoch; None if that is not known, as for a per-worker dataset.
      batch_size: likewise.
    """

    def __init__(self, dataset: Any, num_batches: int | None = None, batch_size: int | None = None) -> None:
        self.dataset = dataset
        self._num_batches = num_batches
        self._batch_size = batch_size

    @property
    def num_batches(self) -> int | None:
        """See above."""
        return self._num_batches

    @property
    def batch_size(self) -> int | None:
        """See above."""
        return self._batch_size


@contextlib.contextmanager
def trainer_extended(extension: Any) -> Iterator[None]:
    """Makes Keras' loop use an extension, a `FitExtension`, for the models that it is for."""
    stock_iterator = trainer.TFEpochIterator

    def epoch_iterator(distribute_strategy: Any = None, x: Any = None, **arguments: Any) -> Any:
        if extension.is_for(distribute_strategy):
            return extension.epoch_iterator(distribute_strategy, x, arguments)
        return stock_iterator(distribute_strategy, x=x, **arguments)

    # Private: where a model is built that has not been called yet.
    stock_build = keras.Model._maybe_symbolic_build

    @functools.wraps(stock_build)
    def build(self: keras.Model, iterator: Any = None, data_batch: Any = None) -> None:
        if extension.is_for(self.distribute_strategy):
            _build(functools.partial(stock_build, self, None), self, iterator, data_batch)
        else:
            stock_build(self, iterator, data_batch)

    # Public, but Keras' iterator does not know which epochs it is for.
    stock_fit = keras.Model.fit
    fit_signature = inspect.signature(stock_fit)

    @functools.wraps(stock_fit)
    def fit(self: keras.Model, *args: Any, **kwargs: Any) -> Any:
        if not extension.is_for(self.distribute_strategy):
            return stock_fit(self, *args, **kwargs)
        given = fit_signature.bind(self, *args, **kwargs).arguments
        del given["self"]
        with extension.fitting(self, given):
            return stock_fit(self, **given)

    # Private: Keras refuses what is no optimizer; and it does not compile a model that it loads if the `compile` of its
    # class is not that of `Trainer`.
    stock_compile = Trainer.compile

    @functools.wraps(stock_compile)
    def compile_model(self: keras.Model, optimizer: Any = "rmsprop", *args: Any, **kwargs: Any) -> Any:
        if extension.is_for(self.distribute_strategy):
            optimizer = extension.compile(self, optimizer)
        return stock_compile(self, optimizer, *args, **kwargs)

    with contextlib.ExitStack() as stack:
        stack.enter_context(attribute_replaced(Trainer, "compile", compile_model))
        stack.enter_context(attribute_replaced(keras.Model, "fit", fit))
        for kind in _KINDS:
            stack.enter_context(
                attribute_replaced(keras.Model, f"make_{kind}_function", _make_function(kind, extension))
            )
        stack.enter_context(attribute_replaced(trainer, "TFEpochIterator", epoch_iterator))
        stack.enter_context(attribute_replaced(keras.Model, "_maybe_symbolic_build", build))
        yield


def _build(stock_build: Callable[[Any], None], model: keras.Model, iterator: Any, batch: Any) -> None:
    """Builds a model before its first step, if Keras' own steps will call it with the batches as they are.

    Other models, and those that cannot be built, create their variables while their first step is traced, as without a
    strategy: Keras without one builds no model here.

    Args:
      stock_build: calls the model with a symbolic batch, and its metrics with what it returns.
      model: a compiled model.
      iterator: an `EpochIterator`, or None.
      batch: a batch, if there is no iterator.
    """
    spec = batch if iterator is None else iterator.batch_spec
    if spec is None:
        return

    def build() -> None:
        # If the steps need what fails here, it fails again while they are traced.
        with contextlib.suppress(Exception):
            stock_build(spec)

    if model.built or not _has_own_steps(model):
        build()
    # Private: at the end of an epoch Keras reads the metrics given to `compile`, also if no step has updated them.
    elif iterator is not None and model._compile_metrics is not None and not model._compile_metrics.built:
        iterator.build_after_epoch = build


def _has_own_steps(model: keras.Model) -> bool:
    """Returns True if the model's class overrides a step, which may call parts of the model, with other inputs."""
    names = [f"{kind}_step" for kind in _KINDS]
    return any(getattr(type(model), name) is not getattr(keras.Model, name) for name in names)


def _make_function(kind: str, extension: Any) -> Callable[..., Any]:
    stock = getattr(keras.Model, f"make_{kind}_function")
    name = f"{kind}_function"

    @functools.wraps(stock)
    def make_function(self: keras.Model, force: bool = False) -> Any:
        if not extension.is_for(self.distribute_strategy):
            return stock(self, force)
        if force or getattr(self, name) is None:
            setattr(self, name, extension.turn_function(self, kind))
        return getattr(self, name)

    return make_function


class RangeIterator(EpochIterator):
    """The turns of an epoch, which ends when the feed has no more, whatever number of them was expected.

    Args:
      feed: see `EpochIterator`; its `turns()` yields, for each turn, the place of its first batch in the epoch.
      element_spec: the type of a batch, as nested `tf.TypeSpec`s.
      batch_size: the number of examples in a batch.
      batches_per_epoch: how many batches are expected.
      batches_per_turn: how many batches a turn has.
    """

    def __init__(
        self, feed: Any, element_spec: Any, batch_size: int, batches_per_epoch: int, batches_per_turn: int
    ) -> None:
        data = OwnData(types.SimpleNamespace(element_spec=element_spec), batches_per_epoch, batch_size)
        super().__init__(lambda _: feed, data, {"steps_per_execution": batches_per_turn})
        self._feed = feed

    def _enumerate_iterator(self) -> Iterator[Any]:
        for place in self._feed.turns():
            yield place, place + self.steps_per_execution - 1, self._feed


def array_inputs(x: Any, arguments: dict[str, Any]) -> tuple[Any, int] | None:
    """Returns the arrays of a call of `fit`, nested as a batch is, with class weights applied; and the batch size.

    Args:
      x: anything that `fit` takes.
      arguments: the other arguments of Keras' epoch iterator.

    Returns:
      NumPy arrays of numbers, and None for the parts that batches do not have; None for other data, and where an epoch
      is not to be all of it.

    Raises:
      ValueError: what Keras raises for arrays that do not fit together.
    """
    y, sample_weight = arguments.get("y"), arguments.get("sample_weight")
    is_whole = arguments.get("steps_per_epoch") is None and config.max_steps_per_epoch() is None
    if x is None or not is_whole or not can_convert_arrays((x, y, sample_weight)):
        return None
    names = ("sample_weight", "batch_size", "shuffle", "class_weight")
    adapter = ArrayDataAdapter(x, y, **{name: arguments[name] for name in names if name in arguments})
    inputs = tree.lists_to_tuples(adapter._inputs)
    if not all(_is_numeric(part) for part in tf.nest.flatten(inputs) if part is not None):
        return None
    parts = tf.nest.map_structure(lambda part: None if part is None else _converted(part), inputs)
    return parts, adapter.batch_size


def _is_numeric(part: Any) -> bool:
    if isinstance(part, tf.Tensor):
        return bool(part.dtype.is_floating or part.dtype.is_integer or part.dtype.is_bool)
    return isinstance(part, np.ndarray) and part.dtype.kind in "biuf"


def _converted(part: Any) -> Any:
    sliceable = convert_to_sliceable(part, target_backend="numpy")
    return sliceable.convert_to_numpy(sliceable[:])
