"""Tests that a simulated training computes what its rule says, with real gradients."""

import keras
import numpy as np
import pytest
import tensorflow as tf

from coordinator.testbed.experiment import ASYNCHRONOUS, SEQUENTIAL, Descent, Experiment, Trial
from coordinator.testbed.image_data import ImageData
from coordinator.testbed.runner import SimulatedRunner
from coordinator.testbed.training import RecordFile, new_loss, new_network

BATCHES, STEP, RATE = 24, 0.1, 0.05
EXPERIMENT = Experiment(batch_size=8, batches=BATCHES, step_time=STEP, learning_rate=RATE, seed=3)

(DESCENT,) = EXPERIMENT.descents


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> RecordFile:
    generator = np.random.default_rng(0)
    images = generator.integers(0, 17, (80, 4, 4, 1), np.uint8)
    data = ImageData.holding_out(16, images, images.reshape(80, -1).sum(axis=1).astype(np.uint8) % 10, highest=16)
    return RecordFile(data, tmp_path_factory.mktemp("records") / "images")


@pytest.fixture(scope="module")
def runner(records: RecordFile) -> SimulatedRunner:
    return SimulatedRunner(EXPERIMENT, records)


def trained(
    records: RecordFile, workers: int, applied: bool, optimizer: keras.optimizers.Optimizer | None = None
) -> list[float]:
    """The losses of rounds in which each worker computes one gradient, and their sum is applied, if at all."""
    network = new_network(records.data.shape, EXPERIMENT.seed)
    optimizer = optimizer or keras.optimizers.SGD(RATE)
    data = [iter(records.minibatches(8, worker, workers, EXPERIMENT.seed)) for worker in range(workers)]
    losses = []

    @tf.function
    def computed(images: tf.Tensor, labels: tf.Tensor) -> tuple[tf.Tensor, list[tf.Tensor]]:
        with tf.GradientTape() as tape:
            loss = new_loss()(labels, network(images, training=True))
        return loss, tape.gradient(loss, network.trainable_variables)

    for _ in range(BATCHES // workers):
        each = [computed(*next(minibatches)) for minibatches in data]
        losses += [float(loss) for loss, _ in each]
        if applied:
            gradients = zip(*(gradients for _, gradients in each), strict=True)
            optimizer.apply([tf.add_n(parts) for parts in gradients], network.trainable_variables)
    return losses


@pytest.mark.long
def test_each_sequential_training_is_that_of_a_fresh_optimizer_of_its_kind(
    runner: SimulatedRunner, records: RecordFile
) -> None:
    expected = trained(records, 1, applied=True, optimizer=keras.optimizers.Adam(0.01, weight_decay=0.1))
    for _ in range(2):
        counted: list[None] = []
        trial = Trial(SEQUENTIAL, 1, 0.0, Descent("adam", 0.01, 0.1, 8))
        curve = runner.run(trial, 3, lambda: counted.append(None))  # noqa: B023 - it is called in this round
        np.testing.assert_allclose(curve.losses, expected, rtol=1e-3)
        assert len(counted) == BATCHES
        assert curve.mean_staleness == 0
        assert STEP * BATCHES < curve.seconds < 2 * STEP * BATCHES


def test_a_delayed_gradient_changes_nothing_before_its_delay_is_over(
    runner: SimulatedRunner, records: RecordFile
) -> None:
    delay = 10
    curve = runner.run(Trial(ASYNCHRONOUS, 1, delay * STEP, DESCENT), 3, lambda: None)
    # The pull that finds the first gradient due has it applied. Overheads make steps a little longer.
    unchanged = trained(records, 1, applied=False)
    changed = np.flatnonzero(~np.isclose(curve.losses, unchanged, rtol=1e-4))
    assert delay * 0.7 <= changed[0] <= delay + 2
    assert np.array_equal(changed, range(changed[0], BATCHES))
    assert delay * 0.5 < curve.mean_staleness <= delay + 2
