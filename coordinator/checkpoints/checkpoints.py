"""Saves snapshots of a `tf.train.Checkpoint` when policies say so, writes them in the background, keeps some of them.

    save()                                          thread "coordinator-checkpoints"
      | policies: not due --> None                    write the snapshot
      v                                               complete --> list it, delete what is not kept
    quiet(): take a snapshot, on the servers -->      failed   --> log it, delete it, keep all others

Promises:
- What is listed is complete, and of one moment. An older checkpoint is deleted only after a newer one has been listed.
- A failed write is logged at once and counted. It is tried again when a policy is due the next time.
- A snapshot of a moment that a recovery has undone is not listed.
- What another client that uses the directory has saved is neither overwritten nor deleted.
- No lock is held while files are written or a policy is asked.
"""

import contextlib
import dataclasses
import logging
import os
import threading
import time
from collections.abc import Sequence
from typing import NamedTuple

import tensorflow as tf

from coordinator.checkpoints import checkpoint_files as files
from coordinator.checkpoints.history import History
from coordinator.checkpoints.policies import (
    EveryMinutes,
    KeepPolicy,
    Latest,
    Moment,
    SavedCheckpoint,
    SavePolicy,
    check_policies,
)
from coordinator.checkpoints.serial_thread import SerialThread
from coordinator.errors import CheckpointsTakenOver
from coordinator.events.event_stream import EventStream
from coordinator.paths import checkpoint_path
from coordinator.ps_strategy.recovery.checkpoint_owner import CheckpointOwner
from coordinator.ps_strategy.recovery.checkpoint_restore import CheckpointSource, SaveServices
from coordinator.ps_strategy.recovery.snapshots import Snapshot, Snapshots, delete_unfinished

_logger = logging.getLogger("coordinator")

# How long `close` waits for a checkpoint that is being written, in seconds.
_CLOSING_TIMEOUT = 600.0


@dataclasses.dataclass(frozen=True)
class CheckpointsStatistics:
    """What saving has cost so far.

    Attributes:
      saved: how many checkpoints this object has completed.
      failed: how many it could not complete.
      pause: how long no function could run because of the last save, in seconds; the wait for those that ran included.
      longest_pause: of all.
      seconds: from the beginning of the last complete save to its end.
      bytes: the size of its files.
      error: of the last save if that failed, else None.
    """

    saved: int = 0
    failed: int = 0
    pause: float = 0.0
    longest_pause: float = 0.0
    seconds: float = 0.0
    bytes: int = 0
    error: BaseException | None = None


