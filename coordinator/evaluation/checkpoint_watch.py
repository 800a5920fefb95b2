"""Watches a checkpoint directory: what an evaluator sees there, and what it does next.

    CheckpointWatch.look() --> Situation --> next_move() --> EVALUATE, WAIT, END or FAIL

    stop was requested ----------------------------------------> END
    the newest checkpoint has no result -----------------------> EVALUATE
       ... and is unreadable, long after training finished ----> FAIL
       ... and is a weights file that may still be written ----> WAIT
    it has one, and training finished or `max_evaluations` ----> END, or WAIT during the grace period after the start
    otherwise -------------------------------------------------> WAIT

`next_move` is a pure function of the situation: it uses no clock, file or thread. Training may replace checkpoints
while they are found and copied. Paths may be URLs that `tf.io.gfile` takes, such as `gs://bucket/run`.
"""

import contextlib
import dataclasses
import enum
import logging
import os
import re
from collections.abc import Collection

import tensorflow as tf

from coordinator.clock import Clock
from coordinator.data.files import written_ns
from coordinator.evaluation.status_files import EvaluationResult, TrainingMarker, read_marker, results

INDEX_SUFFIX = ".index"
WEIGHTS_SUFFIX = ".weights.h5"

# `ckpt-12`, `epoch_3` and `weights.03` end in a number; the digits of `loss-0.25` belong to a decimal.
_NUMBER = re.compile(r"(?:^|[-_]|[^\d.]\.)(\d+)$")

# A weights file is read when it has not changed for so many seconds. The evaluator does not test whether training has
# locked the file: the test takes the lock, and training fails if it starts to write during the test.
SETTLING_TIME = 0.2

_logger = logging.getLogger("coordinator")


@dataclasses.dataclass(frozen=True)
class CheckpointFile:
    """A checkpoint on disk. `path` is the path without `.index`, or the path of a Keras weights file.

    `written_ns` is when the index or weights file was last written, in Unix nanoseconds of the file system.
    """

    path: str
    written_ns: int

    @classmethod
    def of_file(cls, path: str) -> "CheckpointFile | None":
        """Returns the checkpoint whose index or weights file is `path`; None if this is another file, or is missing.

        TensorFlow writes the index last. If the file is still being written, loading fails, or `require_unchanged`
        raises an error afterwards.
        """
        if not path.endswith((INDEX_SUFFIX, WEIGHTS_SUFFIX)):
            return None
        try:
            return cls(path.removesuffix(INDEX_SUFFIX), written_ns(path))
        except (FileNotFoundError, tf.errors.NotFoundError):
            return None

    @property
    def name(self) -> str:
        return os.path.basename(self.path)

    @property
    def is_keras_weights(self) -> bool:
        """Whether the checkpoint is a Keras `.weights.h5` file, not a TensorFlow checkpoint."""
        return self.path.endswith(WEIGHTS_SUFFIX)

    @property
    def number(self) -> int | None:
        """The number at the end of the name, as a `CheckpointManager` writes it; None if there is none."""
        match = _NUMBER.search(self.name.removesuffix(WEIGHTS_SUFFIX))
        return int(match[1]) if match else None

    @property
    def identity(self) -> tuple[str, int]:
        """A key that is unique in the directory, even if a checkpoint replaces another of the same name."""
        return self.name, self.written_ns

    def files(self) -> list[str]:
        """Returns the paths of the checkpoint's files, first the index or weights file."""
        if self.is_keras_weights:
            return [self.path]
        directory, name = os.path.split(self.path)
        data = [file for file in _names_in(directory) if file.startswith(f"{name}.data-")]
        return [self.path + INDEX_SUFFIX, *(os.path.join(directory, file) for file in data)]

    def require_unchanged(self) -> None:
        """Raises `OSError` if the index or weights file was written again since the checkpoint was found."""
        present = CheckpointFile.of_file(self.files()[0])
        if present is not None and present != self:
            raise OSError(f"{self.path!r} was replaced while it was being read")

    def copy_to(self, prefix: str) -> str:
        """Copies the checkpoint to a path without `.weights.h5`, replacing existing files; returns the copy's path.

        TensorFlow never rewrites the files of a complete checkpoint, so they are hard-linked if the file system allows
        it. A weights file may be rewritten in place, so its content is copied. Raises OSError or tf.errors.OpError if a
        file cannot be read or written, or if the checkpoint was replaced during the copy.
        """
        stem = self.path.removesuffix(WEIGHTS_SUFFIX)
        for file in self.files():
            target = prefix + file.removeprefix(stem)
            remove(target)
            if self.is_keras_weights or not _link(file, target):
                tf.io.gfile.copy(file, target)
        self.require_unchanged()
        return prefix + self.path.removeprefix(stem)


