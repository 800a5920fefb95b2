"""Passes over the data of a source, as ranges that are handed out, followed, and saved with the model.

    on(strategy) --> a range --> strategy.schedule(step, args=(positions,)) --> its future --> Ledger
        ^                                                                                        |
        '------------- again, if its function failed, was cancelled or was rolled back ----------'

Guarantees:
- The loop over `on` ends when every range is done. A range is done when all functions that were scheduled with it have
  finished; if one fails or is cancelled, it is handed out again.
- Its state belongs to a checkpoint, and goes back with the variables when a parameter server was lost: to what the
  checkpoint says, or to the beginning if there is none.
- No lock is held while a range's function is scheduled, or while anything of TensorFlow runs.
"""

import dataclasses
import functools
import json
import logging
import threading
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol

import tensorflow as tf

from coordinator.background_thread import BackgroundThread
from coordinator.data.late_ranges import LateRange, LateRanges
from coordinator.data.ledger import (
    MOST_UNSCHEDULED,
    WINDOW,
    EpochsStatistics,
    FailedRanges,
    Ledger,
    PositionRange,
    UnscheduledRanges,
)
from coordinator.data.source import IN_ORDER, Source, range_vector
from coordinator.future import Future
from coordinator.options import check_integer
from coordinator.queueing.waits import uninterrupted

# In seconds.
_INTERVAL = 0.2


class ProgressBar:
    """A context in which a thread keeps a bar of `tqdm` at the number of ranges that are done; it goes back as they do.

    Args:
      epochs: whose ranges are shown.
      settings: keyword arguments of `tqdm.tqdm`, such as `desc` or `file`.
    """

    def __init__(self, epochs: Any, settings: dict[str, Any]) -> None:
        self._epochs = epochs
        self._settings = settings
        self._thread = BackgroundThread("coordinator-progress", self._keep_showing)

    def __enter__(self) -> Any:
        """Shows the bar, and returns it.

        Raises:
          ImportError: `tqdm` is not installed.
        """
        try:
            from tqdm.auto import tqdm
        except ImportError as error:
            raise ImportError("epochs.progress() needs tqdm: pip install 'coordinator-tf[data]'.") from error
        found = self._epochs.statistics()
        self._bar = tqdm(**{"total": found.ranges, "initial": found.done, "unit": "range", **self._settings})
        self._thread.start()
        return self._bar

    def __exit__(self, *_: object) -> None:
        self._thread.stop()
        self._thread.wait_stopped()
        self._show()
        self._bar.close()

    def _keep_showing(self) -> None:
        while not self._thread.stopping.wait(_INTERVAL):
            self._show()

    def _show(self) -> None:
        self._bar.update(self._epochs.statistics().done - self._bar.n)
        self._bar.refresh()


# How many places are computed at a time; it takes less than a millisecond.
_CHUNK = 1024


class RangeOrder:
    """A permutation of the ranges for each epoch, computed as far as it is needed.

    Args:
      count: the number of ranges of an epoch.
      shuffles: whether they are shuffled.
      seed: of the permutations.
    """

    def __init__(self, count: int, *, shuffles: bool, seed: int) -> None:
        self._count = count
        self._shuffles = shuffles
        self._seed = seed
        # Two, since those given back may be of the epoch before.
        self._chunks: dict[tuple[int, int], list[int]] = {}

    def range_at(self, epoch: int, place: int) -> int:
        """Returns which range comes at a place of an epoch."""
        if not self._shuffles:
            return place
        chunk, offset = divmod(place, _CHUNK)
        found = self._chunks.get((epoch, chunk))
        if found is None:
            found = self._permuted(epoch, chunk * _CHUNK)
            if len(self._chunks) >= 4:
                self._chunks.clear()
            self._chunks[epoch, chunk] = found
        return found[offset]

    def _permuted(self, epoch: int, begin: int) -> list[int]:
        with tf.init_scope(), tf.device("/device:CPU:0"):
            places = tf.range(begin, min(begin + _CHUNK, self._count), dtype=tf.int64)
            seed = tf.constant([self._seed, epoch], tf.int64)
            found = tf.random.experimental.index_shuffle(places, seed, tf.constant(self._count - 1, tf.int64))
            return [int(each) for each in found.numpy()]


