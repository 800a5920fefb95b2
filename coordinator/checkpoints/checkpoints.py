"""Saves snapshots of a `tf.train.Checkpoint` by policies, writes them in the background, and keeps some of them.

    save()                                          thread "coordinator-checkpoints"
      | policies: not due --> None                    write the snapshot
      v                                               complete --> list it, delete what is not kept
    quiet(): take a snapshot, on the servers -->      failed   --> log it, delete it, keep all others

    ckpt-7.index, ckpt-7.data-*     the checkpoint number 7
    ckpt-8_temp/                    a checkpoint that is being written, or that a program has left unfinished
    checkpoints.json                the complete checkpoints
    checkpoint                      the names of the complete checkpoints, for `tf.train.latest_checkpoint`

Promises:
- A listed checkpoint is completely written, and is a consistent snapshot. A checkpoint is deleted after a newer one has
  been listed and the old one has been removed from the lists. Each list is replaced atomically.
- A failed write is logged immediately and counted. When a policy is due next, a new checkpoint is saved.
- If a recovery has undone the step of a snapshot, the snapshot is not listed.
- Checkpoints of another client that uses the directory are neither overwritten nor deleted.
- No lock is held while files are written or a policy is asked. Files are changed on one thread.
- All paths may be URLs that `tf.io.gfile` takes.
"""

import collections
import contextlib
import dataclasses
import functools
import json
import logging
import math
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence

import tensorflow as tf

from coordinator.addresses import checkpoint_path
from coordinator.checkpoints.policies import (
    Best,
    EveryMinutes,
    KeepPolicy,
    Latest,
    Moment,
    SavedCheckpoint,
    SavePolicy,
    check_policies,
)
from coordinator.errors import CheckpointsTakenOver, EvaluationError
from coordinator.evaluation.checkpoint_watch import CheckpointFile
from coordinator.evaluation.status_files import results
from coordinator.events.event_stream import EventStream
from coordinator.ps_strategy.membership.bounded_calls import on_own_thread
from coordinator.ps_strategy.recovery.checkpoint_owner import CheckpointOwner, replace_file
from coordinator.ps_strategy.recovery.snapshots import Snapshot, Snapshots, delete_unfinished
from coordinator.ps_strategy.recovery.variable_recovery import CheckpointSource, SaveServices
from coordinator.queueing.waits import uninterrupted

_logger = logging.getLogger("coordinator")

# The interval between reports of a long wait, in seconds.
_STALL_REPORT_INTERVAL = 60.0


class SerialThread:
    """A background thread that makes calls in order, for a `purpose`. All methods may be called from any thread."""

    def __init__(self, name: str, purpose: str) -> None:
        self._name = name
        self._purpose = purpose
        # Enter `_lock`, not `_changed`. A signal in `Condition.__enter__`, which is Python code, could leak the lock.
        self._lock = threading.RLock()
        self._changed = threading.Condition(self._lock)
        self._calls: collections.deque[Callable[[], object]] = collections.deque()
        self._is_running = False

    @uninterrupted
    def submit(self, call: Callable[[], object]) -> None:
        """Makes a call after the earlier calls. If the call raises an exception, the exception is logged."""
        with self._lock:
            self._calls.append(call)
            if self._is_running:
                return
            self._is_running = True
        on_own_thread(self._name, self._run)

    def wait(self, timeout: float | None = None) -> bool:
        """Waits until all calls have returned. Returns False after `timeout` seconds. Reports a long wait."""
        began = time.monotonic()
        remaining = math.inf if timeout is None else timeout
        while True:
            with self._lock:
                if self._changed.wait_for(lambda: not self._is_running, min(remaining, _STALL_REPORT_INTERVAL)):
                    return True
            remaining -= _STALL_REPORT_INTERVAL
            if remaining <= 0:
                return False
            _logger.warning("%s has taken %.0f s, and is waited for.", self._purpose, time.monotonic() - began)

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._calls:
                    self._is_running = False
                    self._changed.notify_all()
                    return
                call = self._calls.popleft()
            try:
                call()
            except BaseException:
                # A checkpoint policy or a callback of the program may even raise `SystemExit`, which is logged too.
                _logger.exception("A call on the thread %s raised an exception.", self._name)