def _link(source: str, target: str) -> bool:
    try:
        os.link(source, target)
    except OSError:  # The file system is another one, or has no links. For other causes, copying raises an error.
        return False
    return True


def remove(path: str) -> None:
    with contextlib.suppress(tf.errors.NotFoundError):
        tf.io.gfile.remove(path)


def _names_in(directory: str) -> list[str]:
    """Returns the names of the files in a directory; none if it does not exist."""
    try:
        return [str(name) for name in tf.io.gfile.listdir(directory)]
    except tf.errors.NotFoundError:
        return []


def find_newest(directory: str) -> CheckpointFile | None:
    """Returns the newest complete checkpoint in a directory; None if there is none, or no such directory."""
    paths = [os.path.join(directory, name) for name in _names_in(directory)]
    if not paths:
        return None
    found = [checkpoint for path in paths if (checkpoint := CheckpointFile.of_file(path))]
    state = tf.train.get_checkpoint_state(directory)
    latest = os.path.basename(state.model_checkpoint_path) if state else None
    listed = [os.path.basename(path) for path in state.all_model_checkpoint_paths] if state else []
    return newest_checkpoint(found, latest, listed)


def newest_checkpoint(
    found: Collection[CheckpointFile], latest: str | None, listed: Collection[str]
) -> CheckpointFile | None:
    """Chooses the newest of the checkpoints found. TensorFlow's state file names the `latest` and all `listed` ones.

    The state file takes precedence over file times, because copying a directory changes file times.
    """
    superseded = set(listed) - {latest}
    candidates = [checkpoint for checkpoint in found if checkpoint.name not in superseded] or found
    return max(candidates, key=lambda checkpoint: (checkpoint.written_ns, checkpoint.number or 0), default=None)


class Move(enum.Enum):
    """What the evaluator does next."""

    EVALUATE = "evaluate the newest checkpoint"
    WAIT = "wait for a newer checkpoint"
    END = "end"
    FAIL = "end with an error: the last checkpoint cannot be read"


@dataclasses.dataclass(frozen=True)
class Situation:
    """What an evaluator sees in the directory."""

    # The newest checkpoint; None if there is none yet.
    newest: CheckpointFile | None = None
    # The result of `newest`; None if it was not evaluated.
    result: EvaluationResult | None = None
    # The latest report of training, which is read before the search for `newest`: if training had finished by then,
    # `newest` is its last checkpoint.
    marker: TrainingMarker | None = None
    # Whether the evaluator was asked to stop.
    is_stopped: bool = False
    # The evaluator ends after a checkpoint with this number or a higher number.
    max_evaluations: int | None = None
    # The latest report of training at the start of the evaluator.
    marker_at_start: TrainingMarker | None = None
    # The newest checkpoint at the start of the evaluator, if it had a result by then.
    evaluated_at_start: CheckpointFile | None = None
    # Whether `newest` is a weights file that changed so recently that training may still be writing it.
    is_settling: bool = False
    # Whether the evaluator started so recently that a new training may be about to start in this directory.
    is_in_grace_period: bool = False
    # Whether `newest` has been unreadable for longer than training takes to write it.
    is_long_unreadable: bool = False


def next_move(situation: Situation) -> Move:
    if situation.is_stopped:
        return Move.END
    if situation.newest is not None and situation.result is None:
        if situation.is_settling:
            return Move.WAIT
        is_hopeless = situation.is_long_unreadable and _is_training_finished(situation)
        return Move.FAIL if is_hopeless else Move.EVALUATE
    if _is_training_finished(situation) or _has_evaluated_enough(situation):
        return Move.END
    return Move.WAIT


def _is_training_finished(situation: Situation) -> bool:
    """Returns whether the training that wrote the newest checkpoint has reported its end."""
    marker, newest = situation.marker, situation.newest
    if marker is None or not marker.is_finished:
        return False
    if newest is not None and newest.written_ns > marker.written_ns:
        return False  # A later training is writing here.
    return not (situation.is_in_grace_period and marker == situation.marker_at_start)


def _has_evaluated_enough(situation: Situation) -> bool:
    """Returns whether the newest checkpoint is evaluated, and its number is at least `max_evaluations`."""
    result, most = situation.result, situation.max_evaluations
    if result is None or most is None or result.number < most:
        return False
    return not (situation.is_in_grace_period and situation.newest == situation.evaluated_at_start)


