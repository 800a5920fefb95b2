import math

import numpy as np
import pytest
import tensorflow as tf

from coordinator.testbed.confirmation.sleeps import Sleeps


def test_the_table_is_lognormal() -> None:
    logarithms = np.log(Sleeps(median=0.05, sigma=0.5).table)
    assert logarithms.mean() == pytest.approx(math.log(0.05))
    assert logarithms.std() == pytest.approx(0.5, rel=0.05)


def test_steps_draw_from_the_table_and_those_of_the_slow_worker_a_multiple() -> None:
    sleeps = Sleeps(median=0.05, slow_factor=3.0)
    drawn = tf.function(lambda worker: sleeps.drawn(worker, 2), autograph=False)
    of_usual, of_slow = ([float(drawn(tf.constant(worker, tf.int64))) for _ in range(100)] for worker in (0, 2))
    assert {round(seconds, 9) for seconds in of_usual} <= {round(seconds, 9) for seconds in sleeps.table}
    assert {round(seconds / 3, 9) for seconds in of_slow} <= {round(seconds, 9) for seconds in sleeps.table}
    assert len(set(of_usual)) > 20
    assert np.mean(of_usual) == pytest.approx(sleeps.mean, rel=0.15)
