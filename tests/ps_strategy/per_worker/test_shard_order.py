"""Tests of the warning about shards of data in a random order, by the graphs of dataset functions."""

import pytest
import tensorflow as tf

from coordinator.ps_strategy.per_worker.dataset_distribution import warn_of_random_order

Dataset = tf.data.Dataset


@pytest.fixture
def files(tmp_path) -> str:
    for name in "abcd":
        (tmp_path / name).write_text(name)
    return str(tmp_path / "*")


def of_file(name):
    return Dataset.from_tensors(name)


RANDOM = {
    "files": lambda files: Dataset.list_files(files).shard(2, 0),
    "shuffle": lambda _: Dataset.range(9).shuffle(9).shard(2, 0),
    "inside of flat_map": lambda _: Dataset.range(2).flat_map(lambda i: Dataset.range(9).shuffle(9)).shard(2, 0),
    "captured": lambda files: captured(Dataset.list_files(files)),
    "in a branch": lambda files: chosen(files).shard(2, 0),
    "a sample of datasets": lambda _: Dataset.sample_from_datasets([Dataset.range(9)] * 2).shard(2, 0),
    "a random filter": lambda _: Dataset.range(9).filter(lambda x: tf.random.uniform([]) < 0.5).shard(2, 0),
    "as they come": lambda _: (
        Dataset.range(9).interleave(Dataset.range, num_parallel_calls=2, deterministic=False).shard(2, 0)
    ),
}
IN_ORDER = {
    "files": lambda files: Dataset.list_files(files, shuffle=False).shard(2, 0),
    "with a seed": lambda files: Dataset.list_files(files, seed=3).shard(2, 0),
    "files afterwards": lambda files: Dataset.list_files(files, shuffle=False).shard(2, 0).flat_map(of_file).shuffle(9),
    "no share": Dataset.list_files,
    "a share of each file": lambda files: Dataset.list_files(files).flat_map(lambda name: of_file(name).shard(2, 0)),
    "random values": lambda _: Dataset.range(9).map(lambda x: x + tf.random.uniform([], 0, 5, tf.int64)).shard(2, 0),
}


def captured(data):
    return Dataset.range(2).flat_map(lambda i: data.shard(2, 0))


def chosen(files):
    if tf.timestamp() > 0:
        return Dataset.list_files(files)
    return Dataset.list_files(files, shuffle=False)


def warnings(make, files, caplog):
    caplog.clear()
    concrete = tf.function(lambda: make(files)).get_concrete_function()
    warn_of_random_order("make", concrete)
    return [each for each in caplog.messages if "'make' takes a shard of data in a random order" in each]


def test_only_a_shard_of_data_in_a_random_order_is_reported(files, caplog):
    assert {case: len(warnings(make, files, caplog)) for case, make in RANDOM.items()} == dict.fromkeys(RANDOM, 1)
    assert {case for case, make in IN_ORDER.items() if warnings(make, files, caplog)} == set()
    tf.random.set_seed(5)
    assert not warnings(RANDOM["files"], files, caplog), "a global seed is a seed"
    assert not warnings(RANDOM["shuffle"], files, caplog)


def test_it_is_reported_once_when_the_function_is_distributed(strategy, files, caplog):
    def read(context):
        return Dataset.list_files(files).shard(context.num_input_pipelines, context.input_pipeline_id)

    strategy.experimental_distribute_datasets_from_function(read)
    assert len([each for each in caplog.messages if "'read' takes a shard of data in a random order" in each]) == 1
