"""Datasets whose elements have a part for each replica of a worker.

    of a dataset function    batch 0   batch 1   batch 2   batch 3        one batch for each replica
                             `-- element 0 --'   `-- element 1 --'
    any other dataset        batch 0 = element 0, divided by rows         one batch for all replicas

Promises: the parts are in the order of the dataset. Where the batches of a function run out within an element, replicas
without one get a batch of no rows, as with other strategies; if no shape allows that, the element is left out, as by
`drop_remainder`.
"""

from typing import Any

import tensorflow as tf

from coordinator.ps_strategy.tensorflow_internals.replica_values import PerReplicaSpec, divided, regrouped


def one_for_each_replica(dataset: tf.data.Dataset, replicas: int) -> tf.data.Dataset:
    """Returns a dataset of which each element consists of consecutive elements, as `PerReplica` values."""
    spec = dataset.element_spec
    if replicas == 1 or any(isinstance(each, PerReplicaSpec) for each in tf.nest.flatten(spec)):
        return dataset
    may_be_empty = _may_be_empty(spec)
    # Optionals, which are scalars whatever is in them, and share it: elements need not have one shape to be batched.
    wrapped = dataset.map(lambda *parts: _wrapped(parts[0] if len(parts) == 1 else parts))
    groups = wrapped.batch(replicas, drop_remainder=not may_be_empty)

    def unwrapped(group: Any) -> Any:
        if not may_be_empty:
            return regrouped([_value(group[number], spec) for number in range(replicas)])
        count = tf.shape(group)[0]
        return regrouped(
            [
                tf.cond(
                    number < count,
                    lambda number=number: _value(group[number], spec),
                    lambda: tf.nest.map_structure(_empty, spec),
                )
                for number in range(replicas)
            ]
        )

    return groups.map(unwrapped)


def divided_among_replicas(dataset: tf.data.Dataset, replicas: int) -> tf.data.Dataset:
    """Returns a dataset of the same batches, each divided into `PerReplica` values.

    Raises:
      ValueError: the elements are no batches.
    """
    if replicas == 1:
        return dataset
    return dataset.map(lambda *parts: divided(parts[0] if len(parts) == 1 else parts, replicas))


def _wrapped(element: Any) -> tf.Tensor:
    [variant] = tf.nest.flatten(tf.experimental.Optional.from_value(element), expand_composites=True)
    return variant


def _value(variant: tf.Tensor, spec: Any) -> Any:
    return tf.nest.pack_sequence_as(tf.OptionalSpec(spec), [variant], expand_composites=True).get_value()


def _may_be_empty(spec: Any) -> bool:
    """Returns True if every batch may have no rows."""
    specs = tf.nest.flatten(spec)
    return all(isinstance(each, tf.TensorSpec) and _has_free_rows(each.shape) for each in specs)


def _has_free_rows(shape: tf.TensorShape) -> bool:
    return bool(shape.rank) and shape[0] is None


def _empty(spec: tf.TensorSpec) -> tf.Tensor:
    return tf.zeros([size or 0 for size in spec.shape], spec.dtype)
