"""Tests of checkpoints of variables that are large enough to be saved in blocks: content, memory, lost servers."""

import math
import re

import numpy as np
import pytest
import tensorflow as tf

from coordinator.ps_strategy.recovery.snapshots import blocks_of

TIMEOUT = 60.0
ROWS, COLUMNS = 5_000, 8
NAME = "table/.ATTRIBUTES/VARIABLE_VALUE"


@pytest.fixture
def content():
    return np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS)


@pytest.fixture
def table(strategy, content):
    """More than the `checkpoint_memory` of the shared strategy."""
    with strategy.scope():
        return tf.Variable(content)


def pieces_in(path) -> int:
    return len(re.findall(rb"\(DT_FLOAT\) \[\d+,8\]", tf.train.load_checkpoint(str(path)).debug_string()))


@pytest.mark.parametrize(
    ("shape", "most"),
    [((1000,), 120), ((100, 7), 100), ((2, 50, 3), 64), ((3, 2, 40), 40), ((5, 4), 10_000), ((9, 9), 1)],
)
def test_blocks_have_every_element_once_and_are_not_too_large(shape, most):
    seen = np.zeros(shape, int)
    for block in blocks_of(shape, 4, most):
        box = tuple(slice(begin, begin + size) for begin, size in zip(block.begin, block.shape, strict=True))
        seen[box] += 1
        cells = math.prod(block.shape[: block.axes])
        assert cells == 1 or math.prod(block.shape) * 4 + cells * block.axes * 8 <= most
    assert (seen == 1).all()


def test_a_large_variable_is_saved_in_pieces_that_tensorflow_reads_as_one(strategy, table, content, tmp_path):
    path = tf.train.Checkpoint(table=table).save(str(tmp_path / "saved"))
    assert (NAME, [ROWS, COLUMNS]) in tf.train.list_variables(path)
    assert (tf.train.load_variable(path, NAME) == content).all()
    # Of 64 MB a file has at most 24.
    most = strategy.extended.services.options.checkpoint_memory * 3 // 8
    files = [file.stat().st_size for file in tmp_path.glob("saved-1.data-*")]
    assert max(files) <= most
    assert content.nbytes / most <= len(files) <= 2 * content.nbytes / most
    assert pieces_in(path) > 3
    # Nothing temporary is left.
    assert {each.name.split(".")[0] for each in tmp_path.iterdir()} == {"saved-1", "checkpoint"}
    on_client = tf.Variable(tf.zeros([ROWS, COLUMNS]))
    tf.train.Checkpoint(table=on_client).restore(path).expect_partial()
    assert (on_client.numpy() == content).all()
    later = tf.train.Checkpoint()
    status = later.restore(path)
    with strategy.scope():
        later.table = tf.Variable(tf.zeros([ROWS, COLUMNS]))
        longer = tf.Variable(tf.zeros([ROWS + 1, COLUMNS]))
    status.expect_partial()
    assert (later.table.numpy() == content).all()
    with pytest.raises(ValueError, match="incompatible"):
        tf.train.Checkpoint(table=longer).read(path)
    assert not longer.numpy().any()


def test_a_large_variable_is_restored_in_blocks_with_everything_else(strategy, table, content, tmp_path):
    numbers = [tf.cast(tf.range(50_000) % 7, dtype) for dtype in (tf.float16, tf.int64, tf.bool)]
    numbers.append(tf.strings.as_string(numbers[0]))
    with strategy.scope():
        saved = [table, tf.Variable(3), tf.Variable(content + 1), *map(tf.Variable, numbers)]
    assert len({each.device for each in saved}) == 2
    checkpoint = tf.train.Checkpoint(variables=saved, numbers=[1, 2])
    values = [each.numpy() for each in saved]
    path = checkpoint.write(str(tmp_path / "saved"))
    for each in saved:
        each.assign(tf.zeros_like(each))
    checkpoint.read(path).assert_consumed()
    for number, (each, value) in enumerate(zip(saved, values, strict=True)):
        np.testing.assert_array_equal(each, value)
        np.testing.assert_array_equal(
            tf.train.load_variable(path, f"variables/{number}/.ATTRIBUTES/VARIABLE_VALUE"), value
        )
    # A tensor that is stored whole is restored into a large variable, too.
    path = tf.train.Checkpoint(table=tf.Variable(content + 5)).write(str(tmp_path / "whole"))
    tf.train.Checkpoint(table=table).read(path).assert_consumed()
    assert (table.numpy() == content + 5).all()


