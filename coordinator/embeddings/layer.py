"""A Keras layer that looks up the rows of a table by their keys."""

from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

if TYPE_CHECKING:
    from coordinator.embeddings.table import Table


_COMBINERS = ("sum", "mean", "sqrtn")


def _flat_keys(keys: Any) -> Any:
    if isinstance(keys, tf.RaggedTensor):
        return keys.flat_values
    return keys.values if isinstance(keys, tf.SparseTensor) else keys


def _combined(rows: Any, keys: Any, weights: Any, is_used: Any, combiner: str) -> Any:
    """Combines the rows of `_flat_keys(keys)` along the last dimension of the keys. A group without keys gives zeros.

    The result is ragged if another dimension of the keys is ragged. `weights` have the form of the keys; None gives
    each key the weight 1. `is_used` says which of `_flat_keys(keys)` count; None counts all keys. "mean" divides by the
    sum of the weights, "sqrtn" by the root of the sum of the squared weights.
    """
    flat = _flat_keys(keys)
    # `reshape` fails if the numbers of weights and keys differ.
    weights = tf.ones_like(flat, rows.dtype) if weights is None else tf.reshape(_flat_keys(weights), tf.shape(flat))
    weights = tf.cast(weights, rows.dtype)
    if is_used is not None:
        weights = tf.where(is_used, weights, 0)
    sums, result = _sums(keys)
    total = sums(rows * weights[..., tf.newaxis])
    if combiner != "sum":
        divisor = sums(weights) if combiner == "mean" else tf.sqrt(sums(weights**2))
        total = tf.math.divide_no_nan(total, divisor[..., tf.newaxis])
    return result(total)


def _sums(keys: Any) -> tuple[Any, Any]:
    """Returns two functions: to sum over the last dimension of `keys`, and to arrange sums in the other dimensions."""
    if isinstance(keys, tf.RaggedTensor) and keys.flat_values.shape.rank == 1:
        inner = keys
        while isinstance(inner.values, tf.RaggedTensor):
            inner = inner.values
        outer = keys.nested_row_splits[:-1]
        segments, count = inner.value_rowids(), inner.nrows()

        def arrange(sums: Any) -> Any:
            return tf.RaggedTensor.from_nested_row_splits(sums, outer, validate=False) if outer else sums

    elif isinstance(keys, tf.SparseTensor):
        shape = keys.dense_shape[:-1]
        strides = tf.math.cumprod(shape, exclusive=True, reverse=True)
        segments, count = tf.reduce_sum(keys.indices[:, :-1] * strides, axis=1), tf.reduce_prod(shape)

        def arrange(sums: Any) -> Any:
            result = tf.reshape(sums, tf.concat([shape, tf.shape(sums, tf.int64)[1:]], 0))
            return tf.ensure_shape(result, keys.shape[:-1].concatenate(sums.shape[1:]))

    else:
        # The last dimension has a uniform length.
        axis = _flat_keys(keys).shape.rank - 1
        is_ragged = isinstance(keys, tf.RaggedTensor)
        return lambda x: tf.reduce_sum(x, axis), lambda sums: keys.with_flat_values(sums) if is_ragged else sums
    return lambda x: tf.math.unsorted_segment_sum(x, segments, count), arrange