LIST_FILE = "checkpoints.json"
_NAME = re.compile(r"ckpt-(\d+)(_temp/?|\.index|\.data-.*)$")


def path_of(directory: str, number: int) -> str:
    """Returns the path of a checkpoint, as TensorFlow takes it."""
    return os.path.join(directory, f"ckpt-{number}")


def load(directory: str) -> list[SavedCheckpoint]:
    """Returns the complete checkpoints, oldest first, from `LIST_FILE` or else from the list of TensorFlow's manager.

    Raises `ValueError` if the list cannot be parsed.
    """
    file = os.path.join(directory, LIST_FILE)
    if not tf.io.gfile.exists(file):
        state = tf.train.get_checkpoint_state(directory)
        names = [os.path.basename(path) for path in state.all_model_checkpoint_paths] if state else []
        times = [*state.all_model_checkpoint_timestamps, *[0.0] * len(names)] if state else []
        listed = []
        for name, saved_at in zip(names, times, strict=False):
            number = re.search(r"-(\d+)$", name)
            listed.append(SavedCheckpoint(os.path.join(directory, name), int(number[1]) if number else 0, 0, saved_at))
    else:
        with tf.io.gfile.GFile(file) as lines:
            text = lines.read()
        try:
            entries = [(entry.pop("name"), entry) for entry in json.loads(text)["checkpoints"]]
            listed = [SavedCheckpoint(os.path.join(directory, name), **entry) for name, entry in entries]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file!r} is not a list of checkpoints: {text[:80]!r}. Repair or remove it.") from error
    return [checkpoint for checkpoint in listed if tf.io.gfile.exists(f"{checkpoint.path}.index")]


def numbers(directory: str) -> list[int]:
    """Returns the numbers of all checkpoints with any file. Deletes unfinished checkpoints."""
    matches = map(_NAME.match, tf.io.gfile.listdir(directory) if tf.io.gfile.isdir(directory) else [])
    known = [(int(match[1]), match[2]) for match in matches if match]
    for number, suffix in known:
        if suffix.startswith("_temp"):
            delete_unfinished(path_of(directory, number))
    return [number for number, _ in known]


def store(directory: str, checkpoints: Sequence[SavedCheckpoint]) -> None:
    """Replaces both lists. Raises `tf.errors.OpError` if the lists cannot be written."""
    fields = map(dataclasses.asdict, checkpoints)
    entries = [{"name": os.path.basename(values.pop("path")), **values} for values in fields]
    replace_file(os.path.join(directory, LIST_FILE), json.dumps({"checkpoints": entries}, indent=1) + "\n")
    # TensorFlow's only function that writes the file `checkpoint` is deprecated.
    lines = [f'model_checkpoint_path: "{entry["name"]}"' for entry in entries[-1:]]
    lines += [f'all_model_checkpoint_paths: "{entry["name"]}"' for entry in entries]
    lines += [f"all_model_checkpoint_timestamps: {entry['time']!r}" for entry in entries]
    replace_file(os.path.join(directory, "checkpoint"), "".join(f"{line}\n" for line in lines))


def delete(path: str) -> None:
    """Deletes a checkpoint. The index is deleted first, because TensorFlow needs it. Raises `tf.errors.OpError`."""
    for file in files(path):
        tf.io.gfile.remove(file)


def files(path: str) -> list[str]:
    """Returns the files of a checkpoint, the index first."""
    return [*tf.io.gfile.glob(f"{path}.index"), *tf.io.gfile.glob(f"{path}.data-*")]


