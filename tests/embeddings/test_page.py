"""The programs of the page about embeddings run, and so do its fragments, each in one of them."""

import re

import keras
import numpy as np
import pytest
import tensorflow as tf

import coordinator
from tests.pages import snippets
from tests.program_runner import COORDINATOR

[SHARDED], [ROWWISE] = snippets("docs/embeddings.md"), snippets("docs/sparse_updates.md")
GROWING, SAVED, KERAS, ALONE = snippets("docs/tables.md")
EXPORTED, SERVED = snippets("docs/serving.md")
IDS, LABELS = np.arange(32).reshape(8, 4), np.ones([8, 1], np.float32)
IMPORTS = ROWWISE.partition("\n\nstrategy = ")[0]
RESOLVER = "resolver = tf.distribute.cluster_resolver.TFConfigClusterResolver()"


def train(run_program, tmp_path, program):
    (tmp_path / "program.py").write_text(program, encoding="utf-8")
    return run_program(COORDINATOR, "run", "--workers", 2, "--ps", 2, tmp_path / "program.py", timeout=180).stdout


@pytest.mark.cluster
@pytest.mark.release
@pytest.mark.timeout(400)
def test_the_programs_of_the_page_train_and_restore_their_tables(run_program, tmp_path):
    for program in (ROWWISE, GROWING):
        [loss] = re.findall(r"^\d\.\d+$", train(run_program, tmp_path, program), re.M)
        assert 0.0 < float(loss) < 2.0
    sharded = f"{SHARDED}\nprint(len(table.variables), 'parts')"
    program = "\n".join([IMPORTS, RESOLVER, sharded, "strategy.close()"])
    assert train(run_program, tmp_path, program) == "2 parts\n"
    before, _, last = GROWING.rpartition("strategy.close()\n")
    saved = SAVED.replace('"saved/', f'"{tmp_path}/')
    program = [before, "model = keras.Sequential()", saved, "print('restored')", "strategy.close()", last]
    assert "restored\n" in train(run_program, tmp_path, "\n".join(program))


def run_fragments(*texts, **names):
    """Returns the names that fragments define, which take others for granted."""
    known = {"coordinator": coordinator, "keras": keras, "tf": tf, **names}
    for text in texts:
        exec(text, known)  # noqa: S102 - it is what a reader runs
    return known


def build_model(table):
    layers = [keras.Input((4,), dtype="int64"), coordinator.embeddings.Embedding(table, combiner="mean")]
    model = keras.Sequential([*layers, keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


@pytest.mark.release
@pytest.mark.filterwarnings("ignore:.shuffle=True")  # Keras' own, about any dataset
def test_the_fragments_with_a_ragged_layer_train_and_serve(strategy, tmp_path):
    dataset = tf.data.Dataset.from_tensor_slices((tf.RaggedTensor.from_tensor(IDS, padding=0), LABELS)).batch(4)
    # Autograph would need a file of the function.
    serve = SERVED.replace("@tf.function(", "@tf.function(autograph=False, ")
    names = run_fragments(KERAS, serve, strategy=strategy, dataset=dataset, path=str(tmp_path / "1"))
    assert names["table"].size() == IDS.size
    loaded = tf.saved_model.load(str(tmp_path / "1")).signatures["serving_default"](ids=tf.constant(IDS))
    expected = names["model"](tf.RaggedTensor.from_tensor(IDS, padding=0))
    np.testing.assert_allclose(loaded["score"], expected, rtol=1e-5)


@pytest.mark.release
@pytest.mark.filterwarnings("ignore:.shuffle=True")  # Keras' own, about any dataset
def test_the_fragment_with_an_export_and_a_delta_runs(strategy, tmp_path):
    with strategy.scope():
        model = build_model(coordinator.embeddings.Table("ads", 4, 100, keras.optimizers.Adagrad(0.05)))
    dataset = tf.data.Dataset.from_tensor_slices((IDS, LABELS)).batch(4)
    run_fragments(EXPORTED.replace("/models/ads", str(tmp_path)), model=model, dataset=dataset)
    loaded = tf.saved_model.load(str(tmp_path / "2")).signatures["serving_default"]
    [(name, _)] = loaded.structured_input_signature[1].items()
    [scores] = loaded(**{name: tf.constant(IDS)}).values()
    np.testing.assert_allclose(scores, model.predict(IDS, verbose=0), atol=1e-3)


@pytest.mark.long
@pytest.mark.unconnected
def test_the_fragment_of_a_process_without_a_strategy_predicts(tmp_path):
    table = coordinator.embeddings.Table("ads", 16, 1000, keras.optimizers.Adagrad(0.05))
    model = build_model(table)
    model.fit(IDS, LABELS, verbose=0)
    tf.train.Checkpoint(model=model).write(str(tmp_path / "full"))
    alone = ALONE.replace('"saved/', f'"{tmp_path}/')
    names = run_fragments(alone, build_model=build_model, ids=IDS)
    np.testing.assert_array_equal(names["table"].lookup(IDS), table.lookup(IDS))