def fingerprint(seed: int) -> tuple[int, ...]:
    """Returns some values of the permutation of a seed, by which a change of the algorithm is noticed."""
    with tf.init_scope(), tf.device("/device:CPU:0"):
        indices = tf.range(8, dtype=tf.int64)
        found = tf.random.experimental.index_shuffle(
            indices, tf.constant([seed, 0], tf.int64), tf.constant(999, tf.int64)
        )
        return tuple(int(each) for each in found.numpy())


_VERSION = 1


class CommitRecord(Protocol):
    """The ranges that a rule has committed, on a parameter server."""

    def waiting(self) -> Iterable[int]:
        """Returns those whose gradients wait for an update, and are in no checkpoint."""

    def recover(self) -> None:
        """Forgets all ranges, unless they were restored with the epochs, or neither was. While no function runs."""


def check_settings(source: Any, sizes: Mapping[str, Any], shuffle: Any, prefetch: Any) -> None:
    """Checks the settings of `Epochs`.

    Raises:
      TypeError: `source` is none, or a number is no integer.
      ValueError: one of `sizes`, by their names, is not positive, or the source does not allow a setting.
    """
    if not isinstance(source, Source):
        raise TypeError(
            f"Epochs takes a source, got {source!r}. Make one of your data, such as coordinator.data.arrays(x, y)."
        )
    for name, number in sizes.items():
        check_integer(name, number, minimum=1)
    if shuffle is not None:
        check_integer("shuffle", shuffle, minimum=0, maximum=2**63 - 1)
        if source.is_sequential:
            raise ValueError(f"{source!r} is read in order, so it cannot be shuffled: leave shuffle out.")
    check_integer("prefetch", prefetch, minimum=0)
    if prefetch and source.is_on_client:
        raise ValueError(f"{source!r} is read by the client, ahead of the workers: leave prefetch out.")


@dataclasses.dataclass(frozen=True)
class EpochsState:
    """The data and the settings that decide which examples a range has.

    Attributes:
      size: the number of examples.
      digest: of the data.
      batch_size, shuffle, batches_per_range, drop_remainder: see `Epochs`.
      permutation: some values of the permutation that is used, which another release of TensorFlow might change.
    """

    size: int
    digest: str
    batch_size: int
    shuffle: int | None
    batches_per_range: int
    drop_remainder: bool
    permutation: tuple[int, ...]

    @classmethod
    def of(
        cls, source: Source, batch_size: int, shuffle: int | None, batches_per_range: int, drop_remainder: bool
    ) -> "EpochsState":
        """Returns those of a source and settings."""
        permutation = () if shuffle is None else fingerprint(shuffle)
        return cls(source.size, source.digest, batch_size, shuffle, batches_per_range, drop_remainder, permutation)

    def to_json(self, ledger: Ledger, waiting: Collection[int] = ()) -> str:
        """Returns them with the ranges that are done, except those of which gradients wait for an update."""
        below = min([ledger.below, *waiting])
        return json.dumps(
            {
                "version": _VERSION,
                **dataclasses.asdict(self),
                "below": below,
                "done": sorted({*range(below, ledger.below), *ledger.done}.difference(waiting)),
                "skipped": sorted(ledger.skipped),
            }
        )

    def from_json(self, text: Any) -> tuple[int, Sequence[int], Sequence[int]]:
        """Returns the ranges that are done: all below a number, further ones; and which of them were skipped.

        Raises:
          ValueError: data or settings are others.
        """
        saved = json.loads(text if isinstance(text, str) else bytes(text))
        if saved.get("version") != _VERSION:
            raise ValueError(
                f"The checkpoint has epochs of format {saved.get('version')}, and this release of coordinator reads "
                f"format {_VERSION}: use the release that wrote it."
            )
        own = dataclasses.asdict(self) | {"permutation": list(self.permutation)}
        differing = [name for name, value in own.items() if saved[name] != value]
        if differing:
            raise ValueError(_message(differing, saved, own))
        return saved["below"], saved["done"], saved["skipped"]


def _message(differing: Sequence[str], saved: dict[str, Any], own: dict[str, Any]) -> str:
    if differing == ["permutation"]:
        return (
            "The checkpoint was written with a release of TensorFlow that shuffles in another way, so its epoch cannot "
            "be continued. Continue with that release until the epochs are done."
        )
    names = {"size": "the number of examples", "digest": "the content of the data"}
    parts = [
        names[name] if name == "digest" else f"{names.get(name, name)} ({saved[name]} then, {own[name]} now)"
        for name in differing
        if name != "permutation"
    ]
    return (
        f"The epochs in the checkpoint are of other data or settings; these differ: {', '.join(parts)}. Continue with "
        "those of then, or leave the epochs out of the tf.train.Checkpoint to begin with the first example."
    )


