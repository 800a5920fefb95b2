"""Replaces functions of Keras 3 while a strategy is open; `row_updates.py` replaces functions of optimizers.

`Model.fit`, `evaluate` and `predict` stay Keras' code, with its callbacks. Keras' loop needs an epoch iterator, and a
function to call in each turn (iteration). `FitExtension` provides both for the models of its strategies. Keras builds a
model from the first batch. The models of these strategies are built from the type of their batches, because not all
data can be read twice; if that fails, they are built while their first step is traced.

Leaving the context managers restores Keras' own functions, unless other code has replaced them in between.
"""

import contextlib
import functools
import inspect
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

# Private: Keras' adapter has the arrays with their weights, but offers them only as a dataset of the client. Keras'
# conversions are used, so that arrays have the same types and dtypes as in Keras.
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
from coordinator.ps_strategy.tensorflow_internals.handles import is_on_parameter_server
from coordinator.ps_strategy.tensorflow_internals.process import attribute_replaced
from coordinator.ps_strategy.tensorflow_internals.replicas import first_part_spec

_logger = logging.getLogger("coordinator")

_KINDS = ("train", "test", "predict")

# Private: names that differ between Keras 3.10 to 3.15 and 3.16. The class that defines `compile` is `Trainer` in 3.15,
# `BaseTrainer` in 3.16. The module with `keras.ops.take` is `backend.numpy` in 3.15, `backend.ops.numpy` in 3.16.
Trainer: Any = next(kind for kind in keras.Model.__mro__ if "compile" in vars(kind))
numpy_operations: Any = getattr(backend, "ops", backend).numpy


def structured_inputs(model: keras.Model) -> Any | None:
    """Returns the symbolic inputs of a functional or `Sequential` model, nested like its arguments, otherwise None."""
    # Private: `model.inputs` is a flat list, and the functional part of a model has no public name; a `Sequential`
    # has a functional model inside.
    functional = getattr(model, "_functional", model)
    return getattr(functional, "_inputs_struct", None)


def is_state_of_sequences() -> bool:
    """Returns True if the variable that is being created is the state of a recurrent layer with `stateful=True`.

    A batch leaves such a state for the next batch of the same sequences. Each worker has its own state, because workers
    that shared a state would mix their sequences. (Keras 2 refuses such layers in the scope of a strategy.)
    """
    # Private: TensorFlow does not tell a variable creator which object creates the variable; the layers have no hook.
    creator = getattr(keras.layers.RNN._create_state_variables, "__wrapped__", keras.layers.RNN._create_state_variables)
    frame: Any = sys._getframe()
    while frame is not None and frame.f_code is not creator.__code__:
        frame = frame.f_back
    return frame is not None


def stateful_layers(model: keras.Model) -> list[keras.Layer]:
    """Returns the recurrent layers with `stateful=True` of a model and of the models in it."""
    # Private: `model.layers` has only the layers of the outermost model.
    return [layer for layer in model._flatten_layers() if isinstance(layer, keras.layers.RNN) and layer.stateful]


@contextlib.contextmanager
def gradients_captured(optimizer: keras.optimizers.Optimizer) -> Iterator[list[tuple[Any, Any]]]:
    """A scope in which an optimizer collects the gradients that it gets, and applies nothing.

    Yields a list with a pair of gradients and variables for each call of `apply` or `apply_gradients`.
    """
    captured: list[tuple[Any, Any]] = []

    def apply(grads: Any, trainable_variables: Any = None) -> None:
        captured.append((list(grads), list(trainable_variables or optimizer._trainable_variables)))

    # `apply_gradients` calls `apply` before it clips gradients; the rule does the clipping.
    with attribute_replaced(optimizer, "apply", apply):
        yield captured


def stored_variable(variable: keras.Variable) -> Any:
    """Returns the TensorFlow variable of a Keras variable, also in a stateless scope; None before it is created."""
    # Private: in a stateless scope, `value` returns the value that the variable has in the scope.
    return variable._value


def compilation_of(model: keras.Model) -> Any:
    """Returns an object that each `compile` of a model replaces."""
    # Private: `compile` does not replace metrics that the model has made itself.
    return model._loss_tracker


