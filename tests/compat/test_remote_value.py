"""Tests of the result of a scheduled function under TensorFlow's name, without a cluster."""

import numpy as np
import pytest
import tensorflow as tf

from coordinator.compat import RemoteValue
from coordinator.errors import ClosureCancelledError, ClosureInputError, ParameterServerLost
from coordinator.future import Future


@pytest.fixture
def future():
    return Future("step", 0)


def test_it_is_one_of_tensorflows_remote_values(future):
    assert isinstance(RemoteValue(future), tf.distribute.coordinator.RemoteValue)
    assert isinstance(RemoteValue(future), tf.distribute.experimental.coordinator.RemoteValue)


def test_fetch_gives_numpy_values_and_get_gives_tensors_of_the_same_types(future):
    result = {"a": (np.float16(2), np.arange(3)), "b": [b"text", None, np.array([b"x"], object)]}
    future.set_result(result)
    assert RemoteValue(future).fetch() == result
    got = RemoteValue(future).get()
    tf.nest.assert_same_structure(got, result)
    assert [part.dtype for part in (*got["a"], got["b"][0], got["b"][2])] == [tf.float16, tf.int64] + 2 * [tf.string]
    assert all(tf.is_tensor(part) for part in (*got["a"], got["b"][0], got["b"][2]))
    assert got["b"][1] is None
    assert got["a"][1].numpy().tolist() == [0, 1, 2]


def test_fetch_turns_ragged_results_into_numpy_and_leaves_sparse_ones(future):
    ragged, sparse = tf.ragged.constant([[1], [2, 3]]), tf.sparse.from_dense([[0, 7]])
    future.set_result((ragged, sparse))
    assert RemoteValue(future).get() == (ragged, sparse)
    rows, same = RemoteValue(future).fetch()
    assert [list(row) for row in rows] == [[1], [2, 3]]
    assert same is sparse


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (ClosureCancelledError("another one failed"), tf.errors.CancelledError),
        (ParameterServerLost("/job:ps/task:0", "The server is gone."), tf.errors.UnavailableError),
        (tf.errors.OutOfRangeError(None, None, "End of sequence"), tf.errors.OutOfRangeError),
        (ClosureInputError("no data"), ClosureInputError),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_fetch_and_get_raise_the_errors_that_tensorflow_documents(future, error, kind):
    future.set_exception(error)
    for verb in (RemoteValue(future).fetch, RemoteValue(future).get):
        with pytest.raises(kind) as caught:
            verb()
        assert caught.value is error or caught.value.__cause__ is error
        assert str(error) in str(caught.value)


def test_a_function_that_was_cancelled_says_that_it_may_be_scheduled_again(future):
    future.set_cancelled()
    with pytest.raises(tf.errors.CancelledError, match="Please reschedule the function"):
        RemoteValue(future).fetch()