@pytest.mark.long
def test_a_saved_model_of_a_large_variable_is_loaded_without_a_strategy(table, content, tmp_path):
    module = tf.Module()
    module.table = table
    module.look_up = tf.function(lambda ids: tf.gather(table, ids), input_signature=[tf.TensorSpec([None], tf.int64)])
    tf.saved_model.save(module, str(tmp_path / "model"))
    assert pieces_in(tmp_path / "model" / "variables" / "variables") > 3
    loaded = tf.saved_model.load(str(tmp_path / "model"))
    assert (loaded.look_up(tf.constant([4, 4_999], tf.int64)).numpy() == content[[4, 4_999]]).all()


def test_updates_while_a_checkpoint_is_saved_are_in_it_or_not_row_by_row(strategy, table, content, tmp_path):
    @tf.function
    def step():
        rows = tf.range(0, ROWS, 50)
        table.scatter_nd_add(rows[:, tf.newaxis], tf.ones([100, COLUMNS]))

    futures = [strategy.schedule(step) for _ in range(20)]
    checkpoint = tf.train.Checkpoint(table=table)
    path = checkpoint.write(str(tmp_path / "during"))
    strategy.join(TIMEOUT)
    added = tf.train.load_variable(path, NAME) - content
    assert (added == added[:, :1]).all(), "half of a row"
    assert set(np.unique(added)) <= set(range(len(futures) + 1))
    added = tf.train.load_variable(checkpoint.write(str(tmp_path / "joined")), NAME) - content
    assert (added[::50] == len(futures)).all()
    assert added.sum() == len(futures) * 100 * COLUMNS
    (tmp_path / "file").write_text("")
    with pytest.raises(tf.errors.OpError):
        checkpoint.write(str(tmp_path / "file" / "cannot be written"))


SAVING = """
    import tempfile
    import threading

    import psutil
    import tensorflow as tf

    import coordinator
    from coordinator.testing import LocalCluster

    ROWS = 16_000_000

    @tf.function
    def update():
        for _ in tf.range(20):
            rows = tf.random.uniform([4096, 1], 0, ROWS, tf.int64)
            table.scatter_nd_sub(rows, tf.ones([4096, 16]))

    options = coordinator.Options(checkpoint_memory=2**26)
    with (
        LocalCluster(workers=1, ps=1) as cluster,
        coordinator.ParameterServerStrategy(cluster.resolver, options=options) as strategy,
    ):
        with strategy.scope():
            table = tf.Variable(lambda: tf.ones([ROWS, 16]))
        server = psutil.Process(cluster.pid("ps", 0))
        ended, memory = threading.Event(), []

        def train():
            while not ended.is_set():
                strategy.schedule(update).result(60)

        def watch():
            while not ended.wait(0.005):
                memory.append(server.memory_info().rss)

        for _ in range(3):
            strategy.schedule(update).result(60)
        checkpoint, folder = tf.train.Checkpoint(table=table), tempfile.mkdtemp(dir=".")
        before = server.memory_info().rss
        threads = [threading.Thread(target=train), threading.Thread(target=watch)]
        [thread.start() for thread in threads]
        checkpoint.write(folder + "/saved")
        checkpoint.read(folder + "/saved")
        ended.set()
        [thread.join() for thread in threads]
        print(max(memory) - before)
"""


@pytest.mark.cluster
@pytest.mark.long
def test_saving_and_restoring_1_gb_during_updates_needs_64_mb(run_program):
    assert int(run_program(SAVING).stdout) <= 64 * 2**20
