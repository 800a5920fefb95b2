from pathlib import Path

import numpy as np
import pytest

from coordinator.testbed.image_data import ImageData
from coordinator.testbed.training import RecordFile, new_network

IMAGES = np.arange(12, dtype=np.uint8).repeat(2 * 3).reshape(12, 2, 3, 1)
DATA = ImageData(IMAGES, np.arange(12, dtype=np.uint8), 11, IMAGES, IMAGES[:, 0, 0, 0])


def labels_of(records: RecordFile, worker: int, *, count: int, seed: int = 0) -> list[list[int]]:
    found = []
    for images, labels in records.minibatches(3, worker, 2, seed).take(count):
        assert images.shape == (3, 2, 3, 1)
        np.testing.assert_allclose(images[:, 1, 2, 0] * 11, labels)
        found.append(labels.numpy().tolist())
    return found


def test_workers_share_the_images_and_repeat_their_parts(tmp_path: Path) -> None:
    records = RecordFile(DATA, tmp_path / "images")
    for worker in (0, 1):
        first, second, third, fourth = labels_of(records, worker, count=4)
        assert sorted(first + second) == sorted(third + fourth) == list(range(worker, 12, 2))


@pytest.mark.parametrize(("shape", "blocks"), [((8, 8, 1), 2), ((32, 32, 3), 4)])
def test_the_network_gives_logits_with_batch_normalization_and_relu(shape: tuple[int, int, int], blocks: int) -> None:
    network = new_network(shape, seed=0)
    assert network(np.zeros((5, *shape), np.float32)).shape == (5, 10)
    kinds = [type(layer).__name__ for layer in network.layers]
    assert kinds[:-2] == ["Conv2D", "BatchNormalization", "ReLU", "MaxPooling2D"] * blocks