class Checkpoints(CheckpointSource):
    """Saves, keeps and finds the checkpoints of a directory. Give it to `strategy.restore_from` before saving.

    Restore the checkpoint with which training continues before that: `checkpoint.restore(checkpoints.latest)`.

    Args:
      checkpoint: a `tf.train.Checkpoint` of all that is saved: model, optimizer, epochs, update rule.
      directory: where the checkpoints are; the client and all parameter servers must be able to write there.
      save: when `save()` saves: if one of these policies is due (`EverySteps`, `EveryMinutes`, `EveryHours`).
      keep: which checkpoints are kept: the newest, and those that one of these policies keeps (`Latest`, `Best`,
        `EverySteps`, `EveryMinutes`, `EveryHours`); None to keep all.
      background: whether training goes on while a snapshot is written. The parameter servers need memory for the
        variables that change meanwhile.

    Raises:
      TypeError: an argument is of a wrong type.
      ValueError: the list of checkpoints in the directory is damaged, or its path is a pattern.
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
        # What training continued from or tried to save last.
        self._last: SavedCheckpoint | None = None
        # The step before the first of this program; the number of the last checkpoint, and of the last before it.
        self._offset = 0
        self._number = self._former_number = 0

    @property
    def latest(self) -> str | None:
        """The path of the newest complete checkpoint, or None."""
        complete = self._history.complete_ones()
        return complete[-1].path if complete else None

    @property
    def best(self) -> str | None:
        """The path of the best checkpoint by the first `Best` among the policies; None if none was measured.

        Raises:
          EvaluationError: the results of an evaluator in the directory are damaged.
        """
        return self._history.best()

    @property
    def history(self) -> tuple[SavedCheckpoint, ...]:
        """The complete checkpoints, oldest first, with their metrics. Raises as `best`."""
        return tuple(self._history.measured())

    def statistics(self) -> CheckpointsStatistics:
        """Returns what saving has cost so far."""
        return self._statistics

    def save(self, now: bool = False) -> str | None:
        """Saves if a policy is due. Call it as often as you like, on the thread that schedules.

        No policy is asked while a checkpoint is being written, and without a new step since the last one.

        Args:
          now: whether to save in any case, after the one that is being written.

        Returns:
          The path of the checkpoint, which is complete once it is in `history`; None if none was begun.

        Raises:
          RuntimeError: `strategy.restore_from` was not given this object, or the strategy is closed.
          ParameterServerLost: a parameter server is lost and does not return.
          CheckpointsTakenOver: another client uses the directory.
          tf.errors.OpError: with `now`, it failed before training went on. Otherwise that is logged.
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
        path = files.path_of(self.directory, self._number)
        saving = self._take(services, path, must_succeed=now)
        if saving is None:
            return None
        self._hurry.clear()
        self._thread.submit(lambda: self._write(saving))
        if not self._background:
            self._wait(None)
            if now:
                self._raise_error()
        return path

    def report(self, checkpoint: str | int, /, **metrics: float) -> bool:
        """Records what was measured with a checkpoint, for `Best`. Results of a `SidecarEvaluator` are found without.

        Args:
          checkpoint: its path, as `save` returned it, or its training step.
          **metrics: numbers, by name.

        Returns:
          Whether there is such a checkpoint. It may have been deleted meanwhile, or could not be written.
        """
        is_there = self._history.report(checkpoint, {name: float(value) for name, value in metrics.items()})
        self._thread.submit(self._store)
        return is_there

    def wait(self, timeout: float | None = None) -> str | None:
        """Waits until nothing is being written.

        Args:
          timeout: in seconds; None for none.

        Returns:
          The path of the newest complete checkpoint, or None.

        Raises:
          TimeoutError: not in time.
          Exception: the error of the last save, if that failed.
        """
        if not self._wait(timeout):
            raise TimeoutError(f"A checkpoint in {self.directory} is still being written after {timeout:g} s.")
        self._raise_error()
        return self.latest

    def begin(self, services: SaveServices) -> None:
        """Allows saving; `strategy.restore_from` calls it."""
        complete = self._history.complete_ones()
        restored = int(self.checkpoint.save_counter.numpy())
        self._last = next((each for each in complete if each.number == restored), None)
        numbers = [*files.numbers(self.directory), *(each.number for each in complete), self._number]
        self._number = self._former_number = max(numbers)
        self._offset = _step_of(self._last) - (services.steps() or 0) if services.begins_at_zero else 0
        self._snapshots = Snapshots(self.checkpoint, services.memory, services.owner.require)
        self._services, self._events, self._owner = services, services.events, services.owner

    def end(self) -> None:
        """Waits until nothing is being written; `strategy.close` calls it."""
        self._services = None
        if not self._wait(_CLOSING_TIMEOUT):
            _logger.warning(
                "A checkpoint in %s is still being written after %.0f s, and abandoned.",
                self.directory,
                _CLOSING_TIMEOUT,
            )

    def to_restore(self) -> list[str]:
        """Returns the paths of the complete checkpoints, newest first; called at a recovery."""
        return self._history.to_restore()

    def restored(self, path: str | None) -> None:
        """Records that a recovery has restored a checkpoint, and that newer ones are damaged."""
        services, self._last = self._services, self._history.restored(path)
        if services is not None and services.begins_at_zero and _number_of(self._last) <= self._former_number:
            # What this program has done is undone, and its count of steps begins again.
            self._offset = _step_of(self._last)
        self._thread.submit(self._store)

    def _is_due(self, services: SaveServices) -> bool:
        step, last = services.steps(), self._last
        if step is None or step + self._offset == _step_of(last):
            return False
        now = Moment(step + self._offset, time.time())
        history: list[SavedCheckpoint] = []
        if last is not None:
            history = [each for each in self._history.complete_ones() if each.number < last.number] + [last]
        return any(policy.is_due(history, now) for policy in self._save_policies)

    def _take(self, services: SaveServices, path: str, *, must_succeed: bool) -> "_Saving | None":
        """Takes a snapshot while no function runs, or writes it; returns None if that failed."""
        assert self._snapshots is not None
        snapshots, taken = self._snapshots, None
        with contextlib.suppress(tf.errors.OpError):
            # If a server is lost, that is found below.
            snapshots.prepare(path)
        began = time.monotonic()

        def take() -> str:
            nonlocal taken
            step = services.steps()
            if step is None:
                raise tf.errors.UnavailableError(None, None, "The parameter server that counts the steps is lost.")
            self._last = SavedCheckpoint(path, self._number, step + self._offset, time.time())
            self.checkpoint.save_counter.assign(self._number)
            self._history.begin(self._last)
            taken = snapshots.take(path) if self._background else None
            if taken is None:
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
        return _Saving(path, taken, began)

    def _write(self, saving: "_Saving") -> None:
        """Writes a snapshot, on the background thread."""
        try:
            if saving.snapshot is not None:
                saving.snapshot.write(self._hurry)
            self._owner.record(saving.path)
            self._owner.require()
            self._history.complete()
        except Exception as error:  # noqa: BLE001 - it is logged, and `wait` raises it
            self._fail(saving.path, error)
            return
        finally:
            if saving.snapshot is not None:
                saving.snapshot.forget()
        seconds = time.monotonic() - saving.began
        self._events.record("checkpoint_saved", name=saving.path, seconds=seconds)
        size = sum(tf.io.gfile.stat(file).length for file in files.files(saving.path))
        done = self._statistics
        self._statistics = dataclasses.replace(done, saved=done.saved + 1, seconds=seconds, bytes=size, error=None)
        _logger.info("The checkpoint %s is complete: %.1f MB in %.1f s.", saving.path, size / 1e6, seconds)

    def _store(self) -> None:
        """Writes the lists, on the background thread."""
        try:
            self._owner.require()
        except (CheckpointsTakenOver, tf.errors.OpError) as error:
            _logger.warning("The list of the checkpoints in %s cannot be written: %s", self.directory, error)
        else:
            self._history.store()

    def _fail(self, path: str, error: BaseException) -> None:
        self._history.give_up()
        try:
            self._owner.require()
        except CheckpointsTakenOver as taken_over:
            # The other client may be writing a checkpoint of the same name.
            error = taken_over
        except tf.errors.OpError:
            pass
        else:
            delete_unfinished(path)
            with contextlib.suppress(OSError, tf.errors.OpError):
                files.delete(path)
        self._statistics = dataclasses.replace(self._statistics, failed=self._statistics.failed + 1, error=error)
        self._events.record("checkpoint_failed", name=path, detail=type(error).__name__)
        _logger.warning(
            "The checkpoint %s could not be saved; older ones are kept, and the next policy that is due saves again. "
            "%s: %s",
            path,
            type(error).__name__,
            # What follows says where TensorFlow's call was made.
            str(error).partition("\n")[0],
        )

    def _wait(self, timeout: float | None) -> bool:
        self._hurry.set()
        return self._thread.wait(timeout)

    def _raise_error(self) -> None:
        if (error := self._statistics.error) is not None:
            raise error


class _Saving(NamedTuple):
    """A save in progress; `snapshot` is None if all is written already."""

    path: str
    snapshot: Snapshot | None
    began: float


def _step_of(checkpoint: SavedCheckpoint | None) -> int:
    return 0 if checkpoint is None else checkpoint.step


def _number_of(checkpoint: SavedCheckpoint | None) -> int:
    return 0 if checkpoint is None else checkpoint.number