class CheckpointWatch:
    """Observes a checkpoint directory, which need not exist yet, and logs what an evaluator waits for there.

    Training and the evaluator share the file system of the directory. The grace period begins with construction, and
    takes `new_training_grace` seconds. If no new checkpoint is evaluated, advice is logged every `advice_after`
    seconds. A checkpoint that has been unreadable for `advice_after` seconds is expected to stay unreadable.
    """

    def __init__(
        self,
        directory: str,
        *,
        max_evaluations: int | None,
        new_training_grace: float,
        advice_after: float,
        clock: Clock,
    ):
        self._directory = directory
        self._clock = clock
        self._results = {(os.path.basename(known.checkpoint), known.written_ns): known for known in results(directory)}
        self._max_evaluations = max_evaluations
        self._grace = new_training_grace
        self._advice_after = advice_after
        self._started = clock.now()
        self._marker_at_start = read_marker(directory)
        newest = find_newest(directory)
        self._evaluated_at_start = newest if newest and newest.identity in self._results else None
        self._newest: CheckpointFile | None = None
        self._newest_since = 0.0
        self._unreadable: CheckpointFile | None = None
        self._unreadable_since = 0.0
        self._waiting_since: float | None = None
        self._advised = 0

    @property
    def evaluations(self) -> int:
        """The number of results in the directory."""
        return len(self._results)

    def look(self, is_stopped: bool = False) -> Situation:
        now = self._clock.now()
        marker = read_marker(self._directory)  # Read before the checkpoints; see `Situation.marker`.
        newest = find_newest(self._directory)
        if newest != self._newest:
            self._newest, self._newest_since = newest, now
        return Situation(
            newest=newest,
            result=self._results.get(newest.identity) if newest else None,
            marker=marker,
            is_stopped=is_stopped,
            max_evaluations=self._max_evaluations,
            marker_at_start=self._marker_at_start,
            evaluated_at_start=self._evaluated_at_start,
            is_settling=newest is not None and newest.is_keras_weights and now - self._newest_since < SETTLING_TIME,
            is_in_grace_period=now - self._started < self._grace,
            is_long_unreadable=newest is not None
            and newest == self._unreadable
            and now - self._unreadable_since >= self._advice_after,
        )

    def add_result(self, checkpoint: CheckpointFile, result: EvaluationResult) -> None:
        """Records the result of a checkpoint; the next wait starts from zero."""
        self._results[checkpoint.identity] = result
        self._unreadable = self._waiting_since = None

    def add_unreadable(self, checkpoint: CheckpointFile) -> bool:
        """Records that a checkpoint could not be read. Returns True the first time."""
        is_first = checkpoint != self._unreadable
        if is_first:
            self._unreadable, self._unreadable_since = checkpoint, self._clock.now()
        return is_first

    def report_wait(self, situation: Situation) -> None:
        """Logs the start of a wait, or advice when it is due."""
        now = self._clock.now()
        if self._waiting_since is None:
            self._waiting_since, self._advised = now, 0
            _logger.info("Evaluator is waiting %s.", awaited(situation, self._directory))
        elif now - self._waiting_since >= (self._advised + 1) * self._advice_after:
            self._advised = int((now - self._waiting_since) / self._advice_after)
            _logger.warning("%s", advice(situation, self._directory, now - self._waiting_since))


def awaited(situation: Situation, directory: str) -> str:
    """Returns what the evaluator waits for, as the end of a sentence with "waiting"."""
    if situation.newest is None:
        return f"for a first checkpoint in {directory!r}"
    if situation.result is None:
        return f"until the checkpoint {situation.newest.path!r} can be read"
    return f"for a checkpoint newer than {situation.newest.path!r}"


def advice(situation: Situation, directory: str, waited: float) -> str:
    """Returns a message about a wait of `waited` seconds and its probable cause."""
    hint = "If training has finished, call coordinator.evaluation.mark_training_finished(directory) at its end."
    if situation.newest is None:
        hint = "Does training write its checkpoints to this directory, and do both processes see the same one?"
    elif situation.result is None:
        hint = "It may be incomplete, damaged, or rewritten all the time; a newer checkpoint is read at once."
    elif situation.marker is not None and situation.marker.is_finished and not _is_training_finished(situation):
        hint = "That checkpoint is newer than the marker of a finished training, so a later training seems to run."
    return f"Evaluator has been waiting for {waited:.0f} s {awaited(situation, directory)}. {hint}"
