"""The private names of TensorFlow and Keras that tests read, each in one place."""

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import keras
import tensorflow as tf
from tensorflow.python.autograph.operators import control_flow
from tensorflow.python.autograph.pyct import transpiler
from tensorflow.python.framework import auto_control_deps


def function_in(graph: Any, name: str) -> Any:
    """Returns the function of this name in a graph's library."""
    return graph._get_function(name)


def call_flat(function: Any, inputs: list[tf.Tensor]) -> Any:
    """Calls a concrete function with all its inputs, the captured ones included."""
    return function._call_flat(inputs, [])


def handle_data(handle: tf.Tensor) -> Any:
    """Returns the dtype and shape of a resource's value, as recorded by TensorFlow."""
    return handle._handle_data


@contextlib.contextmanager
def writing_replaced(checkpoint: tf.train.Checkpoint, write: Callable[..., Any]) -> Iterator[None]:
    """Makes `write(original, *args, **kwargs)` write the checkpoint within the block."""
    with mock.patch.object(checkpoint, "_write", functools.partial(write, checkpoint._write)):
        yield


def product_of_momenta(optimizer: keras.optimizers.Nadam) -> keras.Variable:
    """Returns the product of the momenta of all updates."""
    return optimizer._u_product


def moving_averages(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns the moving averages of the model's variables."""
    return optimizer._model_variables_moving_average


def variables_trained_by(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns the variables that the optimizer was built for."""
    return optimizer._trainable_variables


def accumulated_gradients(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns the sums of gradients that are not applied yet."""
    return optimizer._accumulated_gradients


def rate_variable(optimizer: keras.optimizers.Optimizer) -> keras.Variable:
    """Returns the variable that holds the learning rate."""
    return optimizer._learning_rate


def row_update_hooks() -> list[Callable[..., Any]]:
    """Returns the methods of Keras' optimizers that are replaced so that sparse gradients change single rows."""
    return [keras.optimizers.Optimizer._backend_apply_gradients]


def table_update_hooks() -> list[Callable[..., Any]]:
    """Returns the methods of Keras' optimizers that are replaced so that tables get their gradients."""
    base = keras.optimizers.Optimizer
    return [
        base._backend_apply_gradients,
        base.add_variable_from_reference,
        base._overwrite_model_variables_with_average_value,
        keras.optimizers.LossScaleOptimizer.check_finite,
    ]


def resource_resolvers() -> list[str]:
    """Returns the names of the hooks of automatic control dependencies."""
    return list(auto_control_deps._acd_resource_resolvers_registry.list())


def range_loop() -> Any:
    """Returns what AutoGraph calls for a loop over `tf.range`."""
    return control_flow._tf_range_for_stmt


@contextlib.contextmanager
def functions_converted() -> Iterator[list[Any]]:
    """Yields the functions that AutoGraph converts in the scope."""
    found: list[Any] = []
    transform = transpiler.PyToPy.transform_function
    with mock.patch.object(
        transpiler.PyToPy, "transform_function", lambda self, fn, *rest: found.append(fn) or transform(self, fn, *rest)
    ):
        yield found
