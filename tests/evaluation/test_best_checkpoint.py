import math
from pathlib import Path

import numpy as np
import pytest
import tensorflow as tf

from coordinator.errors import EvaluationError
from coordinator.evaluation import EvaluationResult, best_result
from coordinator.evaluation.checkpoint_watch import CheckpointFile
from coordinator.evaluation.sidecar_evaluator import BestCheckpoint, flat_metrics
from coordinator.evaluation.status_files import BEST_FILE
from tests.evaluation.tiny_training import TinyTraining


def offer(best: BestCheckpoint, path: str, loss: float) -> bool:
    """Offers a checkpoint, which training deletes while it is evaluated."""
    checkpoint = CheckpointFile.of_file(path if path.endswith(".h5") else f"{path}.index")
    with best.copied(checkpoint) as copy:
        for file in checkpoint.files():
            Path(file).unlink()
        return best.offer(copy, EvaluationResult(path, 1, 10, {"loss": loss, "auc": -loss}, 0.0))


def saved_number(directory: Path) -> int:
    path = tf.train.latest_checkpoint(str(directory))
    return int(tf.train.load_checkpoint(path).get_tensor("optimizer/_iterations/.ATTRIBUTES/VARIABLE_VALUE"))


@pytest.mark.parametrize(("metric", "mode"), [("loss", "min"), ("auc", "max")])
def test_only_the_best_is_stored(tmp_path: Path, metric: str, mode: str) -> None:
    training = TinyTraining(tmp_path / "train")
    best = BestCheckpoint(tmp_path / "best", metric, mode)
    verdicts = [
        offer(best, training.save(step), loss)
        for step, loss in [(1, math.nan), (2, 0.5), (3, 0.7), (4, math.nan), (5, 0.2), (6, 0.2)]
    ]
    assert verdicts == [False, True, False, False, True, False]
    assert saved_number(tmp_path / "best") == 5
    assert best_result(tmp_path / "best").metrics["loss"] == 0.2
    assert best_result(tmp_path / "best").checkpoint == tf.train.latest_checkpoint(str(tmp_path / "best"))
    assert len(list((tmp_path / "best").iterdir())) == 4


def test_a_restarted_evaluator_continues_from_the_stored_best(tmp_path: Path) -> None:
    training = TinyTraining(tmp_path / "train")
    assert offer(BestCheckpoint(tmp_path / "best", "loss", "min"), training.save(1), 0.5)
    restarted = BestCheckpoint(tmp_path / "best", "loss", "min")
    assert not offer(restarted, training.save(2), 0.6)
    assert saved_number(tmp_path / "best") == 1
    assert offer(restarted, training.save(3), 0.4)
    assert saved_number(tmp_path / "best") == 3


def test_a_weights_file_can_replace_a_checkpoint(tmp_path: Path) -> None:
    training = TinyTraining(tmp_path / "train")
    best = BestCheckpoint(tmp_path / "best", "loss", "min")
    offer(best, training.save(1), 0.5)
    path = str(tmp_path / "train" / "ckpt-2.weights.h5")
    training.model.save_weights(path)
    assert offer(best, path, 0.4)
    assert sorted(path.name for path in (tmp_path / "best").iterdir()) == ["best-2.weights.h5", BEST_FILE]


def test_a_failed_evaluation_does_not_change_the_best(tmp_path: Path) -> None:
    training = TinyTraining(tmp_path / "train")
    best = BestCheckpoint(tmp_path / "best", "loss", "min")
    offer(best, training.save(1), 0.5)
    before = sorted((tmp_path / "best").iterdir())
    checkpoint = CheckpointFile.of_file(training.save(2) + ".index")

    def fail() -> None:
        with best.copied(checkpoint):
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert sorted((tmp_path / "best").iterdir()) == before


def test_other_files_in_the_directory_stay(tmp_path: Path) -> None:
    (tmp_path / "best-notes.txt").write_text("mine")
    offer(BestCheckpoint(tmp_path, "loss", "min"), TinyTraining(tmp_path / "train").save(1), 0.5)
    assert (tmp_path / "best-notes.txt").read_text() == "mine"


def test_a_missing_metric_is_an_error_that_lists_the_metrics(tmp_path: Path) -> None:
    best = BestCheckpoint(tmp_path / "best", "f1", "max")
    with pytest.raises(EvaluationError, match=r"'f1' is none .*'auc', 'loss'"):
        offer(best, TinyTraining(tmp_path / "train").save(1), 0.5)


def test_an_unknown_mode_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="best_mode"):
        BestCheckpoint(tmp_path, "loss", "least")


def test_tensors_arrays_and_dicts_become_plain_numbers() -> None:
    metrics = {"loss": tf.constant(0.5), "auc": np.float32(0.25), "per_class": {"cat": 1, "dog": np.array(2.0)}}
    assert flat_metrics(metrics) == {"loss": 0.5, "auc": 0.25, "per_class/cat": 1.0, "per_class/dog": 2.0}


@pytest.mark.parametrize("wrong", [None, 0.5, {"loss": [1.0, 2.0]}, {"loss": "low"}, {"loss": None}])
def test_metrics_that_are_not_numbers_are_an_error(wrong: object) -> None:
    with pytest.raises(EvaluationError):
        flat_metrics(wrong)
