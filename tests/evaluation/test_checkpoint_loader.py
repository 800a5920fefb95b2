import os
from pathlib import Path

import h5py
import keras
import pytest
import tensorflow as tf

from coordinator.errors import EvaluationError
from coordinator.evaluation.checkpoint_loader import CheckpointLoader
from coordinator.evaluation.checkpoint_watch import CheckpointFile
from tests.evaluation.tiny_training import TinyTraining, build_data, build_model, same_weights


def load_keras(model: keras.Model, path: str) -> int:
    checkpoint = CheckpointFile.of_file(path if path.endswith(".h5") else f"{path}.index")
    return CheckpointLoader(model, build_data()).load(checkpoint, checkpoint.path)


# row 193
def test_weights_and_iterations_come_from_a_weights_file(tmp_path: Path) -> None:
    training, model = TinyTraining(tmp_path), build_model()
    training.train_to(30)
    training.model.save_weights(str(tmp_path / "ckpt-3.weights.h5"))
    assert load_keras(model, str(tmp_path / "ckpt-3.weights.h5")) == 30
    assert same_weights(model, training.model)
    assert int(model.optimizer.iterations) == 30
    # Without loss and optimizer, too.
    model = build_model(compiled=False)
    for path in (training.save(30), str(tmp_path / "ckpt-3.weights.h5")):
        assert load_keras(model, path) == 30
        assert same_weights(model, training.model)
    model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    CheckpointLoader(model, build_data()).require_variables()
    assert load_keras(model, str(tmp_path / "ckpt-3.weights.h5")) == 30


def written(model: keras.Model, directory: Path, suffix: str) -> str:
    path = str(directory / f"ckpt{suffix}")
    if suffix.endswith(".h5"):
        model.save_weights(path)
    else:
        tf.train.Checkpoint(model=model).write(path)
    return path


# row 190
@pytest.mark.parametrize("suffix", ["-1", "-1.weights.h5"])
def test_a_keras_checkpoint_without_a_step_counter_is_an_error(tmp_path: Path, suffix: str) -> None:
    path = written(build_model(compiled=False), tmp_path, suffix)
    with pytest.raises(EvaluationError, match=r"ckpt-1.* holds no counter of training steps.*iterations"):
        load_keras(build_model(), path)
    # The one inside of an optimizer that scales the loss is found.
    trained = build_model()
    trained.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "mse")
    trained.optimizer.build(trained.trainable_variables)
    trained.optimizer.inner_optimizer.iterations.assign(12)
    assert load_keras(build_model(), written(trained, tmp_path, suffix)) == 12


def test_a_model_that_does_not_fit_is_an_error_that_names_its_variable(tmp_path: Path) -> None:
    training, model = TinyTraining(tmp_path), build_model(layers=2)
    with pytest.raises(EvaluationError, match=r"holds no value for the variable '.*dense.*/kernel'|has shape"):
        load_keras(model, training.save(1))
    training.model.save_weights(str(tmp_path / "ckpt-1.weights.h5"))
    with pytest.raises(EvaluationError, match="does not fit"):
        load_keras(model, str(tmp_path / "ckpt-1.weights.h5"))
    with pytest.raises(EvaluationError, match=r"(?s)ckpt-1.weights.h5.*does not fit.*\(4, 5\).*\(4, 3\)"):
        load_keras(build_model(units=5), str(tmp_path / "ckpt-1.weights.h5"))


@pytest.mark.parametrize("suffix", [".data-00000-of-00001", ".weights.h5"])
def test_an_incomplete_file_raises_an_error_that_is_retried(tmp_path: Path, suffix: str) -> None:
    training = TinyTraining(tmp_path)
    training.save(1)
    training.model.save_weights(str(tmp_path / "ckpt-1.weights.h5"))
    path = tmp_path / f"ckpt-1{suffix}"
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises((tf.errors.OpError, OSError, IndexError)):
        load_keras(build_model(), str(path) if suffix.endswith(".h5") else str(tmp_path / "ckpt-1"))


def test_reading_a_weights_file_does_not_disturb_its_writer(tmp_path: Path) -> None:
    path = str(tmp_path / "ckpt-1.weights.h5")
    with h5py.File(path, "w") as file:
        file["layers/dense/vars/0"] = [1.0]
        with pytest.raises(OSError):  # noqa: PT011 - the words are those of HDF5
            load_keras(build_model(), path)
        file["layers/dense/vars/1"] = [2.0]


class Line(tf.Module):
    def __init__(self, weight: list[float], bias: float = 0.0):
        super().__init__()
        self.weight = tf.Variable(weight, name="weight")
        self.bias = tf.Variable(bias, name="bias")


def load_trackable(trackable: object, path: str) -> int:
    return CheckpointLoader(trackable).load(CheckpointFile(path, 0), path)


def saved(directory: Path, **objects: object) -> str:
    return tf.train.Checkpoint(**objects).save(str(directory / "ckpt"))


def test_a_module_saved_as_the_root_is_loaded(tmp_path: Path) -> None:
    line = Line([0.0, 0.0])
    trained = Line([1.0, 2.0])
    trained.global_step = tf.Variable(9, dtype=tf.int64)
    assert load_trackable(line, tf.train.Checkpoint(trained).save(str(tmp_path / "ckpt"))) == 9
    assert line.weight.numpy().tolist() == [1.0, 2.0]


# row 190
def test_a_module_checkpoint_without_a_variable_or_a_step_counter_is_an_error(tmp_path: Path) -> None:
    line = Line([0.0])
    line.extra = tf.Variable(1.0, name="extra")
    with pytest.raises(EvaluationError, match="holds no value for the variable 'extra:0'"):
        load_trackable(line, saved(tmp_path, model=Line([1.0]), step=tf.Variable(1)))
    with pytest.raises(EvaluationError, match="holds no counter of training steps"):
        load_trackable(Line([0.0]), saved(tmp_path, model=Line([1.0])))
    with pytest.raises(EvaluationError, match="Keras weights file"):
        load_trackable(Line([0.0]), "/d/ckpt-1.weights.h5")
