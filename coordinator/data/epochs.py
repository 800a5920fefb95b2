"""Passes over the data of a source. A loop takes ranges of examples, and the done ranges are saved with the model.

    on(strategy) --> a range --> strategy.schedule(step, args=(positions,)) --> its future --> Ledger
        ^                                                                                        |
        '------------- again, if its function failed, was cancelled or was rolled back ----------'

Guarantees:
- The loop over `on` ends when every range is done. A range is done when all functions that were scheduled with the
  range have finished. If one of these functions fails or is cancelled, the loop gets the range again.
- A checkpoint contains the state of the epochs. If a parameter server was lost, the strategy restores the state and the
  variables from the same checkpoint. If there is no checkpoint, both begin again.
- No lock is held while a loop schedules a range's function, or while TensorFlow runs.
"""

import contextlib
import dataclasses
import functools
import json
import logging
import threading
import weakref
from collections.abc import Iterator, Mapping
from typing import Any, Literal

import numpy as np
import tensorflow as tf

from coordinator.background_thread import BackgroundThread
from coordinator.data.ledger import MOST_UNSCHEDULED, WINDOW, Ledger
from coordinator.data.ranges import LateRange, LateRanges, PositionRange
from coordinator.data.source import IN_ORDER, Source, range_vector, shuffled_here
from coordinator.future import Future
from coordinator.options import check_integer
from coordinator.queueing.waits import uninterrupted

_logger = logging.getLogger("coordinator")

# The interval between updates of a progress bar, in seconds.
_INTERVAL = 0.2
# The number of places of an epoch's permutation that are computed at a time, in less than a millisecond.
_CHUNK = 1024
_VERSION = 1
# The maximum number of ranges in flight, for a cluster of few workers.
_AHEAD = 1024
# With many workers, the maximum number of ranges in flight for each worker, enough for calls of 64 functions.
_AHEAD_PER_WORKER = 128
# Large examples of the client lower the maximum, but not below this number for each worker.
_LEAST_AHEAD_PER_WORKER = 4


@dataclasses.dataclass(frozen=True, kw_only=True)
class EpochsStatistics:
    """How far the passes over the data have come.

    Attributes:
      ranges: the number of ranges of all epochs.
      done: the number of done ranges, including skipped ranges.
      out: the number of ranges in flight, which a loop has taken and which are not done.
      skipped: the ranges that were given up. Each is a tuple of the epoch, the position of the first example in the
        epoch, and the number of examples.
      given_back: how often a range was given to a loop again because its function failed or was cancelled.
      rolled_back: how many done ranges had to be done again because a checkpoint was restored.
    """

    ranges: int
    done: int
    out: int
    skipped: tuple[tuple[int, int, int], ...]
    given_back: int
    rolled_back: int


@dataclasses.dataclass(frozen=True)
class EpochsSettings:
    """The data and the settings that decide which examples a range has; see `Epochs`.

    `permutation` has some values of the seed's permutation, because another release of TensorFlow might change them.
    """

    size: int
    digest: str
    batch_size: int
    shuffle: int | None
    batches_per_range: int
    drop_remainder: bool
    permutation: tuple[int, ...]


