"""Tests of positions of per-worker iterators in checkpoints."""

from collections import Counter

import pytest
import tensorflow as tf

from coordinator.ps_strategy.per_worker.dataset import IteratorPositions
from tests.ps_strategy.every_worker import TIMEOUT, on_every_worker
from tests.ps_strategy.fusing.fused_calls import FusedCalls
from tests.ps_strategy.per_worker.elements import first

EXAMPLES = 60
SPEC = tf.TensorSpec([], tf.int64)


@tf.function
def rest(iterator):
    numbers = tf.TensorArray(tf.int64, 0, dynamic_size=True)
    for number in iterator:
        numbers = numbers.write(numbers.size(), number)
    return numbers.stack()


@pytest.fixture
def dataset(strategy):
    """Numbers in a random order, which the iterator alone knows."""

    def shuffled(context):
        numbers = tf.data.Dataset.range(EXAMPLES).shard(context.num_input_pipelines, context.input_pipeline_id)
        return numbers.shuffle(10).prefetch(2)

    return strategy.experimental_distribute_datasets_from_function(shuffled)


def saved(strategy, folder, iterator):
    with strategy.quiet(TIMEOUT):
        return tf.train.Checkpoint(iterator=iterator).save(folder / "position")


def numbers(results):
    return [list(map(int, each)) for each in results]


def test_each_worker_continues_where_it_was_when_the_checkpoint_was_saved(strategy, dataset, tmp_path):
    iterator = iter(dataset)
    for _ in range(3):
        on_every_worker(strategy, first, iterator)
    path = saved(strategy, tmp_path, iterator)
    expected = numbers(on_every_worker(strategy, rest, iterator))
    assert [len(each) for each in expected] == [EXAMPLES // 2 - 3] * 2

    other = iter(dataset)
    on_every_worker(strategy, first, other)
    tf.train.Checkpoint(iterator=other).restore(path).assert_consumed()
    assert numbers(on_every_worker(strategy, rest, other)) == expected
    at_the_end = saved(strategy, tmp_path, other)

    # Before the iterator exists: it is restored when it is added.
    checkpoint = tf.train.Checkpoint()
    checkpoint.restore(at_the_end)
    checkpoint.iterator = iter(dataset)
    assert numbers(on_every_worker(strategy, rest, checkpoint.iterator)) == [[], []]


def test_data_that_has_ended_goes_on_at_the_restored_position(strategy, dataset, tmp_path, monkeypatch):
    fused, iterator = FusedCalls(strategy, monkeypatch), iter(dataset)
    taken = Counter(int(each) for _ in range(5) for each in on_every_worker(strategy, first, iterator))
    path = saved(strategy, tmp_path, iterator)
    on_every_worker(strategy, rest, iterator)
    with pytest.raises(tf.errors.OutOfRangeError):
        strategy.schedule(first, (iterator,)).result(TIMEOUT)
    tf.train.Checkpoint(iterator=iterator).restore(path)
    # It is not known how many elements an iterator has before it exists.
    on_every_worker(strategy, tf.function(lambda _: None), iterator)
    futures = fused.run(first, [(iterator,)] * (EXAMPLES - taken.total()))
    taken.update(int(future.result(0)) for future in futures)
    assert taken == dict.fromkeys(range(EXAMPLES), 1)
    assert fused.sizes
    with pytest.raises(tf.errors.OutOfRangeError):
        strategy.schedule(first, (iterator,)).result(TIMEOUT)
    with pytest.raises(tf.errors.OutOfRangeError):
        strategy.join(TIMEOUT)


def test_an_iterator_that_is_created_again_begins_at_the_saved_position(strategy, dataset, tmp_path):
    iterator = iter(dataset)
    on_every_worker(strategy, first, iterator)
    saved(strategy, tmp_path, iterator)
    lost = int(strategy.schedule(first, (iterator,), worker=1).result(TIMEOUT))
    # As if the worker had been restarted.
    with strategy.quiet(TIMEOUT):
        iterator.recreate()
    assert int(strategy.schedule(first, (iterator,), worker=1).result(TIMEOUT)) == lost


def test_a_dataset_without_a_position_is_refused_in_words(strategy, tmp_path):
    def generated(_):
        return tf.data.Dataset.from_generator(lambda: iter(range(5)), output_signature=SPEC)

    iterator = iter(strategy.experimental_distribute_datasets_from_function(generated))
    strategy.schedule(first, (iterator,), worker=0).result(TIMEOUT)
    with pytest.raises(ValueError, match=r"position of the iterator of .* cannot be saved.*generators and .*service"):
        saved(strategy, tmp_path, iterator)


def test_positions_of_other_data_or_another_number_of_workers_are_refused():
    text = IteratorPositions(lambda: 2, SPEC).to_json()
    IteratorPositions(lambda: 2, SPEC).from_json(text.encode(), "iterator of x")
    with pytest.raises(ValueError, match="iterator of x on 2 workers, and this program began with 3"):
        IteratorPositions(lambda: 3, SPEC).from_json(text, "iterator of x")
    with pytest.raises(ValueError, match=r"its elements were .*int64.* and are .*float32"):
        IteratorPositions(lambda: 2, tf.TensorSpec([], tf.float32)).from_json(text, "iterator of x")
