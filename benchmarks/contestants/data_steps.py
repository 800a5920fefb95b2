"""Steps that compute next to nothing with their batch, from endless iterators and from epochs."""

import itertools
import pathlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf

from benchmarks.contestants.library import Library
from benchmarks.contestants.rate_meter import RateMeter
from coordinator.data import Epochs, Source, arrays, records
from coordinator.data.files import as_one_operation
from coordinator.future import Future

BATCH_SIZE = 32
EXAMPLES = 32_000
_FILES = 4
_COUNTS, _CATEGORIES = 13, 26
_EPOCHS = 10_000
_SEED = 0
# How many ranges are under way where only their handing out is measured.
_OUT = 512
LEAST_RATE = 500.0
# How long reading a range takes where it is slow, in seconds.
_READ = 0.04
FEATURES = {
    "id": tf.io.FixedLenFeature([], tf.int64),
    "categories": tf.io.FixedLenFeature([_CATEGORIES], tf.int64),
    "counts": tf.io.FixedLenFeature([_COUNTS], tf.float32),
}


def write_records(folder: pathlib.Path) -> None:
    """Writes the examples as TFRecord files."""
    for number, rows in enumerate(np.array_split(_counts(), _FILES)):
        with tf.io.TFRecordWriter(str(folder / f"{number}.tfrecord")) as writer:
            for row in rows:
                features = {
                    "id": tf.train.Feature(int64_list=tf.train.Int64List(value=[number])),
                    "categories": tf.train.Feature(int64_list=tf.train.Int64List(value=range(_CATEGORIES))),
                    "counts": tf.train.Feature(float_list=tf.train.FloatList(value=row)),
                }
                example = tf.train.Example(features=tf.train.Features(feature=features))
                writer.write(example.SerializeToString())


def _counts() -> np.ndarray[Any, Any]:
    return np.random.default_rng(_SEED).random([EXAMPLES, _COUNTS]).astype(np.float32)


class _Slow(Source):
    """A source of which reading a range takes some seconds longer."""

    mixes_all = True

    def __init__(self, source: Source, seconds: float) -> None:
        self._source, self._seconds = source, seconds
        self.size, self.digest = source.size, source.digest

    def prepare(self, strategy: Any) -> None:
        self._source.prepare(strategy)

    def read_range(self, positions: Any) -> Any:
        given = tf.cast(positions, tf.int64)
        # One operation, as reading a file is, so that those of a call run at the same time.
        slept = as_one_operation(lambda _: _sleep(self._seconds), given) if self._seconds else 0
        return self._source.read_range(given + slept)


def _sleep(seconds: float) -> Any:
    """Returns an int64 zero after some seconds."""
    dataset = tf.raw_ops.SleepDataset(
        input_dataset=tf.data.experimental.to_variant(tf.data.Dataset.from_tensors(tf.zeros([], tf.int64))),
        # It sleeps before the end, too.
        sleep_microseconds=tf.constant(round(seconds / 2 * 1e6), tf.int64),
        output_types=[tf.int64],
        output_shapes=[[]],
    )
    return tf.raw_ops.DatasetToSingleElement(dataset=dataset, output_types=[tf.int64], output_shapes=[[]])[0]