class Epochs(tf.train.experimental.PythonState):
    """Gives every example of a source to a loop once in each epoch.

    Put the `Epochs` into the model's `tf.train.Checkpoint`. The numbers of workers, parameter servers and epochs may be
    different when the checkpoint is restored.

    Args:
      source: the data; see `coordinator.data`.
      batch_size: the number of examples in a batch.
      epochs: the number of passes.
      shuffle: the seed of the random order, which differs from epoch to epoch. None keeps the order of the source.
        docs/data.md says for each source what is shuffled.
      batches_per_range: the number of batches in a range. Each function gets one range.
      drop_remainder: whether to leave out the last range of an epoch if it has fewer examples than the others.
      prefetch: how many ranges each worker reads ahead in the background; see docs/data.md. The loop then yields
        objects, which must be passed to the function unchanged. A function gets its range when a worker takes it.

    Attributes:
      source: the argument `source`.
      settings: the size and digest of the data, and the arguments that decide which examples a range has.
      restorations: how often a checkpoint with these epochs was restored.

    Raises:
      TypeError: `source` is not a `Source`.
      ValueError: a number is too small, `source` does not support `shuffle` or `prefetch`, or no range is left.
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
        _check_settings(source, sizes, shuffle, prefetch)
        self._prefetch = prefetch
        self.source = source
        self._width = batch_size * batches_per_range
        self._per_epoch = source.size // self._width if drop_remainder else -(-source.size // self._width)
        if not self._per_epoch:
            raise ValueError(
                f"A range of {self._width} examples is larger than the data, which has {source.size}: with "
                "drop_remainder=True nothing is left."
            )
        self._seed = IN_ORDER if shuffle is None else shuffle
        self._shuffles_ranges = shuffle is not None and not source.mixes_all
        # The cache has several entries, because a range that was given back may be of the epoch before.
        self._shuffled_chunk = functools.lru_cache(4)(functools.partial(_shuffled_chunk, self._seed, self._per_epoch))
        permutation = () if shuffle is None else tuple(shuffled_here(np.arange(8), shuffle, 0, 1000).tolist())
        self.settings = EpochsSettings(
            source.size, source.digest, batch_size, shuffle, batches_per_range, drop_remainder, permutation
        )
        # Enter `_lock`, not `_changed`. A signal in `Condition.__enter__`, which is Python code, could leak the lock.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._ledger = Ledger(self._per_epoch * epochs)
        self._is_reset = self._is_held = False
        self._records: weakref.WeakSet[Any] = weakref.WeakSet()
        self.restorations = 0
        self._out: dict[Future, PositionRange | LateRange] = {}
        self._late: weakref.WeakKeyDictionary[Any, LateRanges] = weakref.WeakKeyDictionary()
        self._refill = 0

    def on(
        self, strategy: Any, on_bad_range: Literal["raise", "skip"] = "raise", until: int | None = None
    ) -> Iterator[Any]:
        """Yields the ranges that are left, in order, until all are done. Ranges that were given back come first.

        Schedule a function with each range. A range is yielded again if its function failed for good or was cancelled,
        or if a checkpoint is restored in which the range is not done.

        Args:
          strategy: the `ParameterServerStrategy` that the functions are scheduled on.
          on_bad_range: what to do when a function has failed for good. With "raise", `on` or the strategy raises the
            error. "skip" gives the range up after `Options.max_attempts` failures, with a warning; see `statistics`.
          until: the loop ends before this epoch, for example to evaluate. If None, the loop ends after the last epoch.

        Yields:
          An int64 vector for `Source.read` with five numbers: the epoch, the position of the range's first example in
          the epoch, the number of examples, the number of the range in all epochs, and the seed. If the client reads
          the data, each item is a tuple of the vector and the examples. With `prefetch`, each item is an object that
          becomes such a tuple in the function.

        Raises:
          ValueError: `on_bad_range` is neither "raise" nor "skip", or is "skip" with `Options(stop_on_error=True)`.
          RuntimeError: the loop took many ranges, and no function was scheduled with them.
          Exception: the error of a function. The next call of `on` continues with the ranges that are left.
        """
        options = strategy.extended.services.options
        if on_bad_range not in ("raise", "skip"):
            raise ValueError(f'on_bad_range must be "raise" or "skip", got {on_bad_range!r}.')
        if on_bad_range == "skip" and options.stop_on_error:
            raise ValueError(
                'on_bad_range="skip" needs coordinator.Options(stop_on_error=False): otherwise the first error of a '
                "function cancels all others, whose ranges are not at fault."
            )
        with self._lock:
            ledger = self._ledger
            ledger.most_failures = options.max_attempts if on_bad_range == "skip" else None
            ledger.strategy_raises = options.stop_on_error
            ledger.limit = ledger.total if until is None else until * self._per_epoch
        strategy.extended.services.variables.add_state(self)
        self.source.prepare(strategy)
        for record in list(self._records):
            record.recover()
        return self._yield_ranges(strategy)

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
        """The first epoch with ranges that are not done, or the number of epochs if all ranges are done."""
        with self._lock:
            return self._ledger.below // self._per_epoch

    def statistics(self) -> EpochsStatistics:
        """Returns how far the epochs have come."""
        ledger = self._ledger
        with self._lock:
            counts = {"ranges": ledger.total, "done": ledger.count_done, "out": ledger.count_out}
            counts |= {"given_back": ledger.given_back, "rolled_back": ledger.rolled_back}
            skipped = sorted(ledger.skipped)
        return EpochsStatistics(**counts, skipped=tuple(map(self._extent, skipped)))

    @contextlib.contextmanager
    def progress(self, **settings: Any) -> Iterator[Any]:
        """Returns a context manager that yields a `tqdm` bar. A thread keeps the bar at the number of done ranges.

        Args:
          **settings: keyword arguments of `tqdm.tqdm`, such as `desc` or `file`.

        Raises:
          ImportError: `tqdm` is not installed.
        """
        try:
            from tqdm.auto import tqdm
        except ImportError as error:
            raise ImportError("epochs.progress() needs tqdm: pip install 'coordinator-tf[data]'.") from error
        now = self.statistics()
        bar = tqdm(**{"total": now.ranges, "initial": now.done, "unit": "range", **settings})

        def show() -> None:
            bar.update(self.statistics().done - bar.n)
            bar.refresh()

        def keep_showing() -> None:
            while not thread.stopping.wait(_INTERVAL):
                show()

        thread = BackgroundThread("coordinator-progress", keep_showing)
        thread.start()
        try:
            yield bar
        finally:
            thread.stop()
            thread.wait_stopped()
            show()
            bar.close()

    def begin_at(self, epoch: int) -> None:
        """Continues with an epoch as if all epochs before it were done. If they are done, nothing changes."""
        with self._lock:
            ledger, number = self._ledger, epoch * self._per_epoch
            if number > ledger.below:
                ledger.restore(number, ledger.done, ledger.skipped)

    def serialize(self) -> str:
        """Returns the state for a checkpoint: the done ranges, without ranges whose gradients wait for an update."""
        waiting = {number for record in list(self._records) for number in record.waiting()}
        ledger, settings = self._ledger, dataclasses.asdict(self.settings)
        with self._lock:
            below = min([ledger.below, *waiting])
            done = sorted({*range(below, ledger.below), *ledger.done}.difference(waiting))
            skipped = sorted(ledger.skipped)
        return json.dumps({"version": _VERSION, **settings, "below": below, "done": done, "skipped": skipped})

    def deserialize(self, text: Any) -> None:
        """Continues from a state that `serialize` has returned. TensorFlow calls this method to restore a checkpoint.

        Raises:
          ValueError: the state belongs to other data or settings. The message names the differences.
        """
        saved = json.loads(text if isinstance(text, str) else bytes(text))
        self._check_saved(saved)
        with self._lock:
            self._is_reset = False
            self.restorations += 1
            self._ledger.restore(saved["below"], saved["done"], saved["skipped"])
            self._changed.notify_all()

    def add_record(self, record: Any) -> None:
        """Adds an update rule's record of committed ranges, as a weak reference.

        Args:
          record: an object with two methods. `waiting()` returns the ranges whose gradients wait for an update.
            Checkpoints do not contain them. `recover()` forgets all ranges if only the record or only the epochs were
            restored. `on` calls `recover()` while no function runs.
        """
        self._records.add(record)

    def reset(self) -> None:
        """Begins again with the first example.

        After the loss of a parameter server, the strategy initializes all variables and calls `reset`. Afterwards, the
        strategy restores a checkpoint.
        """
        with self._lock:
            self._is_reset = self._ledger.count_done > 0
            self._ledger.restore(0, ())
            self._changed.notify_all()

    def hold(self) -> None:
        """Gives no range to a loop until `resume`. The strategy calls `hold` before it restores a checkpoint."""
        with self._lock:
            self._is_held = True

    def resume(self) -> None:
        """Lets loops take ranges again after `hold`."""
        with self._lock:
            # The restored checkpoint may be so old that ranges in flight are beyond the window: cancel their functions.
            beyond = [future for future, taken in self._out.items() if taken.number >= self._ledger.below + WINDOW]
        for future in beyond:
            future.cancel()
        with self._lock:
            self._is_held = False
            self._changed.notify_all()

    def __repr__(self) -> str:
        return f"<Epochs: {self.remaining} of {self._ledger.total} ranges of {self.source!r} are left>"

    def _check_saved(self, saved: Mapping[str, Any]) -> None:
        if saved.get("version") != _VERSION:
            raise ValueError(
                f"The checkpoint has epochs of format {saved.get('version')}, and this release of coordinator reads "
                f"format {_VERSION}: use the release that wrote it."
            )
        own = dataclasses.asdict(self.settings) | {"permutation": list(self.settings.permutation)}
        differing = [name for name, value in own.items() if saved[name] != value]
        if differing == ["permutation"]:
            raise ValueError(
                "The checkpoint was written with a release of TensorFlow that shuffles in another way, so its epoch "
                "cannot be continued. Continue with that release until the epochs are done."
            )
        if differing:
            names = {"size": "the number of examples", "digest": "the content of the data"}
            parts = [
                names[name] if name == "digest" else f"{names.get(name, name)} ({saved[name]} then, {own[name]} now)"
                for name in differing
                if name != "permutation"
            ]
            raise ValueError(
                f"The epochs in the checkpoint are of other data or settings; these differ: {', '.join(parts)}. "
                "Continue with those of then, or leave the epochs out of the tf.train.Checkpoint to begin with the "
                "first example."
            )

    def _yield_ranges(self, strategy: Any) -> Iterator[Any]:
        read, late = self.source.reader(), self._late.get(strategy)
        if self._prefetch and late is None:
            reader = strategy.extended.read_ahead(self.source.read_range, self._prefetch)
            late = self._late[strategy] = LateRanges(self._prefetch, self._positions, reader)
        # At present, the cluster may have no workers.
        workers = max(1, len(strategy.cluster.workers))
        ahead = max(_AHEAD, _AHEAD_PER_WORKER * workers)
        if self.source.most_out is not None:
            ahead = min(ahead, max(_LEAST_AHEAD_PER_WORKER * workers, self.source.most_out // self._width))
        # A waiting loop is woken when it can take several ranges. Ranges without a function must not keep it waiting.
        self._refill = max(ahead // 2, MOST_UNSCHEDULED)
        # The ranges that this loop has taken. `check_scheduled` removes ranges with a function, many at a time.
        taken: dict[int, None] = {}
        try:
            while True:
                if (number := self._take(ahead, taken)) is not None:
                    yield LateRange(number, late, self._follow) if late else read(self._positions(number))
                elif not self._wait_next(strategy, ahead, taken):
                    return
                elif self._is_reset:
                    self._is_reset = False
                    _logger.warning(
                        "The epochs begin again with their first example, as the variables did: no checkpoint with "
                        "these Epochs in it was restored. Put them into the tf.train.Checkpoint of the model, and save "
                        "it early."
                    )
        finally:
            with self._lock:
                for number in filter(self._ledger.is_unscheduled, taken):
                    self._ledger.give_back(number)

    @uninterrupted
    def _take(self, ahead: int, taken: dict[int, None]) -> int | None:
        """Returns the number of the next range, or None if the loop must wait or report something first."""
        with self._lock:
            is_due = self._is_held or self._is_reset or self._ledger.error is not None
            if is_due or len(taken) >= MOST_UNSCHEDULED:
                return None
            number = self._ledger.next(ahead)
            if number is not None:
                taken[number] = None
            return number

    def _wait_next(self, strategy: Any, ahead: int, taken: dict[int, None]) -> bool:
        """Waits until a range may be taken. Returns False if all ranges are done."""
        ledger, interval = self._ledger, strategy.extended.services.options.stall_report_interval
        with self._lock:
            while True:
                error, ledger.error = ledger.error, None
                if error is not None:
                    raise error
                if not self._is_held:
                    ledger.check_scheduled(taken)
                    if ledger.is_over:
                        return False
                    if ledger.has_next(ahead):
                        return True
                progress = ledger.progress
                if not self._changed.wait(interval) and progress == ledger.progress:
                    self._changed.release()
                    try:
                        text = "No progress for %.0f s: Epochs.on waits for %d ranges in flight. Cluster: %s"
                        _logger.warning(text, interval, ledger.count_out, strategy.cluster.statistics())
                    finally:
                        self._changed.acquire()

    def _positions(self, number: int) -> PositionRange:
        epoch, start, count = self._extent(number)
        positions = range_vector(start, count, number, epoch, self._seed).view(PositionRange)
        positions.number, positions.follower = number, self._follow
        return positions

    def _extent(self, number: int) -> tuple[int, int, int]:
        """Returns the epoch of a range, the position of its first example, and its number of examples."""
        epoch, place = divmod(number, self._per_epoch)
        if self._shuffles_ranges:
            chunk, offset = divmod(place, _CHUNK)
            place = self._shuffled_chunk(epoch, chunk)[offset]
        start = place * self._width
        return epoch, start, min(self._width, self.source.size - start)

    @uninterrupted
    def _follow(self, taken: PositionRange | LateRange, future: Future) -> None:
        with self._lock:
            self._ledger.schedule(taken.number)
            self._out[future] = taken
        future.add_done_callback(functools.partial(self._settle, taken))

    def _settle(self, taken: PositionRange | LateRange, future: Any) -> None:
        if isinstance(taken, LateRange):
            taken.ranges.remove(taken)
        ledger, number, is_skipped = self._ledger, taken.number, False
        error = None if future.cancelled() else future.exception()
        has_failed = error is not None or future.cancelled()
        with self._lock:
            self._out.pop(future, None)
            if has_failed:
                is_skipped = ledger.fail(number, error)
            else:
                ledger.finish(number)
            if has_failed or ledger.is_over or (ledger.count_out <= self._refill and ledger.has_next()):
                self._changed.notify_all()
        if is_skipped:
            extent = "epoch {}, position {}, {} examples".format(*self._extent(number))
            _logger.warning("The range of %s is skipped: %s: %s", extent, type(error).__name__, error)


def _check_settings(source: Any, sizes: Mapping[str, Any], shuffle: Any, prefetch: Any) -> None:
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


def _shuffled_chunk(seed: int, per_epoch: int, epoch: int, chunk: int) -> list[int]:
    """Returns a chunk of the permutation of an epoch's ranges."""
    begin = chunk * _CHUNK
    places: list[int] = shuffled_here(np.arange(begin, min(begin + _CHUNK, per_epoch)), seed, epoch, per_epoch).tolist()
    return places