_logger = logging.getLogger("coordinator")

# How many ranges are in flight at most; more for many workers, so that each can take calls of 64 functions.
_AHEAD = 1024
_AHEAD_PER_WORKER = 128
_LEAST_AHEAD_PER_WORKER = 4


class Epochs(tf.train.experimental.PythonState):
    """Hands out every example of a source once in each epoch.

    Put it into the `tf.train.Checkpoint` of the model. It may be restored on other numbers of workers and parameter
    servers, and with another number of epochs.

    Args:
      source: the data; see `coordinator.data`.
      batch_size: the number of examples in a batch.
      epochs: the number of passes.
      shuffle: the seed of the order of the examples, which differs from epoch to epoch; None keeps their order. What
        is shuffled is said in docs/data.md for each source.
      batches_per_range: the number of batches that a function is given in one range.
      drop_remainder: whether the last range of an epoch is left out if it has fewer examples than the others.
      prefetch: how many ranges each worker reads ahead of its functions, in the background; see docs/data.md. Which of
        them a function gets is decided when a worker takes it: the loop yields objects, to be passed on as they are.

    Attributes:
      source: as given.
      settings: the others, but for the number of epochs.

    Raises:
      TypeError: `source` is none.
      ValueError: a number is not positive, or no range is left.
    """

    def __init__(
        self,
        source: Source,
        batch_size: int,
        epochs: int = 1,
        shuffle: int | None = None,
        batches_per_range: int = 1,
        drop_remainder: bool = False,
        prefetch: int = 0,
    ) -> None:
        super().__init__()
        sizes = {"batch_size": batch_size, "epochs": epochs, "batches_per_range": batches_per_range}
        check_settings(source, sizes, shuffle, prefetch)
        self._prefetch = prefetch
        self.source = self._source = source
        self._width = batch_size * batches_per_range
        self._per_epoch = source.size // self._width if drop_remainder else -(-source.size // self._width)
        if not self._per_epoch:
            raise ValueError(
                f"A range of {self._width} examples is larger than the data, which has {source.size}: with "
                "drop_remainder=True nothing is left."
            )
        self._seed = IN_ORDER if shuffle is None else shuffle
        shuffles = shuffle is not None and not source.mixes_all
        self._order = RangeOrder(self._per_epoch, shuffles=shuffles, seed=self._seed)
        self.settings = self._state = EpochsState.of(source, batch_size, shuffle, batches_per_range, drop_remainder)
        self._lock = threading.RLock()  # a signal in `Condition.__enter__`, which is Python, would leave it locked
        self._changed = threading.Condition(self._lock)
        self._ledger = Ledger(self._per_epoch * epochs)
        self._failed = FailedRanges(self._ledger)
        self._is_reset = self._is_held = False
        self._records: weakref.WeakSet[CommitRecord] = weakref.WeakSet()
        self._restorations = 0
        self._out: dict[Future, PositionRange | LateRange] = {}
        self._late: weakref.WeakKeyDictionary[Any, LateRanges] = weakref.WeakKeyDictionary()
        self._refill = 0

    def on(
        self, strategy: Any, on_bad_range: Literal["raise", "skip"] = "raise", until: int | None = None
    ) -> Iterator[Any]:
        """Hands out the ranges that are left, until all are done: every range in order, those given back first.

        Schedule a function with each. A range is handed out again if its function failed for good or was cancelled, and
        if a checkpoint of before was restored.

        Args:
          strategy: the `ParameterServerStrategy` that the functions are scheduled on.
          on_bad_range: what to do when a function has failed for good: "raise" its error, here or as the strategy does;
            or "skip" the range after `Options.max_attempts` such failures, with a warning; `statistics` lists it.
          until: the number of the epoch to end before, for example to evaluate; None for the end of all.

        Yields:
          An int64 vector for `Source.read`: the epoch, the position of the first example in it, the number of examples,
          the number of the range in all epochs, and the seed. With data of the client, and with `prefetch`, what
          becomes a tuple of it and the examples in the function.

        Raises:
          ValueError: `on_bad_range` is another word; or it is "skip", and the first error of a function stops all
            others (`Options.stop_on_error`).
          RuntimeError: ranges were handed out and no function was scheduled with them.
          Exception: a function's error, which goes on with the next call of `on`.
        """
        options = strategy.extended.services.options
        if on_bad_range not in ("raise", "skip"):
            raise ValueError(f'on_bad_range must be "raise" or "skip", got {on_bad_range!r}.')
        if on_bad_range == "skip" and options.stop_on_error:
            raise ValueError(
                'on_bad_range="skip" needs coordinator.Options(stop_on_error=False): otherwise the first error of a '
                "function cancels all others, whose ranges are not at fault."
            )
        most = options.max_attempts if on_bad_range == "skip" else None
        self._failed.begin(most=most, strategy_raises=options.stop_on_error)
        with self._lock:
            self._ledger.limit = self._ledger.total if until is None else until * self._per_epoch
        strategy.extended.services.variables.add_state(self)
        self._source.prepare(strategy)
        for record in list(self._records):
            record.recover()
        return self._hand_out(strategy)

    @property
    def done(self) -> bool:
        """Whether every range of all epochs is done."""
        with self._lock:
            return self._ledger.below == self._ledger.total

    @property
    def remaining(self) -> int:
        """How many ranges are not done."""
        with self._lock:
            return self._ledger.total - self._ledger.count_done

    @property
    def epoch(self) -> int:
        """The first epoch that has ranges that are not done; the number of epochs if there is none."""
        with self._lock:
            return self._ledger.below // self._per_epoch

    def statistics(self) -> EpochsStatistics:
        """Returns how far the epochs have come."""
        with self._lock:
            found, skipped = self._ledger.statistics(), sorted(self._ledger.skipped)
        return dataclasses.replace(found, skipped=tuple(map(self._extent, skipped)))

    def progress(self, **settings: Any) -> ProgressBar:
        """Returns a context with a progress bar of the ranges that are done; `settings` are those of `tqdm.tqdm`."""
        return ProgressBar(self, settings)

    def begin_at(self, epoch: int) -> None:
        """Continues with an epoch as if those before it were done; without effect if they are."""
        with self._lock:
            self._ledger.skip_below(epoch * self._per_epoch)

    def serialize(self) -> str:
        """Returns the state, which TensorFlow stores in a checkpoint."""
        waiting = {number for record in list(self._records) for number in record.waiting()}
        with self._lock:
            return self._state.to_json(self._ledger, waiting)

    def deserialize(self, text: Any) -> None:
        """Continues from a state that `serialize` has returned; TensorFlow calls it to restore a checkpoint.

        Raises:
          ValueError: it is of other data, or of other settings; the message names what differs.
        """
        below, done, skipped = self._state.from_json(text)
        with self._lock:
            self._is_reset = False
            self._restorations += 1
            self._ledger.restore(below, done, skipped)
            self._changed.notify_all()

    @property
    def restorations(self) -> int:
        """How often a checkpoint with these epochs was restored."""
        return self._restorations

    def add_record(self, record: CommitRecord) -> None:
        """Adds a record of the ranges whose pushes an update rule has committed. It is not kept alive."""
        self._records.add(record)

    def __repr__(self) -> str:
        return f"<Epochs: {self.remaining} of {self._ledger.total} ranges of {self._source!r} are left>"

    def _hand_out(self, strategy: Any) -> Iterator[Any]:
        read, late = self._source.reader(), self._late.get(strategy)
        if self._prefetch and late is None:
            reader = strategy.extended.read_ahead(self._source.read_range, self._prefetch)
            late = self._late[strategy] = LateRanges(self._prefetch, self._positions, reader)
        # There may be none at the moment.
        workers = max(1, len(strategy.cluster.workers))
        ahead = max(_AHEAD, _AHEAD_PER_WORKER * workers)
        if self._source.most_out is not None:
            ahead = min(ahead, max(_LEAST_AHEAD_PER_WORKER * workers, self._source.most_out // self._width))
        # A loop that waits is woken for several ranges, but those without a function must not keep it waiting.
        self._refill = max(ahead // 2, MOST_UNSCHEDULED)
        interval = strategy.extended.services.options.stall_report_interval
        unscheduled = UnscheduledRanges(self._ledger)
        try:
            while True:
                if (number := self._take(ahead, unscheduled)) is not None:
                    yield late.new(number, self._follow) if late is not None else read(self._positions(number))
                elif not self._wait_next(strategy, ahead, interval, unscheduled):
                    return
                elif self._is_reset:
                    self._warn_of_reset()
        finally:
            with self._lock:
                unscheduled.give_back()

    @uninterrupted
    def _take(self, ahead: int, unscheduled: UnscheduledRanges) -> int | None:
        """Returns the number of the next range; None if there is something to wait for, or to say."""
        ledger = self._ledger
        with self._lock:
            is_due = self._is_held or self._is_reset or self._failed.has_error or unscheduled.may_be_too_many
            if is_due or ledger.count_out >= ahead or not ledger.has_next():
                return None
            number = ledger.next()
            unscheduled.add(number)
            return number

    def _wait_next(self, strategy: Any, ahead: int, interval: float, unscheduled: UnscheduledRanges) -> bool:
        """Waits until a range may be handed out; returns False if all are done."""
        ledger = self._ledger
        with self._lock:
            while True:
                self._failed.raise_error()
                if not self._is_held:
                    unscheduled.check()
                    if ledger.is_over:
                        return False
                    if ledger.has_next() and ledger.count_out < ahead:
                        return True
                progress = ledger.progress
                if not self._changed.wait(interval) and progress == ledger.progress:
                    self._report_stall(strategy, interval)

    def _warn_of_reset(self) -> None:
        self._is_reset = False
        _logger.warning(
            "The epochs begin again with their first example, as the variables did: no checkpoint with these Epochs in "
            "it was restored. Put them into the tf.train.Checkpoint of the model, and save it early."
        )

    def _report_stall(self, strategy: Any, seconds: float) -> None:
        self._changed.release()
        try:
            text = "No progress for %.0f s: Epochs.on waits for %d ranges in flight. Cluster: %s"
            _logger.warning(text, seconds, self._ledger.count_out, strategy.cluster.statistics())
        finally:
            self._changed.acquire()

    def _positions(self, number: int) -> PositionRange:
        epoch, start, count = self._extent(number)
        positions = range_vector(start, count, number, epoch, self._seed).view(PositionRange)
        positions.number, positions.follower = number, self._follow
        return positions

    @uninterrupted
    def _follow(self, given: PositionRange | LateRange, future: Future) -> None:
        with self._lock:
            self._ledger.schedule(given.number)
            self._out[future] = given
        future.add_done_callback(functools.partial(self._settle, given))

    def _extent(self, number: int) -> tuple[int, int, int]:
        """Returns the epoch, the first position and the number of examples of a range."""
        epoch, place = divmod(number, self._per_epoch)
        start = self._order.range_at(epoch, place) * self._width
        return epoch, start, min(self._width, self._source.size - start)

    def _settle(self, given: PositionRange | LateRange, future: Any) -> None:
        if isinstance(given, LateRange):
            given.ranges.remove(given)
        number, error, is_skipped = given.number, None if future.cancelled() else future.exception(), False
        with self._lock:
            self._out.pop(future, None)
            if error is None and not future.cancelled():
                self._ledger.finish(number)
                self._failed.forget(number)
            else:
                is_skipped = self._failed.settle(number, error)
            if self._is_awaited(is_given_back=error is not None or future.cancelled()):
                self._changed.notify_all()
        if is_skipped:
            extent = "epoch {}, position {}, {} examples".format(*self._extent(number))
            _logger.warning("The range of %s is skipped: %s: %s", extent, type(error).__name__, error)

    def _is_awaited(self, is_given_back: bool) -> bool:
        """Returns whether a loop that waits may go on."""
        ledger = self._ledger
        return is_given_back or ledger.is_over or (ledger.count_out <= self._refill and ledger.has_next())

    def reset(self) -> None:
        """Begins again with the first example.

        So does the strategy when it gives all variables their initial values, because a parameter server was lost; what
        it restores of a checkpoint comes afterwards.
        """
        with self._lock:
            self._is_reset = self._ledger.count_done > 0
            self._ledger.restore(0, ())
            self._changed.notify_all()

    def hold(self) -> None:
        """Hands out no range until `resume`; the strategy calls it when it is about to restore a checkpoint."""
        with self._lock:
            self._is_held = True

    def resume(self) -> None:
        """Undoes `hold`."""
        with self._lock:
            # Those of before a checkpoint was restored may be too far ahead now.
            beyond = [future for future, given in self._out.items() if given.number >= self._ledger.below + WINDOW]
        for future in beyond:
            future.cancel()
        with self._lock:
            self._is_held = False
            self._changed.notify_all()