class EvaluationScope(keras.StatelessScope):
    """A scope in which `variables` have changeable values, at first `values`. Every other variable is read once.

    The other variables are read in `graph`, outside of the function that is traced in this scope: a read inside of a
    loop would ask the parameter server in each iteration. `stored` returns the TensorFlow variable to read for a Keras
    variable. If it returns None, because the variable was not created, the value is zeros.

    Attributes:
      others: the names of other variables to which the function has assigned a value.
      is_incomplete: whether the function has read a variable that was not created.
    """

    def __init__(
        self, variables: Sequence[keras.Variable], values: Sequence[Any], stored: Callable[[Any], Any], graph: Any
    ) -> None:
        super().__init__(zip(variables, values, strict=True), collect_losses=True)
        self._own = set(map(id, variables))
        self._stored = stored
        self._graph = graph
        self._reads: dict[int, Any] = {}
        self.others: list[str] = []
        self.is_incomplete = False

    # Keras calls this method when a variable is read, and `add_update` when a variable is assigned.
    def get_current_value(self, variable: keras.Variable) -> Any:
        value = super().get_current_value(variable)
        if value is not None:
            return value
        stored = self._stored(variable)
        if stored is None:
            self.is_incomplete = True
            return tf.zeros(variable.shape, variable.dtype)
        if id(variable) not in self._reads:
            with self._graph.as_default():
                self._reads[id(variable)] = tf.convert_to_tensor(stored)
        return self._reads[id(variable)]

    def add_update(self, update: tuple[keras.Variable, Any]) -> None:
        if id(update[0]) not in self._own:
            self.others.append(update[0].path)
        super().add_update(update)

    def stored(self, variable: keras.Variable) -> Any:
        """Returns the TensorFlow variable whose rows may be read; None for a variable whose value is in the scope."""
        return None if id(variable) in self.state_mapping else self._stored(variable)


class RepeatedStepScope(keras.StatelessScope):
    """A scope in which a step leaves metrics, seeds and statistics unchanged, and reads all variables as before."""

    def stored(self, variable: keras.Variable) -> Any:
        """Returns the TensorFlow variable whose rows may be read; None for a variable that the step has assigned."""
        return None if id(variable) in self.state_mapping else stored_variable(variable)


@contextlib.contextmanager
def row_lookups() -> Iterator[None]:
    """A scope in which `keras.ops.take`, and so `keras.layers.Embedding`, reads single rows from parameter servers.

    Keras itself sends the whole table to the worker at each look-up, because `ops.take` converts the table to a tensor
    (twice: once to get its shape). Gradients are `tf.IndexedSlices` either way. Keras' own function is called for
    variables that are not on a parameter server, for sparse indices, and for axes other than the first.
    """
    # Private: TensorFlow looks up single rows of objects with a method `sparse_read`, which Keras' variables lack. A
    # look-up cannot be distinguished from other conversions of a variable, and no public hook is called before it.
    take = numpy_operations.take
    if list(inspect.signature(take).parameters) != ["x", "indices", "axis"]:
        _logger.warning("Embeddings are read as a whole in each step: this Keras (%s) is not known.", keras.__version__)
        yield
        return
    with attribute_replaced(numpy_operations, "take", functools.wraps(take)(functools.partial(_take, take))):
        yield


def _take(take: Callable[..., Any], x: Any, indices: Any, axis: int | None = None) -> Any:
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
    """Returns the TensorFlow variable of a Keras variable if its rows can be read on a parameter server, else None."""
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
    """The turns of an epoch. The epoch ends when all steps that were started in it have finished.

    `create_feed` takes a `tf.data.Dataset` (None for `OwnData`) and returns a feed that reads the dataset from its
    beginning. Keras' loop gets the feed in each turn. A feed is an iterator of the coming batches; its method
    `wait_finished()` waits for all started steps and raises their errors. `arguments` are for Keras' `EpochIterator`.
    """

    _current_feed: Any = None
    # A function to call once, when the steps of an epoch have finished.
    build_after_epoch: Callable[[], None] | None = None

    def __init__(self, create_feed: Callable[[Any], Any], x: Any, arguments: dict[str, Any]) -> None:
        # Skips the constructor of `StockEpochIterator`, which distributes the dataset as synchronous strategies do.
        super(StockEpochIterator, self).__init__(x=x, **arguments)
        self._is_own_and_uncounted = isinstance(x, OwnData) and self.steps_per_epoch is None
        dataset = None if isinstance(x, OwnData) else without_autotuning(self.data_adapter.get_tf_dataset())
        self._element_spec = first_part_spec(x.element_spec if dataset is None else dataset.element_spec)
        self._create_feed = functools.partial(create_feed, dataset)

    def _get_iterator(self) -> Any:
        return self._create_feed()

    @property
    def batch_spec(self) -> Any:
        """The type of a batch as nested `tf.TypeSpec`s; None if a dimension other than the batch size is unknown."""
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
                # Keras would warn, and expect the same number of turns in the next epoch, if it saw the error.
                if not self._is_own_and_uncounted:
                    raise
                self._current_iterator = None

    def __next__(self) -> Any:
        turn = super().__next__()
        self._current_feed = turn[-1]
        return turn


