"""Ignores one warning of NumPy 2 about the way in which Keras converts TensorFlow tensors."""

from pathlib import Path

import pytest

KERAS_AND_NUMPY = pytest.mark.filterwarnings("ignore:__array__ implementation doesn't accept:DeprecationWarning")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(KERAS_AND_NUMPY)
