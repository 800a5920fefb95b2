"""Tests of per-worker iterators: loops over data that ends, cancelled calls, and positions in checkpoints."""

import concurrent.futures
import functools
from collections import Counter
from pathlib import Path

import keras
import pytest
import tensorflow as tf

import coordinator
from coordinator.ps_strategy.per_worker.dataset import IteratorPositions
from tests.deadline import wait_until
from tests.ps_strategy.every_worker import on_every_worker
from tests.ps_strategy.failure_programs import waiting_generator
from tests.ps_strategy.fusing.fused_calls import TIMEOUT, FusedCalls
from tests.ps_strategy.gate import Gate
from tests.ps_strategy.per_worker.elements import first, total

EXAMPLES, WORKER = 54, 1
# More than there are workers, and few enough that the loop leaves them the processors.
_AHEAD = 20
SPEC = tf.TensorSpec([], tf.int64)


@pytest.fixture
def dataset(strategy):
    def sharded(context):
        return tf.data.Dataset.range(EXAMPLES).shard(context.num_input_pipelines, context.input_pipeline_id)

    return strategy.experimental_distribute_datasets_from_function(sharded)


def schedule_all(strategy, *iterators, function=first):
    """Schedules until the data has ended everywhere, a few ahead of those that have ended; returns the futures."""
    futures = []
    while True:
        if len(futures) > _AHEAD:
            concurrent.futures.wait([futures[-_AHEAD]], TIMEOUT)
        try:
            futures.append(strategy.schedule(function, args=iterators))
        except tf.errors.OutOfRangeError:
            return futures


def visited(futures):
    """Counts the results of those that have one; the others raise OutOfRangeError."""
    errors = [future.exception(TIMEOUT) for future in futures]
    assert all(error is None or isinstance(error, tf.errors.OutOfRangeError) for error in errors)
    return Counter(int(future.result()) for future, error in zip(futures, errors, strict=True) if error is None)


def test_a_loop_until_the_end_visits_every_example_once_in_each_epoch(strategy, dataset):
    with strategy.scope():
        count, weight = tf.Variable(0), keras.Variable(1.0)
        optimizer, mean = keras.optimizers.SGD(), keras.metrics.Mean()
        optimizer.build([weight])

    @tf.function
    def step(iterator):
        number = next(iterator)
        count.assign_add(1)
        optimizer.apply([tf.constant(0.0)], [weight])
        mean.update_state(1.0)
        return number

    for _ in range(2):
        futures = schedule_all(strategy, iter(dataset), function=step)
        strategy.join(TIMEOUT)
        assert visited(futures) == dict.fromkeys(range(EXAMPLES), 1)
    counted = [count.numpy(), int(optimizer.iterations), *(int(value) for value in mean.variables)]
    assert counted == [2 * EXAMPLES] * 4


def test_join_raises_the_end_of_data_and_says_how_to_write_the_loop(strategy, dataset):
    gate = Gate(strategy)
    gate.occupy(2)
    iterator = iter(dataset)
    futures = [strategy.schedule(first, args=(iterator,)) for _ in range(EXAMPLES + 2)]
    gate.open()
    with pytest.raises(tf.errors.OutOfRangeError, match=r"The iterator of sharded has no element left.*") as raised:
        strategy.join(TIMEOUT)
    strategy.join(TIMEOUT)
    assert "except tf.errors.OutOfRangeError" in str(raised.value)
    assert "End of sequence" in str(raised.value.__cause__)
    assert visited(futures) == dict.fromkeys(range(EXAMPLES), 1)


def test_finite_data_in_fused_calls_is_visited_once(strategy, dataset, monkeypatch):
    @tf.function
    def take_if(iterator, number):
        return next(iterator) if iterator is not None else number

    zero = tf.constant(0, tf.int64)
    fused, iterator = FusedCalls(strategy, monkeypatch), iter(dataset)
    taken = [int(strategy.schedule(take_if, (iterator, zero), worker=worker).result(TIMEOUT)) for worker in range(2)]
    # Steps without an element are fused with each other only.
    none = [(None, tf.constant(number, tf.int64)) for number in range(24)]
    futures = fused.run(take_if, [(iterator, zero)] * (EXAMPLES - 2) + none)
    assert visited(futures[:-24]) + Counter(taken) == dict.fromkeys(range(EXAMPLES), 1)
    assert visited(futures[-24:]) == dict.fromkeys(range(24), 1)
    assert sum(fused.sizes) > EXAMPLES // 2
    assert not any(future.exception(0) for future in futures)
    with pytest.raises(tf.errors.OutOfRangeError):
        schedule_all(strategy, iterator)[0].result(TIMEOUT)
    strategy.join(TIMEOUT)


