import numpy as np
import pytest

from coordinator.testbed.training import new_network


@pytest.mark.parametrize(("shape", "blocks"), [((8, 8, 1), 2), ((32, 32, 3), 4)])
def test_the_network_gives_logits_with_batch_normalization_and_relu(shape: tuple[int, int, int], blocks: int) -> None:
    network = new_network(shape, seed=0)
    assert network(np.zeros((5, *shape), np.float32)).shape == (5, 10)
    kinds = [type(layer).__name__ for layer in network.layers]
    assert kinds[:-2] == ["Conv2D", "BatchNormalization", "ReLU", "MaxPooling2D"] * blocks


def test_a_seed_gives_the_same_first_weights() -> None:
    first, same, other = (
        [weight.tolist() for weight in new_network((8, 8, 1), seed).get_weights()] for seed in (3, 3, 4)
    )
    assert first == same != other
