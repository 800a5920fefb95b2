"""Tests of the README: its program and its fragments run."""

import contextlib
import re
import runpy
import textwrap
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import coordinator
from tests.pages import snippets


def test_the_program_of_the_readme_trains(
    strategy: coordinator.ParameterServerStrategy,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    # A process has one strategy, which other tests use, too.
    monkeypatch.setattr(coordinator, "ParameterServerStrategy", lambda _: contextlib.nullcontext(strategy))
    (tmp_path / "program.py").write_text(snippets("README.md")[0], encoding="utf-8")
    runpy.run_path(str(tmp_path / "program.py"))
    printed = capsys.readouterr().out
    steps, slope, loss = re.search(r"^(\d+) steps, slope (\S+), last loss (\S+)$", printed, re.MULTILINE).groups()
    assert (int(steps), float(slope)) == (200, pytest.approx(3.0, abs=0.05))
    assert float(loss) < 0.01


@pytest.mark.long
def test_the_fragment_with_fit_trains(strategy: coordinator.ParameterServerStrategy) -> None:
    random = np.random.default_rng(0)
    images, labels = random.random([160, 64], np.float32), random.integers(0, 10, 160)
    names = {"strategy": strategy, "keras": keras, "images": images, "labels": labels}
    exec(snippets("README.md")[1], names)  # noqa: S102 - it is what a reader runs
    model = names["model"]
    assert model.optimizer.iterations.numpy() == 10 * 2
    assert set(model.history.history) == {"loss", "accuracy", "val_loss", "val_accuracy"}


def test_the_fragment_with_an_update_rule_pulls_and_pushes(strategy: coordinator.ParameterServerStrategy) -> None:
    creation, body = snippets("README.md")[2].split("\n\n")
    step_of_reader = f"def step(iterator):\n{textwrap.indent(body, '    ')}    return accepted\n"
    with strategy.scope():
        model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
        names = {"coordinator": coordinator, "model": model, "optimizer": keras.optimizers.SGD(0.1)}
        exec(creation, names)  # noqa: S102 - it is what a reader runs

    def compute_gradients(batch: tf.Tensor) -> list[tf.Tensor]:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model(batch) ** 2)
        return tape.gradient(loss, model.trainable_variables)

    names["compute_gradients"] = compute_gradients
    exec(step_of_reader, names)  # noqa: S102
    iterator = iter(strategy.experimental_distribute_dataset(tf.data.Dataset.from_tensors(tf.ones([4, 2])).repeat()))
    # Autograph would need a file of the function.
    accepted = strategy.schedule(tf.function(names["step"], autograph=False), args=(iterator,)).result(timeout=120)
    assert accepted
    assert names["rule"].statistics().updates == 1