class DataSteps:
    """A `Workload` of steps: `arrays` or `records FOLDER`, and `endless`, `epochs` or `shuffled`; or `ranges`.

    Or `slow`, the duration of a step in milliseconds, and `unread`, `fused`, `alone` or `prefetch N`.

    Args:
      side: this library.
    """

    def __init__(self, side: Library) -> None:
        self._strategy = side.strategy
        with side.scope():
            self._sum = tf.Variable(tf.zeros([_COUNTS]), trainable=False)
            self._seen = tf.Variable(tf.zeros([], tf.int64), trainable=False)
        self._meters: dict[str, RateMeter] = {}

    def run(self, work: str, seconds: float) -> dict[str, float]:
        """See `Workload`: `rate`, in batches per second; for `ranges` `us`, the client's microseconds for each."""
        if work == "ranges":
            return {"us": self._handing_out(20_000)}
        if work not in self._meters:
            kind, way, *rest = work.split(" ", 2)
            if kind == "slow":
                self._meters[work] = RateMeter(self._slow(float(way), *rest))
            else:
                self._meters[work] = RateMeter(self._runner(kind, way, *rest), LEAST_RATE)
        return {"rate": self._meters[work].rate(seconds)}

    def _runner(self, kind: str, way: str, folder: str = "") -> Callable[[int], None]:
        paths = sorted(map(str, pathlib.Path(folder).glob("*.tfrecord"))) if folder else []
        if way == "endless":
            return self._endless(kind, paths)
        source: Any = arrays(np.arange(EXAMPLES), _counts()) if kind == "arrays" else records(paths, FEATURES)
        shuffle = _SEED if way == "shuffled" else None

        @tf.function
        def step(positions: Any) -> None:
            self._count(source.read(positions))

        def run(count: int) -> None:
            epochs = Epochs(source, BATCH_SIZE, _EPOCHS, shuffle)
            for positions in itertools.islice(epochs.on(self._strategy), count):
                self._strategy.schedule(step, args=(positions,))
            self._strategy.join()

        return run

    def _slow(self, milliseconds: float, way: str) -> Callable[[int], None]:
        source = _Slow(arrays(np.arange(EXAMPLES), _counts()), 0 if way == "unread" else _READ)
        epochs = Epochs(source, BATCH_SIZE, _EPOCHS, prefetch=int(way.partition(" ")[2] or 0))

        @tf.function
        def step(positions: Any) -> None:
            ids, counts = source.read(positions)
            # A step begins when the one before has ended, also in one call.
            with tf.control_dependencies([ids, self._seen.read_value()]):
                slept = _sleep(milliseconds / 1000)
            with tf.control_dependencies([slept]):
                self._count((ids, counts))

        def run(count: int) -> None:
            # What has a timeout is not fused.
            timeout = None if way in ("unread", "fused") else 600.0
            for positions in itertools.islice(epochs.on(self._strategy), count):
                self._strategy.schedule(step, args=(positions,), timeout=timeout)
            self._strategy.join()

        return run

    def _endless(self, kind: str, paths: list[str]) -> Callable[[int], None]:
        def dataset(context: tf.distribute.InputContext) -> tf.data.Dataset:
            if kind == "arrays":
                found = tf.data.Dataset.from_tensor_slices((np.arange(EXAMPLES), _counts()))
            else:
                found = tf.data.TFRecordDataset(paths)
            found = found.shard(context.num_input_pipelines, context.input_pipeline_id).repeat()
            found = found.batch(BATCH_SIZE, drop_remainder=True)
            if kind == "records":
                found = found.map(lambda serialized: tf.io.parse_example(serialized, FEATURES))
            return found.prefetch(4)

        iterator = iter(self._strategy.experimental_distribute_datasets_from_function(dataset))

        @tf.function
        def step(batches: Any) -> None:
            self._count(next(batches))

        def run(count: int) -> None:
            for _ in range(count):
                self._strategy.schedule(step, args=(iterator,))
            self._strategy.join()

        return run

    def _count(self, batch: Any) -> None:
        ids, counts = (batch["id"], batch["counts"]) if isinstance(batch, dict) else batch
        self._sum.assign_add(tf.reduce_sum(counts, 0))
        self._seen.assign_add(tf.size(ids, tf.int64))

    def _handing_out(self, count: int) -> float:
        """Returns the microseconds of processor time of a range, from the loop to the end of its future."""
        epochs, out = Epochs(arrays(np.arange(EXAMPLES)), BATCH_SIZE, _EPOCHS), list[Future]()
        began = time.thread_time()
        for number, positions in enumerate(itertools.islice(epochs.on(self._strategy), count)):
            out.append(Future("step", number))
            positions.follow(out[-1])
            if len(out) == _OUT:
                for future in out:
                    future.set_result(None)
                out.clear()
        return (time.thread_time() - began) / count * 1e6
