"""Tests of what is read of Keras' adapter of arrays, without a promise of Keras."""

from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from coordinator.ps_strategy.keras.internals.patches import array_inputs

X = np.arange(12.0).reshape(6, 2)
Y = np.array([0, 1, 0, 1, 0, 1])
ADVICE = "Keras' ArrayDataAdapter has changed; see coordinator/ps_strategy/keras/internals/patches.py."


def found(x: Any, **arguments: Any) -> Any:
    inputs = array_inputs(x, {"class_weight": None, "steps_per_epoch": None, **arguments})
    assert inputs is not None, ADVICE
    return inputs


def test_arrays_are_those_that_keras_would_train_on() -> None:
    inputs, batch_size = found({"a": X, "b": tf.constant(X)}, y=Y, class_weight={0: 1.0, 1: 3.0})
    assert batch_size == 32
    features, labels, weights = inputs
    for name in ("a", "b"):
        assert features[name].dtype == np.float32
        np.testing.assert_array_equal(features[name], X.astype("float32"))
    np.testing.assert_array_equal(labels, Y)
    np.testing.assert_array_equal(weights, np.where(Y == 1, 3.0, 1.0))
    np.testing.assert_array_equal(found(X, batch_size=4)[0], X)
    assert found([X, X], y=Y, sample_weight=Y * 1.0, batch_size=4)[1] == 4


def test_other_data_are_left_to_keras() -> None:
    for x, arguments in (
        (None, {}),
        (X, {"steps_per_epoch": 2}),
        (tf.data.Dataset.range(3), {}),
        (np.array(["a", "b"]), {}),
        (tf.ragged.constant([[1], [2, 3]]), {}),
        (X, {"y": tf.sparse.from_dense(X)}),
    ):
        assert array_inputs(x, {"class_weight": None, **arguments}) is None


def test_arrays_that_do_not_fit_together_are_refused_by_keras() -> None:
    with pytest.raises(ValueError, match="cardinality"):
        array_inputs(X, {"y": Y[:4]})
