"""Tests of SavedModels with the content of tables: whole ones, and what changed since."""

import os

import keras
import numpy as np
import pytest
import tensorflow as tf

from coordinator.embeddings import Embedding, OlderThan, export, export_delta
from tests.embeddings.tables import DIM, Trainer, make_table

TIMEOUT = 120.0
KEYS = np.random.default_rng(0).integers(-(2**62), 2**62, 300)
# Before the delta, the first 100 of them are evicted, the next 50 are trained again, and these are new.
NEW = np.arange(50)
ASKED = np.concatenate([KEYS, NEW, np.random.default_rng(1).integers(-(2**62), 2**62, 10)]).reshape(-1, 4)
LOAD = """
    import sys

    import numpy as np
    import tensorflow as tf

    keys, *paths = sys.argv[1:]
    keys = np.load(keys)
    for path in paths:
        loaded = tf.saved_model.load(path).signatures["serving_default"](ids=tf.constant(keys))["output_0"]
        np.save(path + ".loaded.npy", loaded)
        # As TensorFlow Serving loads it.
        with tf.compat.v1.Session(graph=tf.Graph()) as session:
            signature = tf.compat.v1.saved_model.load(session, ["serve"], path).signature_def["serving_default"]
            outputs = session.run(signature.outputs["output_0"].name, {signature.inputs["ids"].name: keys})
        np.save(path + ".session.npy", outputs)
    print([name for name in sys.modules if name.startswith("coordinator")])
"""


class Exported:
    """A model that was exported, trained on, and exported again."""

    def __init__(self, strategy, folder):
        self.table = make_table(strategy, default=0.25, eviction=OlderThan(steps=4))
        with strategy.scope():
            inputs = keras.Input((4,), dtype="int64", name="ids")
            rows = Embedding(self.table, combiner="mean")(inputs)
            self.model = keras.Model(inputs, keras.layers.Dense(2)(rows))
            self.model.compile("sgd", "mse")
        trainer = Trainer(strategy, self.table)
        for keys in (KEYS[:100], KEYS[100:], KEYS[:-2:-1]):
            # Small rows, so that rounding to float16 changes the outputs by less than the tolerance.
            trainer.train(keys, np.arange(len(keys))[:, np.newaxis] / 300)
        self.paths = [f"{folder}/{number}" for number in range(1, 5)]
        export(self.model, self.paths[0])
        export(self.model, self.paths[1], dtype=tf.float16)
        self.before = self.model.predict(ASKED, verbose=0)
        for _ in range(3):
            trainer.train([*KEYS[100:150], *NEW])
        self.evicted = self.table.evict()
        self.model.layers[-1].bias.assign([1.0, 2.0])
        export_delta(self.model, self.paths[2], self.paths[0])
        export_delta(self.model, self.paths[3], self.paths[1])
        self.after = self.model.predict(ASKED, verbose=0)


@pytest.fixture(scope="module")
def exported(shared_cluster, strategy, tmp_path_factory):
    return Exported(strategy, tmp_path_factory.mktemp("models"))


@pytest.mark.long
def test_exports_predict_in_a_process_without_this_library(exported, run_program, tmp_path):
    np.save(tmp_path / "keys.npy", ASKED)
    base, delta = (_files(path) for path in (exported.paths[0], exported.paths[2]))
    # A delta has links to what has not changed.
    linked = {name for name, number in delta.items() if number in base.values()}
    assert {name.partition(".")[0] for name in linked} == {"assets/table_0"}
    changed = sum(_size(exported.paths[2], name) for name in delta if "changes" in name)
    rows = sum(_size(exported.paths[0], name) for name in base if name.startswith("assets/table_0"))
    # 100 keys that were evicted, 50 that were trained again, 50 new ones, and that of the last step.
    assert 0 < changed < 0.8 * rows
    program = run_program(LOAD, tmp_path / "keys.npy", *exported.paths, fresh=True)
    assert program.stdout.splitlines()[-1] == "[]"
    assert exported.evicted == 100
    assert not np.allclose(exported.before, exported.after)
    expected = [exported.before, exported.before, exported.after, exported.after]
    for path, outputs, tolerance in zip(exported.paths, expected, [1e-6, 1e-3, 1e-6, 1e-3], strict=True):
        for kind in ("loaded", "session"):
            np.testing.assert_allclose(np.load(f"{path}.{kind}.npy"), outputs, rtol=tolerance, atol=tolerance)


