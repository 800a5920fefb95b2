"""Tests of SavedModels with the content of tables: whole ones, and what changed since."""

import os
import pathlib

import keras
import numpy as np
import pytest
import tensorflow as tf

from coordinator.embeddings import Embedding, OlderThan, export, export_delta
from tests.embeddings.tables import DIM, Trainer, make_table

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
        np.save(path + ".npy", loaded)
    # The last one as TensorFlow Serving loads it.
    with tf.compat.v1.Session(graph=tf.Graph()) as session:
        signature = tf.compat.v1.saved_model.load(session, ["serve"], path).signature_def["serving_default"]
        outputs = session.run(signature.outputs["output_0"].name, {signature.inputs["ids"].name: keys})
    np.testing.assert_allclose(loaded, outputs, rtol=1e-6)
    print([name for name in sys.modules if name.startswith("coordinator")])
"""


@pytest.mark.long
def test_exports_predict_in_a_process_without_this_library(strategy, run_program, tmp_path):
    table = make_table(strategy, default=0.25, eviction=OlderThan(steps=4))
    with strategy.scope():
        inputs = keras.Input((4,), dtype="int64", name="ids")
        model = keras.Model(inputs, keras.layers.Dense(2)(Embedding(table, combiner="mean")(inputs)))
    trainer = Trainer(strategy, table)
    for keys in (KEYS[:100], KEYS[100:], KEYS[:-2:-1]):
        # Small rows, so that rounding to float16 changes the outputs by less than the tolerance.
        trainer.train(keys, np.arange(len(keys))[:, np.newaxis] / 300)
    full, base, delta, refused = (str(tmp_path / name) for name in ("1", "2", "3", "4"))
    export(model, full)
    export(model, base, dtype=tf.float16)
    before = model(ASKED).numpy()
    for _ in range(3):
        trainer.train([*KEYS[100:150], *NEW])
    assert table.evict() == 100
    model.layers[-1].bias.assign([1.0, 2.0])
    export_delta(model, delta, base)
    after = model(ASKED).numpy()
    assert not np.allclose(before, after)

    check_links(base, delta)
    np.save(tmp_path / "keys.npy", ASKED)
    program = run_program(LOAD, tmp_path / "keys.npy", full, base, delta, fresh=True)
    assert program.stdout.splitlines()[-1] == "[]"
    for path, outputs, tolerance in ((full, before, 1e-6), (base, before, 1e-3), (delta, after, 1e-3)):
        np.testing.assert_allclose(np.load(f"{path}.npy"), outputs, rtol=tolerance, atol=tolerance)

    # What is wrong is refused before anything is written.
    with strategy.scope(), pytest.raises(RuntimeError, match=r"outside of strategy.scope\(\)"):
        export(model, refused)
    dense = keras.Sequential([keras.Input((1,)), keras.layers.Dense(1)])
    for error, message, write in (
        (ValueError, "dtype must be float32 or float16, got int8", lambda: export(model, refused, dtype="int8")),
        (FileExistsError, "A SavedModel is exported to a new folder", lambda: export(model, full)),
        (ValueError, "has no Embedding layer of a table", lambda: export(dense, refused)),
        (ValueError, "is not what coordinator.embeddings.export", lambda: export_delta(model, refused, delta)),
        (ValueError, "serve must be a tf.function with an", lambda: export(model, refused, serve=lambda ids: ids)),
    ):
        with pytest.raises(error, match=message):
            write()
    assert not pathlib.Path(refused).exists()


def check_links(base, delta):
    """Checks that a delta has links to what has not changed, and less than a new base."""

    def files(path):
        """Returns the inode and the size of each file of a folder, by its path inside of it."""
        found = {os.path.join(folder, name) for folder, _, names in os.walk(path) for name in names}
        return {os.path.relpath(name, path): (os.stat(name).st_ino, os.path.getsize(name)) for name in found}

    of_base, of_delta = files(base), files(delta)
    linked = {name for name, found in of_delta.items() if found in of_base.values()}
    assert {name.partition(".")[0] for name in linked} == {"assets/table_0"}
    changed = sum(size for name, (_, size) in of_delta.items() if "changes" in name)
    # 100 keys that were evicted, 50 that were trained again, 50 new ones, and that of the last step.
    assert 0 < changed < 0.8 * sum(size for name, (_, size) in of_base.items() if name.startswith("assets/table_0"))


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