class OwnData(DataAdapter):
    """Data that is read on the workers, in batches of the type `element_spec`.

    The number of batches of an epoch and the number of examples in a batch may be unknown.
    """

    # Replace the base class' properties of these names.
    num_batches: int | None = None
    batch_size: int | None = None

    def __init__(self, element_spec: Any, num_batches: int | None = None, batch_size: int | None = None) -> None:
        self.element_spec = element_spec
        self.num_batches = num_batches
        self.batch_size = batch_size


class RangeIterator(EpochIterator):
    """The turns of an epoch. The epoch ends when the feed has no more turns, even if more were expected.

    For each turn, the feed's `turns()` yields the position of the turn's first batch in the epoch.
    """

    def _enumerate_iterator(self) -> Iterator[Any]:
        feed = self._get_iterator()
        for place in feed.turns():
            yield (place, place + self.steps_per_execution - 1, feed) if _turns_have_ends() else (place, feed)


@functools.cache
def _turns_have_ends() -> bool:
    """Returns whether a turn names its first batch and its last one, as in Keras 3.11 and later."""
    # Private: Keras' loop unpacks the turns.
    return len(next(iter(StockEpochIterator.__base__(x=np.zeros([1, 1]))))) == 3


@contextlib.contextmanager
def trainer_extended(extension: Any) -> Iterator[None]:
    """A scope in which Keras' loop uses an extension, a `FitExtension`, for the extension's models."""
    stock_iterator = trainer.TFEpochIterator

    def epoch_iterator(distribute_strategy: Any = None, x: Any = None, **arguments: Any) -> Any:
        if extension.is_for(distribute_strategy):
            return extension.epoch_iterator(distribute_strategy, x, arguments)
        return stock_iterator(distribute_strategy, x=x, **arguments)

    def build(stock: Callable[..., Any], model: keras.Model, iterator: Any = None, data_batch: Any = None) -> None:
        _build(functools.partial(stock, model, None), model, iterator, data_batch)

    fit_signature = inspect.signature(keras.Model.fit)

    def fit(stock: Callable[..., Any], model: keras.Model, *args: Any, **kwargs: Any) -> Any:
        given = fit_signature.bind(model, *args, **kwargs).arguments
        del given["self"]
        with extension.fitting(model, given):
            return stock(model, **given)

    def compile_model(
        stock: Callable[..., Any], model: keras.Model, optimizer: Any = "rmsprop", *args: Any, **kwargs: Any
    ) -> Any:
        return stock(model, extension.compile(model, optimizer), *args, **kwargs)

    def make_function(kind: str, _: Callable[..., Any], model: keras.Model, force: bool = False) -> Any:
        name = f"{kind}_function"
        if force or getattr(model, name) is None:
            setattr(model, name, extension.turn_function(model, kind))
        return getattr(model, name)

    with contextlib.ExitStack() as stack:
        # Private: Keras' `compile` refuses update rules. `compile` is replaced in the class `Trainer`, because Keras
        # does not compile a model that it loads if the model's class has another `compile` than `Trainer`.
        stack.enter_context(_method_extended(extension, Trainer, "compile", compile_model))
        # The public `fit` is replaced, because Keras' iterator does not get the epochs for which it is made.
        stack.enter_context(_method_extended(extension, keras.Model, "fit", fit))
        for kind in _KINDS:
            make = functools.partial(make_function, kind)
            stack.enter_context(_method_extended(extension, keras.Model, f"make_{kind}_function", make))
        stack.enter_context(attribute_replaced(trainer, "TFEpochIterator", epoch_iterator))
        # Private: `_maybe_symbolic_build` builds a model that was not called yet.
        stack.enter_context(_method_extended(extension, keras.Model, "_maybe_symbolic_build", build))
        yield


