"""The small files through which training, its evaluators and readers of results communicate.

    evaluations.jsonl   in the checkpoint directory: one line of JSON per evaluation, oldest first
    training.json       in the checkpoint directory: whether training has started or finished
    best.json           in the evaluator's `best_dir`: the result of the best checkpoint

On a local file system, a training client, a dashboard or a script can read and write these files without importing
TensorFlow. If the directory is a URL, such as `gs://bucket/run`, its files are read and written with `tf.io.gfile`.

Promises:
  * A reader never sees part of a result, because a line counts only if its line end is written, and the other files are
    replaced in one step. The next writer removes a line that a killed writer left unfinished.
  * The marker of an earlier training in the directory does not end the evaluation of a later training. The client or
    the evaluator may start first. If the client starts first, `mark_training_started` replaces the old marker; without
    that call, any checkpoint that is written after the marker invalidates the marker. If the evaluator starts first, it
    ignores a marker found at its start until `new_training_grace` has passed. A later marker counts immediately.

File times are compared only with times of the same file system, never with the clock of another machine.
"""

import contextlib
import dataclasses
import json
import os
import pathlib
import tempfile
import time
from collections.abc import Mapping

from coordinator.addresses import is_url, path_text
from coordinator.errors import EvaluationError

RESULTS_FILE = "evaluations.jsonl"
MARKER_FILE = "training.json"
BEST_FILE = "best.json"