@keras.saving.register_keras_serializable("coordinator")
class Embedding(keras.layers.Layer):
    """Replaces keys by their rows in a table, as `keras.layers.Embedding` replaces small integers by rows of a matrix.

    Look-ups with `training=True`, as in `fit`, create rows and count keys for admission. If `training` is None,
    look-ups that a `tf.GradientTape` records do so too. In `predict`, `evaluate` and validation, and if `trainable` is
    False, a key without a row gets the table's default, and the table does not change.

    The model's optimizer clips the gradients of the table together with all others (`clipnorm`, `clipvalue`,
    `global_clipnorm`, `LossScaleOptimizer`). The table's own optimizer then applies the gradients of the table. The
    model's optimizer has no slots for the table, and its learning rate and weight decay do not affect the table.

    The layer has a trainable variable, `table.variable`, of shape (capacity, dim), for which gradients are computed.
    The values of the variable are on the parameter servers, and `model.save` and `save_weights` do not save them. To
    load such a model, name the table: `keras.models.load_model(path, custom_objects={table.name: table})`.

    Args:
      table: a `coordinator.embeddings.Table`; several layers may share it.
      combiner: "sum", "mean" or "sqrtn" combines the rows along the last dimension of the keys to one row, as
        `tf.nn.embedding_lookup_sparse` does. None returns a row for each key. Sparse keys need a combiner.
      mask_zero: whether the key 0, or "" for strings, is padding. A mask or the combiner then leaves the padding out.
      name, dtype, trainable: see `keras.layers.Layer`.

    Raises:
      ValueError: `combiner` has another value.

    Call arguments:
      keys: integers or strings of any shape: a tensor, a `tf.RaggedTensor`, or with a combiner a `tf.SparseTensor` of
        at least two dimensions.
      weights: in the kind and shape of the keys, a number for each key, by which a combiner multiplies the key's row.
      training: whether new keys may get rows; see above.
    """

    def __init__(self, table: "Table", combiner: str | None = None, mask_zero: bool = False, **options: Any) -> None:
        if combiner not in (None, *_COMBINERS):
            raise ValueError(f"combiner must be one of {', '.join(map(repr, _COMBINERS))} or None, got {combiner!r}.")
        super().__init__(**options)
        self.table = table
        self.combiner = combiner
        self.mask_zero = mask_zero
        self.supports_masking = mask_zero
        self.autocast = False
        # The rows are on CPUs, which a function that XLA compiles for a GPU cannot reach.
        self.supports_jit = False
        # The layer is built here. If a traced first call built it, the model would create a variable with values.
        self.build()

    def build(self, input_shape: Any = None) -> None:  # noqa: ARG002  # Keras'
        """Adds the table's variable to the layer."""
        table = self.table
        variable: Any = table.variable
        # All layers of a table share one Keras variable, so that a model has the variable once.
        if not hasattr(variable, "keras_variable"):
            # Keras takes an existing variable only from a variable creator. This code never runs while tracing.
            with tf.variable_creator_scope(lambda *_, **__: variable):
                shape, name = (table.capacity, table.dim), table.name.replace("/", "_")
                variable.keras_variable = keras.Variable("zeros", shape, variable.dtype.name, name=name)
            # `export` finds the table by this attribute.
            variable.keras_variable.table = table
        self.rows = variable.keras_variable
        self.built = True

    def call(self, keys: Any, weights: Any = None, training: bool | None = None) -> Any:
        """Returns a row for each key, or with a combiner for each group of keys, in the layer's compute dtype.

        Returns:
          Without a combiner, a tensor of the shape of the keys and one more dimension, or a `tf.RaggedTensor` with the
          row lengths of the keys. With a combiner, the dimension of the rows replaces the last dimension of the keys.

        Raises:
          TypeError: the keys are neither integers nor strings.
          ValueError: the layer has no combiner, and the keys are sparse or have weights.
        """
        if not isinstance(keys, (tf.RaggedTensor, tf.SparseTensor)):
            keys = tf.convert_to_tensor(keys)
        self._check(keys.dtype.name, isinstance(keys, tf.SparseTensor), weights)
        flat = _flat_keys(keys)
        if training is None:
            training = self.table.variable.is_recorded()
        rows = self.table.lookup(flat, training=training and self.trainable)
        if self.combiner is None:
            rows = keys.with_flat_values(rows) if isinstance(keys, tf.RaggedTensor) else rows
        else:
            is_used = self._is_key(flat) if self.mask_zero else None
            rows = _combined(rows, keys, weights, is_used, self.combiner)
        return tf.cast(rows, self.compute_dtype)

    def compute_mask(self, keys: Any, previous_mask: Any = None) -> Any:  # noqa: ARG002  # Keras'
        """Returns which keys are not padding, or None if there is no padding or a combiner leaves the padding out."""
        if not self.mask_zero or self.combiner is not None or isinstance(keys, (tf.RaggedTensor, tf.SparseTensor)):
            return None
        return self._is_key(keys) if tf.is_tensor(keys) else keras.ops.not_equal(keys, 0)

    def compute_output_shape(self, keys_shape: Any) -> tuple[int | None, ...]:
        """Returns the shape of the result for keys of the shape `keys_shape`."""
        return (*(keys_shape if self.combiner is None else keys_shape[:-1]), self.table.dim)

    def compute_output_spec(self, keys: Any, weights: Any = None, training: Any = None) -> Any:  # noqa: ARG002  # Keras'
        """Returns the symbolic result for symbolic keys."""
        self._check(keys.dtype, getattr(keys, "sparse", False), weights)
        ragged = getattr(keys, "ragged", False) and (self.combiner is None or len(keys.shape) > 2)
        return keras.KerasTensor(self.compute_output_shape(keys.shape), self.compute_dtype, ragged=ragged)

    def save_own_variables(self, store: Any) -> None:
        """Saves nothing, because checkpoints contain the rows."""

    def load_own_variables(self, store: Any) -> None:
        """Loads nothing."""

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments that create an equal layer, with the table's name in place of the table."""
        own = {"table": self.table.name, "combiner": self.combiner, "mask_zero": self.mask_zero}
        return {**super().get_config(), **own}

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> "Embedding":
        """Creates a layer for the table that `custom_objects` has under the name in the config.

        Raises:
          ValueError: `custom_objects` has no table of this name.
        """
        name = config["table"]
        table = keras.saving.get_registered_object(name) if isinstance(name, str) else name
        if table is None:
            raise ValueError(
                f"The layer {config.get('name')!r} needs the table {name!r}, which is not saved with the model. Create "
                f"it, restore its checkpoint, and name it: keras.models.load_model(path, custom_objects={{{name!r}: "
                "table}), or `with keras.saving.custom_object_scope(...)` around other calls."
            )
        return cls(**{**config, "table": table})

    def _check(self, dtype: str, is_sparse: bool, weights: Any) -> None:
        if dtype not in ("int32", "int64", "string"):
            raise TypeError(
                f"The keys of the layer {self.name!r} must be int64, int32 or strings, got {dtype}. Give keras.Input "
                "dtype='int64' or 'string', or cast them."
            )
        if self.combiner is None and is_sparse:
            raise ValueError(f"Sparse keys need a combiner: create the layer {self.name!r} with combiner='sum'.")
        if self.combiner is None and weights is not None:
            raise ValueError(f"Weights of keys need a combiner: create the layer {self.name!r} with combiner='sum'.")

    def _is_key(self, keys: Any) -> Any:
        return keys != ("" if keys.dtype == tf.string else tf.zeros([], keys.dtype))