class History:
    """The complete checkpoints of a directory, and the checkpoint that is being saved.

    `complete` changes files, and must be called on one thread. Other methods may be called on any thread. If `keep` is
    None, all checkpoints are kept.
    """

    def __init__(self, directory: str, keep: Sequence[KeepPolicy] | None) -> None:
        self._directory = directory
        self.keep = None if keep is None else tuple(keep)
        self._lock = threading.Lock()
        self._complete = load(directory)
        self._saving: SavedCheckpoint | None = None
        self._is_undone = False

    def complete_ones(self) -> list[SavedCheckpoint]:
        """Returns the complete checkpoints, oldest first."""
        with self._lock:
            return list(self._complete)

    def measured(self) -> list[SavedCheckpoint]:
        """Returns the complete checkpoints, oldest first, with the metrics of evaluators.

        Raises EvaluationError if the file of results is damaged.
        """
        complete = self.complete_ones()
        evaluated = results(self._directory)
        metrics = {(os.path.basename(result.checkpoint), result.written_ns): result.metrics for result in evaluated}
        found = [metrics.get((os.path.basename(one.path), one.written_ns), {}) for one in complete]
        return [
            dataclasses.replace(known, metrics={**written, **known.metrics})
            for known, written in zip(complete, found, strict=True)
        ]

    def begin(self, saving: SavedCheckpoint | None) -> None:
        """Records which checkpoint is being saved, or None."""
        with self._lock:
            self._saving, self._is_undone = saving, False

    def complete(self) -> None:
        """Lists the checkpoint that was being saved, after it is written. Deletes checkpoints that no policy keeps.

        Raises RuntimeError if a recovery has undone the checkpoint's step, or tf.errors.OpError if the lists cannot be
        written. After an error, the checkpoint is not complete.
        """
        with self._lock:
            path = "" if self._saving is None else self._saving.path
        # Evaluators identify a checkpoint by its name and the modification time of this file.
        file = CheckpointFile.of_file(f"{path}.index")
        with self._lock:
            if self._is_undone or self._saving is None:
                raise RuntimeError("A recovery has undone the step of which it is a snapshot.")
            self._complete.append(dataclasses.replace(self._saving, written_ns=file.written_ns if file else 0))
            self._saving = None
        try:
            kept = self._kept()
            store(self._directory, kept)
        except BaseException:
            with self._lock:
                self._complete = [checkpoint for checkpoint in self._complete if checkpoint.path != path]
            raise
        paths = {checkpoint.path for checkpoint in kept}
        with self._lock:
            dropped = [checkpoint.path for checkpoint in self._complete if checkpoint.path not in paths]
            self._complete = [checkpoint for checkpoint in self._complete if checkpoint.path in paths]
        for dropped_path in dropped:
            try:
                delete(dropped_path)
            except tf.errors.OpError as error:
                _logger.warning("The checkpoint %s, which is not kept, cannot be deleted: %s", dropped_path, error)

    def to_restore(self) -> list[str]:
        """Returns the paths of the complete checkpoints, newest first. Gives up the checkpoint that is being saved."""
        with self._lock:
            self._is_undone = True
            return [checkpoint.path for checkpoint in reversed(self._complete)]

    def restored(self, path: str | None) -> SavedCheckpoint | None:
        """Forgets the checkpoints after the restored checkpoint. Returns the restored checkpoint."""
        with self._lock:
            paths = [checkpoint.path for checkpoint in self._complete]
            self._complete = self._complete[: paths.index(path) + 1] if path in paths else []
            return self._complete[-1] if self._complete else None

    def report(self, checkpoint: str | int, metrics: Mapping[str, float]) -> bool:
        """Adds metrics to the checkpoint with this path or step. Returns whether there is such a checkpoint."""
        is_there = False

        def measured(known: SavedCheckpoint) -> SavedCheckpoint:
            nonlocal is_there
            if checkpoint not in (known.path, known.step):
                return known
            is_there = True
            return dataclasses.replace(known, metrics={**known.metrics, **metrics})

        with self._lock:
            self._complete = [measured(known) for known in self._complete]
            self._saving = None if self._saving is None else measured(self._saving)
        return is_there

    def _kept(self) -> list[SavedCheckpoint]:
        complete, policies = self.complete_ones(), self.keep
        if policies is not None:
            try:
                complete = self.measured()
            except EvaluationError as error:
                policies = None
                _logger.warning(
                    "All checkpoints in %s are kept, as it is not known which are best: %s", self._directory, error
                )
        complete = [checkpoint for checkpoint in complete if files(checkpoint.path)]
        if policies is None:
            return complete
        now = Moment(complete[-1].step, time.time())
        kept = {complete[-1].path}.union(known.path for policy in policies for known in policy.kept(complete, now))
        return [checkpoint for checkpoint in complete if checkpoint.path in kept]