@dataclasses.dataclass(frozen=True)
class EvaluationResult:
    """The metrics of one checkpoint.

    Attributes:
      checkpoint: path of the checkpoint, without `.index` for a TensorFlow checkpoint.
      number: the number at the end of the checkpoint's name (12 for `ckpt-12`); if there is none, the number of
        evaluations in the directory's results file, including this one.
      step: number of training steps before the checkpoint was written.
      metrics: metric names and values; dict-valued metrics are flattened to `outer/inner`.
      time: when the evaluation ended, in Unix seconds.
      written_ns: when the checkpoint was written, in Unix nanoseconds of its file system. This time distinguishes a
        checkpoint from an earlier checkpoint of the same name.
    """

    checkpoint: str
    number: int
    step: int
    metrics: Mapping[str, float]
    time: float
    written_ns: int = 0

    def to_json(self) -> str:
        """Returns one line of JSON without a line end. A NaN metric is written as `NaN`."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, line: str | bytes) -> "EvaluationResult":
        """Parses a line that `to_json` wrote; ignores fields that a later version may add.

        Raises:
          ValueError: the line is not such JSON.
        """
        fields = json.loads(line)
        names = {field.name for field in dataclasses.fields(cls)}
        try:
            return cls(**{name: value for name, value in fields.items() if name in names})
        except (AttributeError, TypeError) as error:
            raise ValueError(f"not an evaluation result: {line!r}") from error


def append_result(directory: str | os.PathLike[str], result: EvaluationResult) -> None:
    """Appends a line to the results file and syncs the file; raises OSError or tf.errors.OpError if this fails."""
    path = _file_in(directory, RESULTS_FILE)
    if is_url(path):
        # Object stores only write whole files.
        lines = [*_complete_lines(directory), result.to_json().encode()]
        replace_text(path, b"".join(line + b"\n" for line in lines).decode())
        return
    pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a+b") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)  # Removes a line that a killed writer left unfinished.
        file.write(result.to_json().encode() + b"\n")
        file.flush()
        os.fsync(file.fileno())


def _complete_lines(directory: str | os.PathLike[str]) -> list[bytes]:
    """Returns the complete, non-empty lines of the results file, without line ends."""
    content, _ = _read(_file_in(directory, RESULTS_FILE)) or (b"", 0)
    return [line for line in content.split(b"\n")[:-1] if line.strip()]


def results(directory: str | os.PathLike[str]) -> list[EvaluationResult]:
    """Returns all evaluations of checkpoints in `directory`, oldest first; an empty list if there are none yet.

    Raises:
      EvaluationError: a line before the last cannot be parsed. (The last line may still be being written.)
    """
    lines = _complete_lines(directory)
    parsed = []
    for index, line in enumerate(lines):
        try:
            parsed.append(EvaluationResult.from_json(line))
        except ValueError as error:
            if index < len(lines) - 1:
                raise EvaluationError(
                    f"Line {index + 1} of {_file_in(directory, RESULTS_FILE)!r} is not an evaluation result: "
                    f"{line[:80]!r}. Remove or repair that line."
                ) from error
    return parsed


def latest_result(directory: str | os.PathLike[str]) -> EvaluationResult | None:
    """Returns the most recent evaluation of a checkpoint in `directory`, or None if there is none yet."""
    for line in reversed(_complete_lines(directory)):
        try:
            return EvaluationResult.from_json(line)
        except ValueError:
            continue
    return None


def best_result(directory: str | os.PathLike[str]) -> EvaluationResult | None:
    """Returns the best result so far, or None if there is none yet. Its `checkpoint` is the copy in `directory`.

    Args:
      directory: the evaluator's `best_dir`.

    Raises:
      EvaluationError: `best.json` in the directory is not an evaluation result.
    """
    path = _file_in(directory, BEST_FILE)
    if (found := _read(path)) is None:
        return None
    try:
        return EvaluationResult.from_json(found[0])
    except ValueError as error:
        raise EvaluationError(f"{path!r} is not an evaluation result. Remove it.") from error


@dataclasses.dataclass(frozen=True)
class TrainingMarker:
    """The state that training reported last.

    Attributes:
      is_finished: True after `mark_training_finished`, False after `mark_training_started`.
      time: when training reported the state, in Unix seconds of the reporting machine.
      written_ns: when the file was written, in Unix nanoseconds of the file system.
    """

    is_finished: bool
    time: float
    written_ns: int


def mark_training_started(directory: str | os.PathLike[str]) -> None:
    """Records that training has started. Call it as early in the client as possible.

    Args:
      directory: where training writes its checkpoints; created if it does not exist.
    """
    _write_marker(directory, "started")


def mark_training_finished(directory: str | os.PathLike[str]) -> None:
    """Records that no more checkpoints will be written to `directory`. Call it after the last checkpoint."""
    _write_marker(directory, "finished")


def read_marker(directory: str | os.PathLike[str]) -> TrainingMarker | None:
    """Returns the state that training reported last in `directory`, or None if training has reported no state.

    Raises `EvaluationError` if the marker file cannot be parsed.
    """
    path = _file_in(directory, MARKER_FILE)
    if (found := _read(path)) is None:
        return None
    content, written_ns = found
    try:
        fields = json.loads(content)
        is_finished = {"started": False, "finished": True}[fields["state"]]
        return TrainingMarker(is_finished, float(fields["time"]), written_ns)
    except (ValueError, KeyError, TypeError) as error:
        raise EvaluationError(
            f"{path!r} does not say whether training has started or finished: {content[:80]!r}. Remove the file."
        ) from error


def _write_marker(directory: str | os.PathLike[str], state: str) -> None:
    replace_text(_file_in(directory, MARKER_FILE), json.dumps({"state": state, "time": time.time()}) + "\n")


def _file_in(directory: str | os.PathLike[str], name: str) -> str:
    return os.path.join(path_text(directory), name)


def _read(path: str) -> tuple[bytes, int] | None:
    """Returns a file's content and time of writing, in nanoseconds of its file system; None if the file is missing."""
    if is_url(path):
        import tensorflow as tf

        try:
            written_ns = int(tf.io.gfile.stat(path).mtime_nsec)
            with tf.io.gfile.GFile(path, "rb") as remote:
                return remote.read(), written_ns
        except tf.errors.NotFoundError:
            return None
    try:
        with open(path, "rb") as file:
            return file.read(), os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None


def replace_text(path: str, text: str) -> None:
    """Replaces the content of a file in one step; creates the file and its directory if necessary.

    Raises `OSError` or `tf.errors.OpError` if the replacement fails; the file then keeps its old content.
    """
    if is_url(path):
        import tensorflow as tf

        from coordinator.ps_strategy.recovery.checkpoint_owner import replace_file

        tf.io.gfile.makedirs(os.path.dirname(path))
        replace_file(path, text)
        return
    target = pathlib.Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, draft = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(draft, 0o644)  # `mkstemp` creates private files, but other users may have to read this one.
        os.replace(draft, target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(draft)
        raise
