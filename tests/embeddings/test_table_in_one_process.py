"""Tests of tables in a process without a strategy: training, Keras models, checkpoints, the sidecar evaluator."""

import gc
import json
import weakref

import keras
import numpy as np
import pytest
import tensorflow as tf

import coordinator
from coordinator.embeddings import Embedding, MinCount, OlderThan, Table
from coordinator.embeddings.serving_export import write_rows
from coordinator.embeddings.table_shard import Count
from coordinator.errors import EvaluationError
from coordinator.evaluation.checkpoint_loader import CheckpointLoader
from coordinator.evaluation.checkpoint_watch import CheckpointFile
from tests.embeddings.tables import DIM, make_step, subtract

# One that has a strategy refuses such tables.
pytestmark = pytest.mark.unconnected

KEYS = np.arange(40)


def build(dim=DIM):
    table = Table("words", dim, 100, keras.optimizers.Adagrad(0.5), admission=MinCount(2), eviction=OlderThan(1))
    layers = [keras.Input((2,), dtype="int64"), Embedding(table), keras.layers.Flatten(), keras.layers.Dense(1)]
    model = keras.Sequential(layers)
    model.compile(keras.optimizers.Adam(0.01), "mse")
    return model, table


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A model that was trained by `fit`, its table, and the path of its checkpoint."""
    model, table = build()
    model.fit(KEYS.reshape(-1, 2), np.ones(20), batch_size=10, epochs=3, shuffle=False, verbose=0)
    checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
    return model, table, checkpoint.write(str(tmp_path_factory.mktemp("saved") / "a"))


def test_keras_trains_a_table_and_predicts_with_it(trained):
    model, table, _ = trained
    statistics = table.statistics()
    assert (statistics.size, statistics.steps, statistics.admitted) == (40, 6, 40)
    # The model's optimizer has none for the table: its count and rate, and two slots of the kernel and of the bias.
    assert len(model.optimizer.variables) == 6
    assert np.ptp(table.lookup(KEYS).numpy(), axis=1).all()
    model.predict(np.full([1, 2], 1000), verbose=0)
    assert table.size() == 40


def test_the_sidecar_loads_tables(trained):
    trained_model, table, path = trained
    model, other = build()
    checkpoint = CheckpointFile.of_file(f"{path}.index")
    assert CheckpointLoader(model).load(checkpoint, checkpoint.path) == 6
    np.testing.assert_array_equal(other.lookup(KEYS), table.lookup(KEYS))
    assert other.statistics() == table.statistics()
    inputs = KEYS.reshape(-1, 2)
    np.testing.assert_array_equal(model.predict(inputs, verbose=0), trained_model.predict(inputs, verbose=0))


def test_the_sidecar_refuses_what_does_not_fit(trained, tmp_path):
    *_, path = trained
    checkpoint = CheckpointFile.of_file(f"{path}.index")
    with pytest.raises(EvaluationError, match=r"has shape .* in the evaluator|is of a table with rows \[4\]"):
        CheckpointLoader(build(dim=DIM + 1)[0]).load(checkpoint, checkpoint.path)
    step = tf.Variable(3, dtype=tf.int64)
    path = tf.train.Checkpoint(step=step).write(str(tmp_path / "without"))
    checkpoint = CheckpointFile.of_file(f"{path}.index")
    root = tf.train.Checkpoint(step=tf.Variable(0, dtype=tf.int64), table=Table("words", DIM, 100, subtract))
    with pytest.raises(EvaluationError, match="holds nothing of <Table 'words'"):
        CheckpointLoader(root).load(checkpoint, checkpoint.path)


def contents_of(table):
    """Returns the rows and the stamp of each key."""
    keys, rows, _, stamps = (np.asarray(each) for each in table.shards[0].read_rows(0, 100_000, 0))
    return {key: (*rows[at].tolist(), stamps[at]) for at, key in enumerate(keys.tolist())}


@pytest.mark.long
def test_of_rows_that_have_no_room_the_newest_are_restored(tmp_path, caplog, monkeypatch):
    # In several slices, of which each has rows of any age.
    monkeypatch.setattr("coordinator.embeddings.table_checkpoint._SLICE_BYTES", 2**13)
    table = Table("words", DIM, 1000, subtract, eviction=OlderThan(6))
    step, random = make_step(table), np.random.default_rng(0)

    def train(keys):
        step(tf.constant(keys), tf.ones([len(keys), DIM]))

    for count in (900, 400, 300, 10):
        train(random.choice(900, count, replace=False))
    full, saved = tf.train.Checkpoint(table=table).write(str(tmp_path / "full")), contents_of(table)
    for _ in range(4):
        train(np.arange(500, 600))
    assert table.evict() > 0
    train(np.arange(1000, 1100))
    table.save_delta(str(tmp_path / "delta"))
    other = Table("words", DIM, 600, subtract, when_full="default_row")
    tf.train.Checkpoint(table=other).read(full).assert_consumed()
    rows = contents_of(other)
    assert len(rows) == 600
    assert rows.items() <= saved.items()
    # None is older than one that was left out.
    assert max(saved[key][-1] for key in saved.keys() - rows.keys()) <= min(row[-1] for row in rows.values())
    assert "has no room for 300 rows" in "".join(caplog.messages)
    assert (other.statistics().admitted, other.statistics().evicted) == (900, 300)
    # What is left out has to be removed where the whole checkpoint was restored.
    with pytest.raises(ValueError, match="has no delta: save it first"):
        other.save_delta(str(tmp_path / "other"))
    other.restore_delta(str(tmp_path / "delta"))
    rows = contents_of(other)
    assert set(range(500, 600)) | set(range(1000, 1100)) <= rows.keys()
    assert rows.items() <= contents_of(table).items()
    tf.train.Checkpoint(table=other).write(str(tmp_path / "other_full"))
    other.save_delta(str(tmp_path / "other"))
    with pytest.raises(
        tf.errors.InvalidArgumentError, match=r"has room for 600 rows\. Create it with a larger capacity"
    ):
        tf.train.Checkpoint(table=Table("words", DIM, 600, subtract)).read(full)


@pytest.mark.parametrize("pushes", [2**31 - 3, pytest.param(2**40, marks=pytest.mark.long)])
def test_a_table_does_the_same_after_billions_of_pushes(tmp_path, pushes):
    options = {"eviction": OlderThan(3), "when_full": "evict_oldest"}
    table, other = (Table("words", DIM, capacity, subtract, **options) for capacity in (50, 20))
    step, shard = make_step(table), table.shards[0]
    shard.counts.scatter_nd_update([[Count.CLOCK]], [pushes])

    def train(first):
        step(tf.range(first, first + 10, dtype=tf.int64), tf.ones([10, DIM]))

    def ages(of):
        """Returns how many pushes ago each key was trained."""
        clock = int(of.shards[0].read_counts()[Count.CLOCK])
        return {key: clock - int(row[-1]) for key, row in contents_of(of).items()}

    def trained(*tens):
        """Returns the ages of tens of keys, of which the last ones were trained by the last push."""
        return {key: age for age, ten in enumerate(reversed(tens)) for key in range(10 * ten, 10 * ten + 10)}

    train(0)
    tf.train.Checkpoint(table=table).write(str(tmp_path / "full"))
    exported = str(tmp_path / "rows"), write_rows(table, str(tmp_path / "rows"), tf.float32)
    # The last ten keys take the places of the first.
    for first in range(10, 60, 10):
        train(first)
    assert ages(table) == trained(1, 2, 3, 4, 5)
    # All rows, as none of the exported ones is still there.
    assert sum(write_rows(table, str(tmp_path / "more"), tf.float32, exported).sizes) > 50
    table.save_delta(str(tmp_path / "delta"))
    tf.train.Checkpoint(table=other).read(str(tmp_path / "full")).assert_consumed()
    assert ages(other) == trained(0)
    other.restore_delta(str(tmp_path / "delta"))
    assert ages(other) == trained(4, 5)
    assert table.evict() == 10
    assert ages(table) == trained(2, 3, 4, 5)


def write_with_narrow_stamps(path, to):
    """Writes a checkpoint or delta as a build with int32 stamps did, which did not name their dtype either."""
    reader, tensors = tf.train.load_checkpoint(path), {}
    for name in reader.get_variable_to_shape_map():
        value = reader.get_tensor(name)
        if name.endswith("/stamps"):
            value = value.astype(np.int32)
        elif isinstance(value, bytes) and b'"columns"' in value:
            value = json.dumps({key: each for key, each in json.loads(value).items() if key != "stamps"})
        tensors[name] = value
    names, values = zip(*sorted(tensors.items()), strict=True)
    tf.raw_ops.SaveV2(prefix=to, tensor_names=names, shape_and_slices=[""] * len(names), tensors=values)


@pytest.mark.long
def test_checkpoints_and_deltas_with_narrow_stamps_are_restored(tmp_path):
    table, other = (Table("words", DIM, 100, subtract, eviction=OlderThan(1)) for _ in range(2))
    step = make_step(table)
    step(tf.constant(KEYS), tf.ones([40, DIM]))
    full = tf.train.Checkpoint(table=table).write(str(tmp_path / "full"))
    saved = contents_of(table)
    step(tf.constant(KEYS[5:15]), tf.ones([10, DIM]))
    table.save_delta(str(tmp_path / "delta"))
    write_with_narrow_stamps(full, str(tmp_path / "old_full"))
    write_with_narrow_stamps(str(tmp_path / "delta"), str(tmp_path / "old_delta"))
    tf.train.Checkpoint(table=other).read(str(tmp_path / "old_full")).assert_consumed()
    assert contents_of(other) == saved
    other.restore_delta(str(tmp_path / "old_delta"))
    assert contents_of(other) == contents_of(table)


def test_a_table_that_was_saved_and_restored_ends_with_its_last_reference(tmp_path):
    table = Table("words", DIM, 100, subtract)
    tf.train.Checkpoint(table=table).read(tf.train.Checkpoint(table=table).write(str(tmp_path / "a")))
    rows = weakref.ref(table.shards[0])
    del table
    gc.collect()
    assert rows() is None


def test_what_cannot_be_created_is_refused(monkeypatch):
    with (
        tf.distribute.OneDeviceStrategy("/cpu:0").scope(),
        pytest.raises(RuntimeError, match=r"inside strategy\.scope"),
    ):
        Table("words", DIM, 100, subtract)
    monkeypatch.setattr(coordinator.embeddings.table, "check_fits", lambda *_: None)
    with pytest.raises(ValueError, match=r"'words' would have 4,294,967,296 rows on one parameter server, and Tensor"):
        Table("words", DIM, 2**32, subtract)


INDEX = """
import numpy as np, tensorflow as tf
from coordinator.embeddings import Table

ROWS, SOME, ROW = 3_000_000, 2**16, 4 + 8 + 8  # a number, the key, the stamp

def used():
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * 4096

def create(rows):
    table = Table("words", 1, rows, lambda rows, gradient: rows.assign_sub(gradient))

    @tf.function
    def step(keys):
        with tf.GradientTape() as tape:
            rows = table.lookup(keys, training=True)
        table.apply_gradients(tape.gradient(rows, table.variable))

    return table, step

random = np.random.default_rng(0)
keys = random.integers(-(2**63), 2**63 - 1, ROWS)
create(SOME)[1](tf.constant(keys[:SOME]))  # what is loaded once
before = used()
table, step = create(ROWS)
created = used()
for first in range(0, ROWS - SOME, SOME):
    step(tf.constant(keys[first : first + SOME]))
print((created - before) / ROWS, (used() - before) / table.size() - ROW)
"""


@pytest.mark.long
@pytest.mark.cluster
def test_the_index_and_all_else_beside_rows_take_at_most_60_bytes_for_a_key(run_program):
    created, full = map(float, run_program(INDEX).stdout.split())
    assert created < 60
    assert full < 60