def test_a_step_of_several_elements_may_end_in_the_middle(strategy, dataset):
    with strategy.scope():
        counts = tf.Variable(tf.zeros([EXAMPLES], tf.int64))

    @tf.function
    def take_ten(iterator):
        for _ in tf.range(10):
            counts.scatter_add(tf.IndexedSlices(tf.constant(1, tf.int64), next(iterator)))

    schedule_all(strategy, iter(dataset), function=take_ten)
    assert (counts.numpy() == 1).all()


def test_a_step_reads_two_iterators_until_one_has_ended(strategy, dataset):
    pair = tf.function(lambda iterator, other: (next(iterator), next(other)))
    short = iter(strategy.experimental_distribute_dataset(tf.data.Dataset.range(5)))
    futures = schedule_all(strategy, iter(dataset), short, function=pair)
    pairs = [future.result() for future in futures if future.exception(TIMEOUT) is None]
    assert Counter(int(second) for _, second in pairs) == dict.fromkeys(range(5), 2)


def test_the_end_of_a_functions_own_data_is_its_own_error(strategy, dataset):
    @tf.function
    def overrun(iterator):
        own, taken = iter(tf.data.Dataset.range(0)), next(iterator)
        with tf.control_dependencies([taken]):
            return taken + next(own)

    iterator = iter(dataset)
    future = strategy.schedule(overrun, args=(iterator,))
    with pytest.raises(tf.errors.OutOfRangeError, match="End of sequence"):
        strategy.join(TIMEOUT)
    assert isinstance(future.exception(0), tf.errors.OutOfRangeError)
    # The element that it took is not read again, and that by which the library recognized the error is lost.
    left = visited(schedule_all(strategy, iterator))
    assert (len(left), set(left.values())) == (EXAMPLES - 2, {1})


def test_functions_that_ask_for_the_end_never_raise_it(strategy, dataset):
    @tf.function
    def rest(iterator):
        result, number = tf.constant(0, tf.int64), iterator.get_next_as_optional()
        while number.has_value():
            result += number.get_value()
            number = iterator.get_next_as_optional()
        return result

    for function in (rest, total):
        assert sum(on_every_worker(strategy, function, iter(dataset))) == sum(range(EXAMPLES))


class Source:
    """Data of which one element is returned only once a door is open, which is a file that the worker polls for."""

    def __init__(self, strategy, folder):
        self._strategy = strategy
        self._door = folder / "open"
        # Written when a call waits for the door.
        self._awaited = folder / "awaited"

    def iterator(self, *, endless=True, prefetched=False):
        """Returns an iterator over 0 to 5; a call waits at the door for 0 if elements are prefetched, else for 2."""
        options = tf.data.Options()
        options.experimental_optimization.inject_prefetch = False
        passed = functools.partial(self._pass, 0 if prefetched else 2)

        def make(_):
            dataset = tf.data.Dataset.range(6)
            dataset = (dataset.repeat() if endless else dataset).map(passed)
            return (dataset.prefetch(1) if prefetched else dataset).with_options(options)

        return iter(self._strategy.experimental_distribute_datasets_from_function(make))

    def wait_awaited(self):
        wait_until(self._awaited.exists)

    def open(self):
        self._door.touch()

    def _pass(self, kept, number):
        if number == kept:
            tf.io.write_file(str(self._awaited), "")
            polls = tf.constant(0, tf.int64)
            # An expression that does not depend on the loop would be evaluated only once.
            while tf.size(tf.io.matching_files(self._door_or(polls))) == 0:
                polls += 1
            number += tf.minimum(polls, 0)
        return number

    def _door_or(self, number):
        return tf.strings.join([str(self._door), tf.strings.substr(tf.strings.as_string(number), 0, 0)])


def took(strategy, iterator):
    return int(strategy.schedule(first, (iterator,), worker=WORKER).result(TIMEOUT))


def wait_free(strategy):
    """Waits until the cancelled call has ended."""
    strategy.schedule(tf.function(lambda: tf.constant(0)), worker=WORKER).result(TIMEOUT)


@pytest.fixture
def source(strategy, tmp_path):
    return Source(strategy, tmp_path)


