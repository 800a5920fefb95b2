"""Tests of datasets on workers that cache their elements in files."""

import os
import pathlib

import pytest
import tensorflow as tf

from coordinator.ps_strategy.per_worker.cache_files import CachesInGraph, own_file
from tests.ps_strategy.every_worker import TIMEOUT, on_every_worker
from tests.ps_strategy.per_worker.elements import first, total


@pytest.fixture
def lines(tmp_path) -> pathlib.Path:
    """A file that the datasets read: the numbers 1, 2 and 3."""
    path = tmp_path / "lines"
    path.write_text("1\n2\n3\n")
    return path


@pytest.fixture(params=["function", "ready"])
def distribute(strategy, request):
    """Distributes the dataset of a function: by the function, or as a dataset that is created on the client."""

    def distributed(make):
        if request.param == "ready":
            return strategy.experimental_distribute_dataset(make())
        return strategy.experimental_distribute_datasets_from_function(lambda _: make())

    return distributed


def numbers(lines, cache):
    return tf.data.TextLineDataset(str(lines)).map(lambda line: tf.strings.to_number(line, tf.int64)).cache(str(cache))


def complete(folder) -> list[int]:
    """The workers with a complete cache, as the names of its files say; there is no other file."""
    names = [name.partition("worker-")[2] for name in os.listdir(folder)]
    owners = sorted(int(name.split(".")[0]) for name in names if name.endswith(".index"))
    assert len(names) == 2 * len(owners)
    return owners


def test_each_worker_caches_in_a_file_of_its_own_and_reads_it_again(distribute, strategy, lines, tmp_path):
    dataset = distribute(lambda: numbers(lines, tmp_path / "caches" / "file"))
    (tmp_path / "caches").mkdir()
    assert on_every_worker(strategy, total, iter(dataset)) == [6, 6, 6]
    lines.write_text("7\n")
    for _ in range(2):
        assert on_every_worker(strategy, total, iter(dataset)) == [6, 6, 6]
    assert complete(tmp_path / "caches") == [0, 1, 2]
    again = distribute(lambda: numbers(lines, tmp_path / "caches" / "file"))
    assert on_every_worker(strategy, total, iter(again)) == [6, 6, 6], "as if the program had started again"


def test_an_iterator_reads_all_while_another_one_is_in_the_middle(distribute, strategy, lines, tmp_path):
    dataset = distribute(lambda: numbers(lines, tmp_path / "file"))
    left = iter(dataset)
    assert on_every_worker(strategy, first, left) == [1, 1, 1]
    assert on_every_worker(strategy, total, iter(dataset)) == [6, 6, 6]
    assert on_every_worker(strategy, total, left) == [5, 5, 5]


def test_a_worker_that_dies_while_it_writes_begins_a_new_file(distribute, strategy, shared_cluster, lines, tmp_path):
    (tmp_path / "caches").mkdir()
    dataset = distribute(lambda: numbers(lines, tmp_path / "caches" / "file"))
    iterator = iter(dataset)
    assert on_every_worker(strategy, first, iterator) == [1, 1, 1]
    shared_cluster.restart("worker", 0)
    assert strategy.schedule(total, (iterator,), worker=0).result(TIMEOUT) == 6
    assert [strategy.schedule(total, (iterator,), worker=worker).result(TIMEOUT) for worker in (1, 2)] == [5, 5]
    assert complete(tmp_path / "caches") == [0, 1, 2], "what it had begun is deleted"


def test_a_position_in_a_file_that_is_not_complete_is_given_up_with_a_warning(
    strategy, shared_cluster, lines, tmp_path, caplog
):
    iterator = iter(strategy.experimental_distribute_dataset(numbers(lines, tmp_path / "file").repeat(2)))
    assert on_every_worker(strategy, first, iterator) == [1, 1, 1]
    iterator.serialize()
    shared_cluster.restart("worker", 0)
    assert strategy.schedule(total, (iterator,), worker=0).result(TIMEOUT) == 12
    assert "worker/replica:0/task:0/device:CPU:0 begins at the beginning of its data" in caplog.text
    iterator.serialize()
    shared_cluster.restart("worker", 0)
    assert strategy.schedule(total, (iterator,), worker=0).result(TIMEOUT) == 0, "the file is complete"


def test_files_of_other_shares_are_not_read(strategy, tmp_path):
    def shard(context):
        data = tf.data.Dataset.range(6).shard(context.num_input_pipelines, context.input_pipeline_id)
        return data.cache(str(tmp_path / "file"))

    dataset = strategy.experimental_distribute_datasets_from_function(shard)
    assert on_every_worker(strategy, total, iter(dataset)) == [3, 5, 7]
    names = {name.rpartition(".worker-")[0] for name in os.listdir(tmp_path)}
    assert names == {"file.share-0-of-3", "file.share-1-of-3", "file.share-2-of-3"}


def test_a_dataset_may_cache_in_a_file_for_each_element(strategy, tmp_path):
    def one_for_each():
        def cached(number):
            name = tf.strings.join([str(tmp_path / "file"), tf.strings.as_string(number)])
            return tf.data.Dataset.range(number).cache(name)

        return tf.data.Dataset.range(2, 4).flat_map(cached)

    dataset = strategy.experimental_distribute_datasets_from_function(lambda _: one_for_each())
    for _ in range(2):
        assert on_every_worker(strategy, total, iter(dataset)) == [4, 4, 4]
    assert len(os.listdir(tmp_path)) == 2 * 2 * 3


def test_a_cache_in_memory_and_caches_of_the_client_stay_as_they_are(distribute, strategy, tmp_path):
    stock = tf.data.Dataset.cache
    dataset = distribute(lambda: tf.data.Dataset.range(4).cache())
    assert on_every_worker(strategy, total, iter(dataset)) == [6, 6, 6]
    assert tf.data.Dataset.cache is stock
    assert list(tf.data.Dataset.range(2).cache(str(tmp_path / "file")).as_numpy_iterator()) == [0, 1]
    assert sorted(os.listdir(tmp_path)) == ["file.data-00000-of-00001", "file.index"]


@pytest.mark.parametrize("name", ["file", "odd *?[1]", "ü\n"])
def test_a_complete_file_is_chosen_or_else_a_new_one(tmp_path, name):
    def chosen():
        return own_file(tf.constant(str(tmp_path / name)), "worker-1").numpy().decode()

    new = {chosen() for _ in range(5)}
    assert len(new) == 5
    assert {each.rpartition(".")[0] for each in new} == {str(tmp_path / f"{name}.worker-1")}
    for other in ("worker-1.12_0.index", "worker-11.12.index", "worker-1.12.data-00000-of-00001", "worker-2.3.index"):
        (tmp_path / f"{name}.{other}").write_text("")
    assert chosen() not in new
    (tmp_path / f"{name}.worker-1.12.index").write_text("")
    assert chosen() == str(tmp_path / f"{name}.worker-1.12")
    (tmp_path / f"{name}.index").write_text("")
    assert chosen() == str(tmp_path / name), "by another program, for all"


def test_a_graph_without_a_file_is_sent_as_it_is():
    variant = tf.data.experimental.to_variant(tf.data.Dataset.range(3).cache())
    graph = tf.raw_ops.DatasetToGraphV2(input_dataset=variant).numpy()
    assert CachesInGraph(graph).copy_on(None) == (graph, ())
