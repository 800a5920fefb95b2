"""Lookup tables whose content changes, on a parameter server."""

import copy
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf
from tensorflow.python.framework import ops

# The classes in `tf.lookup.experimental`, which are also the kinds of `resource_creator_scope`.
KINDS = ("MutableHashTable", "DenseHashTable")

_ANONYMOUS = "experimental_is_anonymous"


def is_created_by_keras() -> bool:
    """Returns True if Keras is creating the present table or variable for itself.

    Such a table counts words while a layer is adapted on the client; no step uses it.
    """
    # Private: TensorFlow does not tell a creator who creates, and the layers of Keras 2 and 3 have no hook.
    frame: Any = sys._getframe()
    while frame is not None and _package(frame) in ("coordinator", "tensorflow"):
        frame = frame.f_back
    return frame is not None and _package(frame) in ("keras", "tf_keras")


def _package(frame: Any) -> str:
    return str(frame.f_globals.get("__name__")).partition(".")[0]


class TableResource:
    """What a server holds of a table. It has a name there, by which datasets on other servers find it.

    The name belongs to this client: no other client of the server finds it, and what the server holds of the table is
    freed with all else of this client.

    Args:
      table: a table of one of the `KINDS`.
      device: the full name of a device of the server.
    """

    def __init__(self, table: Any, device: str) -> None:
        # Private: publicly, a resource is created only together with its table. A copy, because it outlives the table.
        self._creator = copy.copy(table)
        self._creator._resource_handle = None
        self._device = device

    def handle(self) -> tf.Tensor:
        """Returns a handle of the resource, which is created, empty, if there is none."""
        with tf.init_scope(), tf.device(None), tf.device(self._device):
            return self._creator._create_resource()

    def free(self) -> None:
        """Frees the resource, if there is one. Its handles become useless."""
        tf.raw_ops.DestroyResourceOp(resource=self.handle())


class _RemoteDenseHashTable(tf.lookup.experimental.DenseHashTable):
    """Accepts what it has exported.

    Scalar keys are exported as vectors of one element, which an import into a table on a server refuses: it checks the
    shapes, if they are known.
    """

    def _restore_from_tensors(self, restored_tensors: Mapping[str, Any]) -> Any:
        # Private: checkpoints are restored by this method.
        restore = super()._restore_from_tensors
        if not tf.executing_eagerly():
            return restore(restored_tensors)

        @tf.function(
            autograph=False, input_signature=[tf.TensorSpec(None, part.dtype) for part in restored_tensors.values()]
        )
        def restore_any_shape(*parts: Any) -> None:
            restore(dict(zip(restored_tensors, parts, strict=True)))

        return restore_any_shape(*restored_tensors.values())


class _OnAnyDevice:
    """What a mutable table does, where TensorFlow's own methods place it on the device of the table on the client."""

    resource_handle: tf.Tensor
    key_dtype: tf.DType
    value_dtype: tf.DType
    _default_value: tf.Tensor

    def size(self, name: str | None = None) -> tf.Tensor:
        return tf.raw_ops.LookupTableSizeV2(table_handle=self.resource_handle, name=name)

    def lookup(self, keys: Any, dynamic_default_values: Any = None, name: str | None = None) -> tf.Tensor:
        # Private: what is found for unknown keys has no public name.
        default = self._default_value if dynamic_default_values is None else dynamic_default_values
        keys = tf.convert_to_tensor(keys, self.key_dtype)
        return tf.raw_ops.LookupTableFindV2(
            table_handle=self.resource_handle, keys=keys, default_value=default, name=name
        )

    def insert(self, keys: Any, values: Any, name: str | None = None) -> Any:
        keys, values = tf.convert_to_tensor(keys, self.key_dtype), tf.convert_to_tensor(values, self.value_dtype)
        return tf.raw_ops.LookupTableInsertV2(table_handle=self.resource_handle, keys=keys, values=values, name=name)

    def export(self, name: str | None = None) -> tuple[tf.Tensor, tf.Tensor]:
        exported = tf.raw_ops.LookupTableExportV2(
            table_handle=self.resource_handle, Tkeys=self.key_dtype, Tvalues=self.value_dtype, name=name
        )
        return exported.keys, exported.values


class _HashTableOnAnyDevice(_OnAnyDevice, tf.lookup.experimental.MutableHashTable):
    pass


class _DenseTableOnAnyDevice(_OnAnyDevice, tf.lookup.experimental.DenseHashTable):
    pass


_ON_ANY_DEVICE = {
    tf.lookup.experimental.MutableHashTable: _HashTableOnAnyDevice,
    tf.lookup.experimental.DenseHashTable: _DenseTableOnAnyDevice,
}


def let_run_anywhere(table: Any) -> None:
    """Has a function that uses a mutable table of the client run where it is called, with the table of that place."""
    table.__class__ = _ON_ANY_DEVICE.get(type(table), type(table))


def create_mutable_table(
    next_creator: Callable[..., Any], device: str, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[Any, TableResource]:
    """Creates a table whose resource is on a device, and whose other tensors are on the client.

    Args:
      next_creator: creates it on the current device.
      device: the full name of a device.
      args: the positional arguments of its constructor.
      kwargs: its keyword arguments.
    """
    # A resource without a name is freed as soon as another one takes its place.
    with tf.device(None), tf.device("/device:CPU:0"):
        table = next_creator(*args, **{**kwargs, _ANONYMOUS: True})
    if not kwargs.get(_ANONYMOUS):
        # Private: what the constructor does otherwise.
        table._is_anonymous, table._shared_name = False, f"table_{ops.uid()}"
    if type(table) is tf.lookup.experimental.DenseHashTable:
        table.__class__ = _RemoteDenseHashTable
    resource = TableResource(table, device)
    table._resource_handle = resource.handle()
    return table, resource


def table_content(table: Any) -> dict[str, np.ndarray]:
    """Returns the content of a table, as arrays on the client: what a checkpoint holds of it."""
    # Private: `export` of a `DenseHashTable` returns free buckets too, which `insert` refuses.
    return {name: tensor.numpy() for name, tensor in table._serialize_to_tensors().items()}


def set_table_content(table: Any, content: Mapping[str, np.ndarray]) -> None:
    """Replaces all content of a table by what `table_content` returned for it."""
    # Private: as above.
    table._restore_from_tensors({name: tf.convert_to_tensor(array) for name, array in content.items()})


def table_name(table: Any) -> str:
    """Returns the name that a table was created with, for messages."""
    # Private: `table.name` is None when eager execution is enabled.
    return str(table._name)
