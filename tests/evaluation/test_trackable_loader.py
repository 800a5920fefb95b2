from pathlib import Path

import pytest
import tensorflow as tf

from coordinator.errors import EvaluationError
from coordinator.evaluation.checkpoint_file import CheckpointFile
from coordinator.evaluation.trackable_loader import TrackableLoader


class Line(tf.Module):
    def __init__(self, weight: list[float], bias: float = 0.0):
        super().__init__()
        self.weight = tf.Variable(weight, name="weight")
        self.bias = tf.Variable(bias, name="bias")


def load(trackable: object, path: str) -> int:
    return TrackableLoader(trackable).load(CheckpointFile(path, 0), path)


def saved(directory: Path, **objects: object) -> str:
    return tf.train.Checkpoint(**objects).save(str(directory / "ckpt"))


def test_a_module_saved_as_model_is_loaded(tmp_path: Path) -> None:
    line = Line([0.0, 0.0])
    path = saved(tmp_path, model=Line([1.0, 2.0], 3.0), step=tf.Variable(7), optimizer=tf.Module())
    assert load(line, path) == 7
    assert line.weight.numpy().tolist() == [1.0, 2.0]
    assert line.bias.numpy() == 3.0


def test_a_module_saved_as_the_root_is_loaded(tmp_path: Path) -> None:
    line = Line([0.0, 0.0])
    trained = Line([1.0, 2.0])
    trained.global_step = tf.Variable(9, dtype=tf.int64)
    assert load(line, tf.train.Checkpoint(trained).save(str(tmp_path / "ckpt"))) == 9
    assert line.weight.numpy().tolist() == [1.0, 2.0]


def test_a_checkpoint_object_says_the_names_and_keeps_nothing_of_the_rest(tmp_path: Path) -> None:
    net, step = Line([0.0]), tf.Variable(0)
    names = tf.train.Checkpoint(net=net, step=step)
    for count in (1, 2):
        assert (
            load(names, saved(tmp_path, net=Line([float(count)]), step=tf.Variable(count), extra=Line([5.0]))) == count
        )
        assert net.weight.numpy() == count
        assert step.numpy() == count
    assert set(tf.train.TrackableView(names).children(names)) == {"net", "step"}


def test_a_checkpoint_object_with_a_root_is_laid_out_as_training_saved_it(tmp_path: Path) -> None:
    line, step = Line([0.0, 0.0]), tf.Variable(0)
    path = tf.train.Checkpoint(root=Line([1.0, 2.0]), step=tf.Variable(6)).save(str(tmp_path / "ckpt"))
    assert load(tf.train.Checkpoint(root=line, step=step), path) == 6
    assert line.weight.numpy().tolist() == [1.0, 2.0]
    assert step.numpy() == 6


def test_another_shape_is_an_error_that_names_the_variable_and_both_shapes(tmp_path: Path) -> None:
    path = saved(tmp_path, model=Line([1.0, 2.0]), step=tf.Variable(1))
    with pytest.raises(EvaluationError, match=r"'weight:0' has shape \(3,\) in the evaluator and \(2,\) in the checkp"):
        load(Line([0.0] * 3), path)


def test_a_missing_variable_is_an_error_that_names_it(tmp_path: Path) -> None:
    line = Line([0.0])
    line.extra = tf.Variable(1.0, name="extra")
    with pytest.raises(EvaluationError, match="holds no value for the variable 'extra:0'"):
        load(line, saved(tmp_path, model=Line([1.0]), step=tf.Variable(1)))


def test_another_missing_object_is_an_error_that_names_it(tmp_path: Path) -> None:
    line = Line([0.0])
    line.table = tf.lookup.experimental.MutableHashTable(tf.string, tf.int64, -1)
    with pytest.raises(EvaluationError, match=r"does not fit.*MutableHashTable"):
        load(line, saved(tmp_path, model=Line([1.0]), step=tf.Variable(1)))


# row 190
def test_a_checkpoint_without_any_step_counter_is_an_error_that_tells_so(tmp_path: Path) -> None:
    with pytest.raises(EvaluationError, match="holds no counter of training steps"):
        load(Line([0.0]), saved(tmp_path, model=Line([1.0])))


@pytest.mark.parametrize("empty", [tf.Module(), tf.train.Checkpoint(model=tf.Module())])
def test_what_has_no_variables_has_nothing_to_load(empty: object) -> None:
    with pytest.raises(EvaluationError, match="Nothing to load"):
        TrackableLoader(empty).require_variables()


def test_a_weights_file_is_refused() -> None:
    with pytest.raises(EvaluationError, match="Keras weights file"):
        load(Line([0.0]), "/d/ckpt-1.weights.h5")


def test_a_checkpoint_of_named_tensors_is_refused(tmp_path: Path) -> None:
    path = str(tmp_path / "ckpt-1")
    tf.raw_ops.SaveV2(prefix=path, tensor_names=["w"], shape_and_slices=[""], tensors=[tf.constant([1.0])])
    with pytest.raises(EvaluationError, match="only named tensors"):
        load(Line([0.0]), path)
