import os
from pathlib import Path

import h5py
import keras
import pytest
import tensorflow as tf

from coordinator.errors import EvaluationError
from coordinator.evaluation.checkpoint_file import CheckpointFile
from coordinator.evaluation.checkpoint_loaders import KerasModelLoader
from tests.evaluation.tiny_training import TinyTraining, made_data, made_model, same_weights


def load(model: keras.Model, path: str) -> int:
    checkpoint = CheckpointFile.of_file(path if path.endswith(".h5") else f"{path}.index")
    return KerasModelLoader(model, made_data()).load(checkpoint, checkpoint.path)


def test_weights_and_iterations_come_from_a_checkpoint(tmp_path: Path) -> None:
    training, model = TinyTraining(tmp_path), made_model()
    assert load(model, training.save(30)) == 30
    assert same_weights(model, training.model)
    assert int(model.optimizer.iterations) == 30


# row 193
def test_weights_and_iterations_come_from_a_weights_file(tmp_path: Path) -> None:
    training, model = TinyTraining(tmp_path), made_model()
    training.train_to(30)
    training.model.save_weights(str(tmp_path / "ckpt-3.weights.h5"))
    assert load(model, str(tmp_path / "ckpt-3.weights.h5")) == 30
    assert same_weights(model, training.model)
    assert int(model.optimizer.iterations) == 30


def test_a_counter_of_the_users_own_comes_before_the_iterations(tmp_path: Path) -> None:
    training, model = TinyTraining(tmp_path, own_step=tf.Variable(45, dtype=tf.int64)), made_model()
    assert load(model, training.save(30)) == 45
    assert int(model.optimizer.iterations) == 45


@pytest.mark.parametrize("suffix", ["-1", "-1.weights.h5"])
def test_the_counter_of_a_loss_scaling_optimizer_is_found_inside_it(tmp_path: Path, suffix: str) -> None:
    trained = made_model()
    trained.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.SGD()), "mse")
    trained.optimizer.build(trained.trainable_variables)
    trained.optimizer.inner_optimizer.iterations.assign(12)
    path = str(tmp_path / f"ckpt{suffix}")
    if suffix.endswith(".h5"):
        trained.save_weights(path)
    else:
        tf.train.Checkpoint(model=trained).write(path)
    assert load(made_model(), path) == 12


def test_a_model_saved_as_the_root_is_loaded(tmp_path: Path) -> None:
    trained, model = made_model(), made_model()
    trained.optimizer.iterations.assign(8)
    path = tf.train.Checkpoint(root=trained).write(str(tmp_path / "ckpt-1"))
    assert load(model, path) == 8
    assert same_weights(model, trained)


def test_a_model_without_loss_and_optimizer_is_loaded(tmp_path: Path) -> None:
    training, model = TinyTraining(tmp_path), made_model(compiled=False)
    assert load(model, training.save(30)) == 30
    training.model.save_weights(str(tmp_path / "ckpt-3.weights.h5"))
    assert load(model, str(tmp_path / "ckpt-3.weights.h5")) == 30
    assert same_weights(model, training.model)


# row 190
@pytest.mark.parametrize("suffix", ["-1", "-1.weights.h5"])
def test_a_checkpoint_without_any_step_counter_is_an_error_that_tells_so(tmp_path: Path, suffix: str) -> None:
    trained, path = made_model(compiled=False), str(tmp_path / f"ckpt{suffix}")
    if suffix.endswith(".h5"):
        trained.save_weights(path)
    else:
        tf.train.Checkpoint(model=trained).save(str(tmp_path / "ckpt"))
    with pytest.raises(EvaluationError, match=r"ckpt-1.* holds no counter of training steps.*iterations"):
        load(made_model(), path)


def test_another_shape_is_an_error_that_names_the_variable_and_both_shapes(tmp_path: Path) -> None:
    path = TinyTraining(tmp_path).save(1)
    with pytest.raises(EvaluationError, match=r"kernel' has shape \(4, 5\) in the evaluator and \(4, 3\) in the"):
        load(made_model(units=5), path)


def test_another_shape_in_a_weights_file_is_an_error_with_both_shapes(tmp_path: Path) -> None:
    TinyTraining(tmp_path).model.save_weights(str(tmp_path / "ckpt-1.weights.h5"))
    with pytest.raises(EvaluationError, match=r"(?s)ckpt-1.weights.h5.*does not fit.*\(4, 5\).*\(4, 3\)"):
        load(made_model(units=5), str(tmp_path / "ckpt-1.weights.h5"))


def test_a_layer_that_was_not_trained_is_an_error_that_names_its_variable(tmp_path: Path) -> None:
    training, model = TinyTraining(tmp_path), made_model(layers=2)
    with pytest.raises(EvaluationError, match=r"holds no value for the variable '.*dense.*/kernel'|has shape"):
        load(model, training.save(1))
    training.model.save_weights(str(tmp_path / "ckpt-1.weights.h5"))
    with pytest.raises(EvaluationError, match="does not fit"):
        load(model, str(tmp_path / "ckpt-1.weights.h5"))


def test_a_model_saved_under_another_name_is_an_error_that_lists_the_names(tmp_path: Path) -> None:
    trained = made_model()
    path = tf.train.Checkpoint(net=trained, optimizer=trained.optimizer).write(str(tmp_path / "ckpt-1"))
    with pytest.raises(EvaluationError, match=r"no value for .*\['net', 'optimizer'\]"):
        load(made_model(), path)


@pytest.mark.parametrize("suffix", [".index", ".data-00000-of-00001", ".weights.h5"])
def test_half_a_file_raises_what_is_tried_again(tmp_path: Path, suffix: str) -> None:
    training = TinyTraining(tmp_path)
    training.save(1)
    training.model.save_weights(str(tmp_path / "ckpt-1.weights.h5"))
    path = tmp_path / f"ckpt-1{suffix}"
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises((tf.errors.OpError, OSError, IndexError)):
        load(made_model(), str(path) if suffix.endswith(".h5") else str(tmp_path / "ckpt-1"))


def test_a_file_that_training_is_writing_is_tried_again_and_not_disturbed(tmp_path: Path) -> None:
    path = str(tmp_path / "ckpt-1.weights.h5")
    with h5py.File(path, "w") as file:
        file["layers/dense/vars/0"] = [1.0]
        with pytest.raises(OSError):  # noqa: PT011 - the words are those of HDF5
            load(made_model(), path)
        file["layers/dense/vars/1"] = [2.0]


# row 191
def test_a_model_that_is_not_built_has_nothing_to_load() -> None:
    model = keras.Sequential([keras.layers.Dense(1)])
    with pytest.raises(EvaluationError, match="Nothing to load"):
        KerasModelLoader(model, made_data()).require_variables()


def test_a_compiled_model_is_built_from_its_data(tmp_path: Path) -> None:
    training = TinyTraining(tmp_path)
    model = keras.Sequential([keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile("adam", "mse")
    KerasModelLoader(model, made_data()).require_variables()
    training.model.save_weights(str(tmp_path / "ckpt-1.weights.h5"))
    load(model, str(tmp_path / "ckpt-1.weights.h5"))
    assert same_weights(model, training.model)
