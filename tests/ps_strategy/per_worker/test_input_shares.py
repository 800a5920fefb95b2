"""Tests of which share of the data each worker reads, and of datasets that are made again with new shares."""

from pathlib import Path

import pytest
import tensorflow as tf

from coordinator.ps_strategy.per_worker.dataset import PerWorkerDataset
from coordinator.ps_strategy.per_worker.dataset_distribution import DatasetDistribution, InputShares
from tests.ps_strategy.failure_programs import resharded_inputs
from tests.ps_strategy.local_context import local_context


class Traced:
    """Replaces a traced function: it is called on the client."""

    uses_client_dataset = False

    def __init__(self, make_dataset):
        self.concrete = tf.function(make_dataset).get_concrete_function()

    def call_on(self, _):
        return self.concrete()


class NoCopies:
    def create(self, resource): ...


@pytest.fixture
def workers():
    return [0, 1]


@pytest.fixture
def distribution(workers):
    return DatasetDistribution(InputShares([0, 1], lambda: workers), Traced, NoCopies())


def of_worker(dataset: PerWorkerDataset, worker: int) -> list[int]:
    return list(dataset.value_on(local_context(worker)).take(12).as_numpy_iterator())


def next_of(iterator, worker: int) -> int:
    return next(iterator.value_on(local_context(worker))).numpy()


def test_a_worker_that_joins_has_a_share_of_its_own_and_the_others_keep_theirs():
    shares = InputShares([0, 1])
    assert [shares.of(worker) for worker in range(4)] == [(2, 0), (2, 1), (3, 2), (4, 3)]
    # Indices may have gaps from the beginning.
    gaps = InputShares([0, 2])
    assert [gaps.of(worker) for worker in (0, 2, 1, 3)] == [(2, 0), (2, 1), (3, 2), (4, 3)]


def test_all_present_workers_share_the_data_when_that_is_asked_for(workers):
    shares = InputShares([0, 1], lambda: workers)
    workers.append(2)
    assert [shares.of(worker) for worker in workers] == [(3, 0), (3, 1), (3, 2)]
    workers.remove(0)
    assert [shares.of(worker) for worker in workers] == [(2, 0), (2, 1)]
    assert shares.of(0) == (3, 2), "one that is leaving may still run something"


def sharded(context):
    return tf.data.Dataset.range(12).shard(context.num_input_pipelines, context.input_pipeline_id)


def test_a_dataset_is_made_again_when_its_share_changes(workers, distribution):
    # It may be made while there is no worker.
    workers.clear()
    dataset = distribution.from_function(sharded)
    workers += [0, 1]
    assert [of_worker(dataset, worker) for worker in workers] == [[0, 2, 4, 6, 8, 10], [1, 3, 5, 7, 9, 11]]
    workers.append(2)
    assert [of_worker(dataset, worker) for worker in workers] == [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]


def test_endless_iterators_begin_again_with_new_shares_and_others_with_the_next_iter(workers, distribution):
    endless = iter(distribution.from_function(lambda context: sharded(context).repeat()))
    finite = distribution.from_function(sharded)
    iterator = iter(finite)
    for each in (endless, iterator):
        assert [next_of(each, worker) for worker in (0, 0, 1)] == [0, 2, 1]
    workers.append(2)
    assert [next_of(endless, worker) for worker in (0, 0, 1, 1, 2)] == [0, 3, 1, 4, 2]
    assert [next_of(iterator, worker) for worker in (0, 1)] == [4, 3], "this epoch goes on as it began"
    again = iter(finite)
    assert [next_of(again, worker) for worker in (0, 0, 1, 2, 2)] == [0, 3, 1, 2, 5]


@pytest.mark.long
@pytest.mark.cluster
def test_real_workers_that_join_and_leave_have_shares(run_program):
    run_program(Path(resharded_inputs.__file__).read_text(), timeout=280)
