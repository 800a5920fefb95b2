"""Tests that a profile of this process is reported, however it is begun."""

import keras
import numpy as np
import pytest
import tensorflow as tf
from tensorflow.python.profiler.internal import _pywrap_profiler

from coordinator.ps_strategy.tensorflow_internals.process import profiles_reported


def by_scope(folder):
    with tf.profiler.experimental.Profile(folder):
        pass


def by_summary(folder):
    tf.summary.trace_on(graph=False, profiler=True, profiler_outdir=folder)
    tf.summary.trace_off()


@pytest.mark.parametrize("profile", [by_scope, by_summary])
def test_the_first_profile_is_reported_before_it_begins(profile, tmp_path):
    stock, reported = _pywrap_profiler.ProfilerSession, []
    with profiles_reported(reported.append):
        profile(str(tmp_path))
        profile(str(tmp_path))
    assert reported == [str(tmp_path)]
    assert _pywrap_profiler.ProfilerSession is stock


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # Keras' own
def test_a_fit_that_is_profiled_says_once_that_the_workers_are_not(strategy, tmp_path, caplog):
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        model.compile("sgd", "mse")
    for profile_batch in (0, 1, (2, 3)):
        assert "shows this program alone" not in caplog.text or profile_batch == (2, 3)
        board = keras.callbacks.TensorBoard(tmp_path, profile_batch=profile_batch)
        model.fit(np.ones([32, 2]), np.ones([32, 1]), batch_size=8, verbose=0, callbacks=[board])
    [warning] = [each for each in caplog.messages if "shows this program alone" in each]
    assert "`coordinator profile --logdir" in warning
