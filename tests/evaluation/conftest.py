"""Lets pass one warning of Keras, which converts TensorFlow tensors in a way that NumPy 2 warns of."""

from pathlib import Path

import pytest

KERAS_AND_NUMPY = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(KERAS_AND_NUMPY)
