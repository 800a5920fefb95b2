import numpy as np
import pytest
import tensorflow as tf

from coordinator.errors import EvaluationError
from coordinator.evaluation.metrics import flat_metrics


def test_tensors_arrays_and_dicts_become_plain_numbers() -> None:
    metrics = {"loss": tf.constant(0.5), "auc": np.float32(0.25), "per_class": {"cat": 1, "dog": np.array(2.0)}}
    assert flat_metrics(metrics) == {"loss": 0.5, "auc": 0.25, "per_class/cat": 1.0, "per_class/dog": 2.0}


@pytest.mark.parametrize("wrong", [None, 0.5, {"loss": [1.0, 2.0]}, {"loss": "low"}, {"loss": None}])
def test_what_is_no_mapping_to_numbers_is_an_error(wrong: object) -> None:
    with pytest.raises(EvaluationError):
        flat_metrics(wrong)
