"""Tests of datasets on workers that cache their elements in files."""

import os
import pathlib

import pytest
import tensorflow as tf

from tests.ps_strategy.every_worker import TIMEOUT, on_every_worker
from tests.ps_strategy.per_worker.elements import first, total


@pytest.fixture
def lines(tmp_path) -> pathlib.Path:
    """A file that the datasets read: the numbers 1, 2 and 3."""
    path = tmp_path / "lines"
    path.write_text("1\n2\n3\n")
    return path


def numbers(lines, cache):
    return tf.data.TextLineDataset(str(lines)).map(lambda line: tf.strings.to_number(line, tf.int64)).cache(str(cache))


def complete(folder) -> list[int]:
    """The workers with a complete cache, as the names of its files say; there is no other file."""
    names = [name.partition("worker-")[2] for name in os.listdir(folder)]
    files = [tuple(name.split(".")[:2]) for name in names if name.endswith(".index")]
    assert {tuple(name.split(".")[:2]) for name in names} == set(files), names
    return sorted(int(owner) for owner, _ in files)


def test_each_worker_caches_in_a_file_of_its_own_and_reads_it_again(strategy, lines, tmp_path):
    def distribute():
        return strategy.experimental_distribute_datasets_from_function(lambda _: numbers(lines, folder / "odd *?[ü]"))

    stock, folder = tf.data.Dataset.cache, tmp_path / "caches"
    folder.mkdir()
    dataset = distribute()
    left = iter(dataset)
    assert on_every_worker(strategy, first, left) == [1, 1]
    assert on_every_worker(strategy, total, iter(dataset)) == [6, 6], "while another one is in the middle"
    assert on_every_worker(strategy, total, left) == [5, 5]
    lines.write_text("7\n")
    assert on_every_worker(strategy, total, iter(dataset)) == [6, 6]
    assert on_every_worker(strategy, total, iter(distribute())) == [6, 6], "as if the program had started again"
    assert set(complete(folder)) == {0, 1}
    assert tf.data.Dataset.cache is stock
    # Caches of the client, and those in memory, stay as they are.
    assert list(tf.data.Dataset.range(2).cache(str(tmp_path / "own")).as_numpy_iterator()) == [0, 1]
    assert {"own.data-00000-of-00001", "own.index"} <= {*os.listdir(tmp_path)}


def test_a_worker_that_dies_while_it_writes_begins_a_new_file(strategy, shared_cluster, lines, tmp_path, caplog):
    (tmp_path / "caches").mkdir()
    iterator = iter(strategy.experimental_distribute_dataset(numbers(lines, tmp_path / "caches" / "file").repeat(2)))
    assert on_every_worker(strategy, first, iterator) == [1, 1]
    iterator.serialize()
    shared_cluster.restart("worker", 0)
    assert strategy.schedule(total, (iterator,), worker=0).result(TIMEOUT) == 12
    assert "worker/replica:0/task:0/device:CPU:0 begins at the beginning of its data" in caplog.text
    assert strategy.schedule(total, (iterator,), worker=1).result(TIMEOUT) == 11
    assert complete(tmp_path / "caches") == [0, 1], "what it had begun is deleted"
    iterator.serialize()
    shared_cluster.restart("worker", 0)
    assert strategy.schedule(total, (iterator,), worker=0).result(TIMEOUT) == 0, "the file is complete"


def test_files_of_other_shares_and_of_each_element_are_not_read(strategy, tmp_path):
    def shard(context):
        def cached(number):
            return tf.data.Dataset.range(number).cache(
                tf.strings.join([str(tmp_path / "elements"), tf.strings.as_string(number)])
            )

        data = tf.data.Dataset.range(6).shard(context.num_input_pipelines, context.input_pipeline_id)
        return data.cache(str(tmp_path / "file")).concatenate(tf.data.Dataset.range(2, 4).flat_map(cached))

    dataset = strategy.experimental_distribute_datasets_from_function(shard)
    for _ in range(2):
        assert on_every_worker(strategy, total, iter(dataset)) == [10, 13]
    names = {name.rpartition(".worker-")[0] for name in os.listdir(tmp_path)}
    shares = [f"share-{worker}-of-2" for worker in range(2)]
    assert names == {f"{name}.{share}" for name in ("file", "elements2", "elements3") for share in shares}