def interrupted(strategy, source, **options):
    """Returns an iterator of which a call waited for an element when it was cancelled."""
    iterator = source.iterator(**options)
    if not options.get("prefetched"):
        assert [took(strategy, iterator) for _ in range(2)] == [0, 1]
    future = strategy.schedule(first, (iterator,), worker=WORKER)
    source.wait_awaited()
    assert future.cancel()
    wait_free(strategy)
    source.open()
    return iterator


def test_an_iterator_known_to_be_interrupted_is_created_again(strategy, source, caplog):  # row 36
    iterator = interrupted(strategy, source, prefetched=True)
    assert [took(strategy, iterator) for _ in range(4)] == [0, 1, 2, 3]
    [warning] = [message for message in caplog.messages if "starts from the beginning" in message]
    assert warning.startswith(f"{iterator.name} on /job:worker/replica:0/task:{WORKER}/")


def test_an_iterator_that_may_have_ended_early_is_kept_and_logged(strategy, source, caplog):
    iterator = interrupted(strategy, source, endless=False, prefetched=True)
    for _ in range(2):
        with pytest.raises(tf.errors.OutOfRangeError):
            took(strategy, iterator)
    [warning] = [message for message in caplog.messages if "ended it too early" in message]
    assert warning.startswith(f"{iterator.name} on /job:worker")


def test_an_iterator_works_again_after_the_error_of_another_function(strategy, source):  # rows 35, 36
    iterator = source.iterator()
    assert [took(strategy, iterator) for _ in range(2)] == [0, 1]
    waiting = strategy.schedule(first, (iterator,), worker=WORKER)
    source.wait_awaited()

    @tf.function
    def fail(number):
        tf.debugging.assert_equal(number, 1, "an error elsewhere")

    strategy.schedule(fail, (tf.constant(0),), worker=0)
    with pytest.raises(tf.errors.InvalidArgumentError, match="an error elsewhere"):
        strategy.join(TIMEOUT)
    with pytest.raises(coordinator.ClosureCancelledError):
        waiting.result(timeout=0)
    wait_free(strategy)
    source.open()
    assert [took(strategy, iterator) for _ in range(4)] == [0, 1, 2, 3]


@tf.function
def rest(iterator):
    numbers = tf.TensorArray(tf.int64, 0, dynamic_size=True)
    for number in iterator:
        numbers = numbers.write(numbers.size(), number)
    return numbers.stack()


@pytest.fixture
def shuffled(strategy):
    """Numbers in a random order, which the iterator alone knows."""

    def make(context):
        numbers = tf.data.Dataset.range(EXAMPLES).shard(context.num_input_pipelines, context.input_pipeline_id)
        return numbers.shuffle(10).prefetch(2)

    return strategy.experimental_distribute_datasets_from_function(make)


def saved(strategy, folder, iterator):
    with strategy.quiet(TIMEOUT):
        return tf.train.Checkpoint(iterator=iterator).save(folder / "position")


def numbers(results):
    return [list(map(int, each)) for each in results]


def test_each_worker_continues_where_it_was_when_the_checkpoint_was_saved(strategy, shuffled, tmp_path):
    iterator = iter(shuffled)
    for _ in range(3):
        on_every_worker(strategy, first, iterator)
    path = saved(strategy, tmp_path, iterator)
    expected = numbers(on_every_worker(strategy, rest, iterator))
    assert [len(each) for each in expected] == [EXAMPLES // 2 - 3] * 2

    other = iter(shuffled)
    on_every_worker(strategy, first, other)
    tf.train.Checkpoint(iterator=other).restore(path).assert_consumed()
    assert numbers(on_every_worker(strategy, rest, other)) == expected
    at_the_end = saved(strategy, tmp_path, other)

    # Before the iterator exists: it is restored when it is added.
    checkpoint = tf.train.Checkpoint()
    checkpoint.restore(at_the_end)
    checkpoint.iterator = iter(shuffled)
    assert numbers(on_every_worker(strategy, rest, checkpoint.iterator)) == [[], []]


def test_data_that_has_ended_goes_on_at_the_restored_position(strategy, shuffled, tmp_path, monkeypatch):
    fused, iterator = FusedCalls(strategy, monkeypatch), iter(shuffled)
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


def test_an_iterator_that_is_created_again_begins_at_the_saved_position(strategy, shuffled, tmp_path):
    iterator = iter(shuffled)
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


@pytest.mark.long
@pytest.mark.cluster
def test_a_strategy_ends_while_generators_wait(run_program):
    assert "ended" in run_program(Path(waiting_generator.__file__).read_text()).stdout