# A placeholder for a missing checkpoint.
_NONE = SavedCheckpoint("", 0, 0, 0.0)
# How long `close` waits for a checkpoint that is being written, in seconds.
_CLOSING_TIMEOUT = 600.0


@dataclasses.dataclass(frozen=True)
class CheckpointsStatistics:
    """The cost of saving so far.

    Attributes:
      saved: how many checkpoints this object has completed.
      failed: how many checkpoints this object could not complete.
      pause: how long the last save stopped all functions, in seconds, including the wait for running functions.
      longest_pause: the longest pause of all saves, in seconds.
      seconds: the duration of the last complete save, in seconds.
      bytes: the size of the files of the last complete save.
      error: the error of the last save, or None.
    """

    saved: int = 0
    failed: int = 0
    pause: float = 0.0
    longest_pause: float = 0.0
    seconds: float = 0.0
    bytes: int = 0
    error: BaseException | None = None


class Checkpoints(CheckpointSource):
    """Saves, keeps and finds the checkpoints of a directory.

    First restore the checkpoint from which training continues, by `checkpoint.restore(checkpoints.latest)`. Then pass
    the `Checkpoints` to `strategy.restore_from`. After this, `save()` may be called.

    Args:
      checkpoint: a `tf.train.Checkpoint` of all objects to save, such as model, optimizer, epochs and update rule.
      directory: the folder of the checkpoints. The client and all parameter servers must be able to write there.
      save: the policies for saving (`EverySteps`, `EveryMinutes`, `EveryHours`). `save()` saves if one of them is due.
      keep: the policies for keeping (`Latest`, `Best`, `EverySteps`, `EveryMinutes`, `EveryHours`). The newest
        checkpoint is always kept. None keeps all checkpoints.
      background: whether training goes on while a snapshot is written. The parameter servers need memory for the
        variables that change during the write.

    Raises:
      TypeError: an argument is of a wrong type.
      ValueError: the list of checkpoints in the directory is damaged, or the path of the directory is a pattern.
    """

    def __init__(
        self,
        checkpoint: tf.train.Checkpoint,
        directory: str | os.PathLike[str],
        save: Sequence[SavePolicy] = (EveryMinutes(10),),
        keep: Sequence[KeepPolicy] | None = (Latest(3),),
        background: bool = True,
    ) -> None:
        if not isinstance(checkpoint, tf.train.Checkpoint):
            raise TypeError(f"Checkpoints takes a tf.train.Checkpoint of what is saved, got {checkpoint!r}.")
        check_policies("save", save, "is_due")
        check_policies("keep", () if keep is None else keep, "kept")
        self.checkpoint, self.directory = checkpoint, checkpoint_path(directory)
        self._save_policies = tuple(save)
        self._background = background
        self._history = History(self.directory, keep)
        self._thread = SerialThread("coordinator-checkpoints", f"Writing a checkpoint in {self.directory}")
        self._hurry = threading.Event()
        self._services: SaveServices | None = None
        self._owner = CheckpointOwner()
        self._snapshots: Snapshots | None = None
        self._statistics = CheckpointsStatistics()
        self._events = EventStream()
        # The checkpoint from which training continued, or which `save` tried to write last.
        self._last: SavedCheckpoint | None = None
        # The step before the first step of this program.
        self._offset = 0
        # The number of the last checkpoint, and of the last checkpoint before this program.
        self._number = self._former_number = 0

    @property
    def latest(self) -> str | None:
        """The path of the newest complete checkpoint, or None."""
        complete = self._history.complete_ones()
        return complete[-1].path if complete else None

    @property
    def best(self) -> str | None:
        """The path of the best checkpoint by the first `Best` policy, or None if no checkpoint was measured.

        Raises:
          EvaluationError: the results of an evaluator in the directory are damaged.
        """
        policy = next((policy for policy in self._history.keep or () if isinstance(policy, Best)), None)
        best = policy.kept(self._history.measured(), Moment(0, 0.0)) if policy is not None else ()
        return best[0].path if best else None

    @property
    def history(self) -> tuple[SavedCheckpoint, ...]:
        """The complete checkpoints, oldest first, with their metrics. Raises EvaluationError as `best` does."""
        return tuple(self._history.measured())

    def statistics(self) -> CheckpointsStatistics:
        """Returns the cost of saving so far."""
        return self._statistics

    def save(self, now: bool = False) -> str | None:
        """Saves if a policy is due. Call it as often as you like, on the thread that schedules.

        Policies are not asked while a checkpoint is being written, or if the last checkpoint is of the present step.

        Args:
          now: whether to save without asking the policies, after the checkpoint that is being written.

        Returns:
          The path of the checkpoint, which is complete when it is in `history`, or None if no checkpoint was begun.

        Raises:
          RuntimeError: `strategy.restore_from` was not given this object, or the strategy is closed.
          ParameterServerLost: a parameter server is lost and does not return.
          CheckpointsTakenOver: another client uses the directory.
          tf.errors.OpError: with `now`, the save failed before training went on. Without `now`, the error is logged.
        """
        services = self._services
        if services is None:
            raise RuntimeError(
                "Checkpoints save while a strategy is open that restores from them: call restore_from first."
            )
        if now:
            self._wait(None)
        elif not self._thread.wait(0) or not self._is_due(services):
            return None
        self._number += 1
        path = path_of(self.directory, self._number)
        write = self._take(services, path, must_succeed=now)
        if write is None:
            return None
        self._hurry.clear()
        self._thread.submit(write)
        if not self._background:
            self._wait(None)
            if now:
                self.wait()
        return path

    def report(self, checkpoint: str | int, /, **metrics: float) -> bool:
        """Records metrics of a checkpoint for `Best`. Results of a `SidecarEvaluator` need no call of `report`.

        Args:
          checkpoint: the path that `save` returned, or the training step of the checkpoint.
          **metrics: numbers, by name.

        Returns:
          Whether there is such a checkpoint. The checkpoint may have been deleted, or could not be written.
        """
        is_there = self._history.report(checkpoint, {name: float(value) for name, value in metrics.items()})
        self._thread.submit(self._store)
        return is_there

    def wait(self, timeout: float | None = None) -> str | None:
        """Waits until no checkpoint is being written.

        Args:
          timeout: the time limit in seconds, or None for no limit.

        Returns:
          The path of the newest complete checkpoint, or None.

        Raises:
          TimeoutError: a checkpoint is still being written after `timeout`.
          Exception: the error of the last save, if it failed.
        """
        if not self._wait(timeout):
            raise TimeoutError(f"A checkpoint in {self.directory} is still being written after {timeout:g} s.")
        if (error := self._statistics.error) is not None:
            raise error
        return self.latest

    def begin(self, services: SaveServices) -> None:
        """Allows saving. `strategy.restore_from` calls this method."""
        complete = self._history.complete_ones()
        restored = int(self.checkpoint.save_counter.numpy())
        self._last = next((known for known in complete if known.number == restored), None)
        known = [*numbers(self.directory), *(checkpoint.number for checkpoint in complete), self._number]
        self._number = self._former_number = max(known)
        self._offset = (self._last or _NONE).step - (services.steps() or 0) if services.begins_at_zero else 0
        self._snapshots = Snapshots(self.checkpoint, services.memory, services.owner.require)
        self._services, self._events, self._owner = services, services.events, services.owner

    def end(self) -> None:
        """Waits until no checkpoint is being written. `strategy.close` calls this method."""
        self._services = None
        if not self._wait(_CLOSING_TIMEOUT):
            _logger.warning(
                "A checkpoint in %s is still being written after %.0f s, and abandoned.",
                self.directory,
                _CLOSING_TIMEOUT,
            )

    def to_restore(self) -> list[str]:
        """Returns the paths of the complete checkpoints, newest first. A recovery calls this method."""
        return self._history.to_restore()

    def restored(self, path: str | None) -> None:
        """Records that a recovery has restored a checkpoint. Newer checkpoints count as damaged."""
        services, self._last = self._services, self._history.restored(path)
        if services is not None and services.begins_at_zero and (self._last or _NONE).number <= self._former_number:
            # The recovery has undone this program's steps, and the count of these steps begins again.
            self._offset = (self._last or _NONE).step
        self._thread.submit(self._store)

    def _is_due(self, services: SaveServices) -> bool:
        step, last = services.steps(), self._last
        if step is None or step + self._offset == (last or _NONE).step:
            return False
        now = Moment(step + self._offset, time.time())
        complete = self._history.complete_ones()
        history = [] if last is None else [*(known for known in complete if known.number < last.number), last]
        return any(policy.is_due(history, now) for policy in self._save_policies)

    def _take(self, services: SaveServices, path: str, *, must_succeed: bool) -> "Callable[[], None] | None":
        """Takes a snapshot or writes a checkpoint while no function runs. Returns the remaining work, or None."""
        assert self._snapshots is not None
        snapshots, snapshot = self._snapshots, None
        with contextlib.suppress(tf.errors.OpError):
            # `services.save` notices a lost server below.
            snapshots.prepare(path)
        began = time.monotonic()

        def take() -> str:
            nonlocal snapshot
            step = services.steps()
            if step is None:
                raise tf.errors.UnavailableError(None, None, "The parameter server that counts the steps is lost.")
            self._last = SavedCheckpoint(path, self._number, step + self._offset, time.time())
            self.checkpoint.save_counter.assign(self._number)
            self._history.begin(self._last)
            if self._background:
                snapshot = snapshots.take(path)
            else:
                self.checkpoint.write(path)
            return path

        try:
            services.save(take, self.directory)
        except (OSError, tf.errors.OpError) as error:
            self._fail(path, error)
            if must_succeed:
                raise
            return None
        finally:
            pause = time.monotonic() - began
            longest = max(pause, self._statistics.longest_pause)
            self._statistics = dataclasses.replace(self._statistics, pause=pause, longest_pause=longest)
        return functools.partial(self._write, path, snapshot, began)

    def _write(self, path: str, snapshot: Snapshot | None, began: float) -> None:
        """Writes the snapshot, if there is one, and lists the checkpoint. Runs on the background thread."""
        try:
            if snapshot is not None:
                snapshot.write(self._hurry)
            self._owner.record(path)
            self._owner.require()
            self._history.complete()
        except Exception as error:  # noqa: BLE001 - the error is logged, and `wait` raises it
            self._fail(path, error)
            return
        finally:
            if snapshot is not None:
                snapshot.forget()
        seconds = time.monotonic() - began
        self._events.record("checkpoint_saved", name=path, seconds=seconds)
        size = sum(tf.io.gfile.stat(file).length for file in files(path))
        _logger.info("The checkpoint %s is complete: %.1f MB in %.1f s.", path, size / 1e6, seconds)
        done = self._statistics
        self._statistics = dataclasses.replace(done, saved=done.saved + 1, seconds=seconds, bytes=size, error=None)

    def _store(self) -> None:
        """Writes the lists. Runs on the background thread."""
        try:
            self._owner.require()
            store(self.directory, self._history.complete_ones())
        except (CheckpointsTakenOver, tf.errors.OpError) as error:
            _logger.warning("The list of the checkpoints in %s cannot be written: %s", self.directory, error)

    def _fail(self, path: str, error: BaseException) -> None:
        self._history.begin(None)
        try:
            self._owner.require()
        except CheckpointsTakenOver as taken_over:
            # Delete nothing, because the other client may be writing a checkpoint of the same name.
            error = taken_over
        except tf.errors.OpError:
            pass
        else:
            delete_unfinished(path)
            with contextlib.suppress(OSError, tf.errors.OpError):
                delete(path)
        self._events.record("checkpoint_failed", name=path, detail=type(error).__name__)
        _logger.warning(
            "The checkpoint %s could not be saved; older ones are kept, and the next policy that is due saves again. "
            "%s: %s",
            path,
            type(error).__name__,
            # The other lines of the message say where TensorFlow's call was made.
            str(error).partition("\n")[0],
        )
        self._statistics = dataclasses.replace(self._statistics, failed=self._statistics.failed + 1, error=error)

    def _wait(self, timeout: float | None) -> bool:
        self._hurry.set()
        return self._thread.wait(timeout)