def _files(path):
    """Returns the inode of each file of a folder, by its path inside of it."""
    found = [os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names]
    return {os.path.relpath(name, path): os.stat(name).st_ino for name in found}


def _size(path, name):
    return os.path.getsize(os.path.join(path, name))


@pytest.mark.long
def test_a_function_of_tensors_can_be_exported_for_ragged_inputs_and_strings(strategy, tmp_path):
    table = make_table(strategy, default=0.5)
    with strategy.scope():
        layer = Embedding(table, combiner="sum")
        model = keras.Sequential([keras.Input((None,), dtype="string", ragged=True), layer])
    Trainer(strategy, table).train([["a", "b"]])

    @tf.function(input_signature=[tf.TensorSpec([None, None], tf.string, name="words")])
    def serve(words):
        return {"sum": model(tf.RaggedTensor.from_tensor(words, padding=""))}

    with pytest.raises(ValueError, match="takes ragged or sparse ones"):
        export(model, str(tmp_path / "1"))
    export(model, str(tmp_path / "1"), serve=serve)
    words = tf.constant([["a", ""], ["b", "a"], ["c", ""]])
    loaded = tf.saved_model.load(str(tmp_path / "1")).signatures["serving_default"](words=words)["sum"]
    np.testing.assert_allclose(loaded, serve(words)["sum"], rtol=1e-6)
    np.testing.assert_array_equal(loaded[2], np.full(DIM, 0.5))


def test_an_export_deletes_nothing_that_it_has_not_made(strategy, tmp_path, monkeypatch):
    with strategy.scope():
        model = keras.Sequential([keras.Input((1,), dtype="int64"), Embedding(make_table(strategy, default=2.0))])
    for name in ("1.part", "2.part"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "mine").touch()
    export(model, str(tmp_path / "1"))
    # A table without rows gives the default.
    loaded = tf.saved_model.load(str(tmp_path / "1"))
    found = loaded.serve(tf.constant([[1], [2]], tf.int64))
    np.testing.assert_array_equal(found["output_0"], np.full([2, 1, DIM], 2.0))
    monkeypatch.setattr(tf.saved_model, "save", lambda *_, **__: (_ for _ in ()).throw(OSError("the disk is full")))
    with pytest.raises(OSError, match="the disk is full"):
        export(model, str(tmp_path / "2"))
    assert sorted(os.listdir(tmp_path)) == ["1", "1.part", "2.part"]
    assert all((tmp_path / name / "mine").exists() for name in ("1.part", "2.part"))


@pytest.mark.long
def test_wrong_exports_are_refused_before_anything_is_written(exported, strategy, tmp_path):
    path = str(tmp_path / "1")
    with strategy.scope(), pytest.raises(RuntimeError, match=r"outside of strategy.scope\(\)"):
        export(exported.model, path)
    with pytest.raises(ValueError, match="dtype must be float32 or float16, got int8"):
        export(exported.model, path, dtype="int8")
    with pytest.raises(FileExistsError, match="A SavedModel is exported to a new folder"):
        export(exported.model, exported.paths[0])
    with pytest.raises(ValueError, match="has no Embedding layer of a table"):
        export(keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)]), path)
    with pytest.raises(ValueError, match=r"is not what coordinator.embeddings.export writes"):
        export_delta(exported.model, path, exported.paths[2])
    with pytest.raises(ValueError, match=r"serve must be a tf.function with an input_signature"):
        export(exported.model, path, serve=lambda ids: ids)
    assert not list(tmp_path.iterdir())