def _build(stock_build: Callable[[Any], None], model: keras.Model, iterator: Any, batch: Any) -> None:
    """Builds a model before its first step, if Keras' own steps will call it with unchanged batches.

    Other models, and models that cannot be built, create their variables while their first step is traced, as all
    models do in Keras without a strategy. `stock_build` calls the model with a symbolic batch, and the model's metrics
    with the result. Either an `EpochIterator` or a batch is given.
    """
    spec = batch if iterator is None else iterator.batch_spec
    if spec is None:
        return

    def build() -> None:
        # If a step needs the code that fails here, the error is raised again while the step is traced.
        with contextlib.suppress(Exception):
            stock_build(spec)

    # A step that the model's class overrides may call only parts of the model, with other inputs.
    steps = [f"{kind}_step" for kind in _KINDS]
    if model.built or all(getattr(type(model), step) is getattr(keras.Model, step) for step in steps):
        build()
    # Private: at the end of an epoch Keras reads the metrics given to `compile`, even if no step has updated them.
    elif iterator is not None and model._compile_metrics is not None and not model._compile_metrics.built:
        iterator.build_after_epoch = build


@contextlib.contextmanager
def backups_extended(extension: Any) -> Iterator[None]:
    """A scope in which the backup callback saves and restores the position in the data, for an extension's models.

    The extension's `saving(model, folder)` is a scope in which a backup is written. Keras' loop begins in the epoch
    that `restored(model, folder, epoch)` returns; `restored` is called even if there was no backup.
    """

    def save(stock: Callable[..., Any], self: Any) -> None:
        with extension.saving(self.model, self.backup_dir):
            stock(self)

    def load(stock: Callable[..., Any], self: Any) -> None:
        stock(self)
        # Private: `_initial_epoch` is the epoch in which the loop begins.
        self.model._initial_epoch = extension.restored(self.model, self.backup_dir, self.model._initial_epoch)

    # Private: the callback has no hook, and decides itself when to save.
    callback = keras.callbacks.BackupAndRestore
    with (
        _method_extended(extension, callback, "_save_model", save, lambda callback: callback.model),
        _method_extended(extension, callback, "_load_model", load, lambda callback: callback.model),
    ):
        yield


def _method_extended(
    extension: Any,
    owner: type[Any],
    name: str,
    method: Callable[..., Any],
    model_of: Callable[[Any], keras.Model] = lambda model: model,
) -> contextlib.AbstractContextManager[None]:
    """A scope in which `method` is called for an extension's models, with Keras' own method as its first argument."""
    stock = getattr(owner, name)

    @functools.wraps(stock)
    def extended(self: Any, *args: Any, **kwargs: Any) -> Any:
        if extension.is_for(model_of(self).distribute_strategy):
            return method(stock, self, *args, **kwargs)
        return stock(self, *args, **kwargs)

    return attribute_replaced(owner, name, extended)


def array_inputs(x: Any, arguments: dict[str, Any]) -> tuple[Any, int] | None:
    """Returns the arrays of a call of `fit`, nested like a batch, with class weights applied; and the batch size.

    The arrays are NumPy arrays of numbers, with None for missing parts of a batch. Returns None for other data, and if
    an epoch reads only a part of the data. Raises Keras' error for arrays that do not fit together.
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

    def converted(part: Any) -> Any:
        sliceable = None if part is None else convert_to_sliceable(part, target_backend="numpy")
        return None if sliceable is None else sliceable.convert_to_numpy(sliceable[:])

    return tf.nest.map_structure(converted, inputs), adapter.batch_size


def _is_numeric(part: Any) -> bool:
    if isinstance(part, tf.Tensor):
        return bool(part.dtype.is_floating or part.dtype.is_integer or part.dtype.is_bool)
    return isinstance(part, np.ndarray) and part.dtype.kind in "biuf"
