"""Tests that racing workers give the metrics of Keras 3 the same results as one process."""

import keras
import numpy as np
import pytest
import tensorflow as tf

TIMEOUT = 240.0
BATCHES = 30
CLASSES = 4

metrics = keras.metrics


class LargestError(metrics.Metric):
    """A custom metric: counts with `assign_add`, adds to a vector with `assign`, and keeps a maximum, no addition."""

    def __init__(self):
        super().__init__()
        self.calls = self.add_variable((), "zeros", dtype="int64")
        self.sums = self.add_variable((CLASSES,), "zeros")
        self.left = self.add_variable((), keras.initializers.Constant(BATCHES))
        self.largest = self.add_variable((), "zeros")

    def update_state(self, y_true, y_pred, sample_weight=None):
        error = tf.abs(y_true - y_pred)
        self.calls.assign_add(1)
        self.sums.assign(self.sums + tf.reduce_sum(error, axis=0))
        self.left.assign_sub(1.0)
        self.largest.assign(tf.maximum(self.largest, tf.reduce_max(error)))

    def result(self):
        return {"sums": self.sums.value, "calls": self.calls.value, "left": self.left.value}


# Grouped by the arguments of their update. Others have the same state, and another function for its terms.
OF_CLASSES = {
    "SparseCategoricalAccuracy": metrics.SparseCategoricalAccuracy,
    "MeanIoU": lambda: metrics.MeanIoU(CLASSES, sparse_y_pred=False),
}
OF_ONE_HOT = {
    "own": LargestError,
    "CategoricalAccuracy": metrics.CategoricalAccuracy,
    "AUC": lambda: metrics.AUC(num_thresholds=11),
    "AUC, multi_label": lambda: metrics.AUC(num_thresholds=11, multi_label=True, num_labels=CLASSES),
    "Precision": metrics.Precision,
    "Recall": lambda: metrics.Recall(thresholds=[0.2, 0.6]),
    "FalsePositives": metrics.FalsePositives,
    "PrecisionAtRecall": lambda: metrics.PrecisionAtRecall(0.5, num_thresholds=11),
    "OneHotMeanIoU": lambda: metrics.OneHotMeanIoU(CLASSES),
    "F1Score": lambda: metrics.F1Score(average="macro"),
    "BinaryIoU": metrics.BinaryIoU,
    "R2Score": metrics.R2Score,
    "RootMeanSquaredError": metrics.RootMeanSquaredError,
    "PearsonCorrelation": lambda: metrics.PearsonCorrelation(axis=-1),
}
REDUCTIONS = {"Mean": metrics.Mean, "Sum": metrics.Sum}
WITHOUT_WEIGHTS = {"MeanIoU", "OneHotMeanIoU", "BinaryIoU", "R2Score", "PearsonCorrelation"}
ALL = {**OF_CLASSES, **OF_ONE_HOT, **REDUCTIONS}
# One of each kind of state: means, vectors, a matrix, thresholds.
DEFAULT = ("own", "Mean", "MeanIoU", "AUC", "F1Score")


def batches():
    random = np.random.default_rng(5)
    for _ in range(BATCHES):
        labels = random.integers(0, CLASSES, size=8)
        scores = random.uniform(0.05, 1.0, size=(8, CLASSES)).astype(np.float32)
        yield labels, scores / scores.sum(axis=1, keepdims=True), random.uniform(0.5, 2.0, size=8).astype(np.float32)


def step_of(found):
    @tf.function
    def step(labels, scores, weights):
        one_hot = tf.one_hot(labels, CLASSES)
        for name, metric in found.items():
            given = (scores,) if name in REDUCTIONS else (labels if name in OF_CLASSES else one_hot, scores)
            metric.update_state(*given, sample_weight=None if name in WITHOUT_WEIGHTS else weights)

    return step


@pytest.fixture(scope="module", params=[DEFAULT, pytest.param(tuple(ALL), marks=pytest.mark.long)], ids=["some", "all"])
def compared(strategy, request):
    """Metrics after workers have raced through the batches, and those of one process."""
    with strategy.scope():
        raced = {name: ALL[name]() for name in request.param}
    single = {name: ALL[name]() for name in request.param}
    step, here = step_of(raced), step_of(single)
    for batch in batches():
        strategy.schedule(step, args=batch)
        here(*batch)
    strategy.join(TIMEOUT)
    return raced, single


def test_racing_workers_give_the_metric_results_of_one_process(compared):
    raced, single = compared
    for name, metric in raced.items():
        found, expected = (tf.nest.flatten(each.result()) for each in (metric, single[name]))
        for value, other in zip(found, expected, strict=True):
            np.testing.assert_allclose(value, other, rtol=1e-4, err_msg=name)
            assert np.all(np.isfinite(value)), name
    # A change that is no addition keeps one of the racing values.
    assert 0.0 < float(raced["own"].largest) <= float(single["own"].largest)
    mean = raced["Mean"]
    assert float(mean.count) > 0
    mean.reset_state()
    assert (float(mean.total), float(mean.count)) == (0.0, 0.0)
