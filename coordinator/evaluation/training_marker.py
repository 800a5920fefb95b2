"""How training tells its evaluator that it has begun, and that it has ended: one small file in the directory.

    mark_training_started   as early in the client as possible; withdraws the marker of an earlier training
    mark_training_finished  after the last checkpoint was written

Promises: the file is replaced as a whole, and costs no TensorFlow import. A marker of an earlier training does not
end the evaluation of a later one in the same directory, whichever process comes first:

  * The client comes first, and calls `mark_training_started`: the old marker is gone.
  * The client comes first, and does not: every checkpoint written after the marker makes the marker void.
  * The evaluator comes first: a marker that it finds at its start is doubted for a while (`new_training_grace`),
    in which a new training may begin. One that appears later is believed at once.

Times are compared with times of the same file system only, never with a clock of another machine.
"""

import dataclasses
import json
import os
import pathlib
import time

from coordinator.errors import EvaluationError
from coordinator.evaluation.atomic_file import replace_text

MARKER_FILE = "training.json"


@dataclasses.dataclass(frozen=True)
class TrainingMarker:
    """What training said last.

    Attributes:
      is_finished: whether it said that it has ended.
      time: when, in unix seconds of the machine that said it.
      written_ns: when, in unix nanoseconds of the file system.
    """

    is_finished: bool
    time: float
    written_ns: int


def mark_training_started(directory: str | os.PathLike[str]) -> None:
    """Says that a training that writes its checkpoints to `directory` has begun. Makes the directory if need be."""
    _write(directory, "started")


def mark_training_finished(directory: str | os.PathLike[str]) -> None:
    """Says that no further checkpoint will be written to `directory`; call it after the last one was."""
    _write(directory, "finished")


def read_marker(directory: str | os.PathLike[str]) -> TrainingMarker | None:
    """What training said last in `directory`; None if nothing.

    Raises:
      EvaluationError: the marker file holds something else.
    """
    path = pathlib.Path(directory) / MARKER_FILE
    try:
        with open(path, encoding="utf-8") as file:
            text, written_ns = file.read(), os.fstat(file.fileno()).st_mtime_ns
    except FileNotFoundError:
        return None
    try:
        said = json.loads(text)
        return TrainingMarker({"started": False, "finished": True}[said["state"]], float(said["time"]), written_ns)
    except (ValueError, KeyError, TypeError) as error:
        raise EvaluationError(
            f"{str(path)!r} does not say whether training has started or finished: {text[:80]!r}. Remove the file."
        ) from error


def _write(directory: str | os.PathLike[str], state: str) -> None:
    replace_text(pathlib.Path(directory) / MARKER_FILE, json.dumps({"state": state, "time": time.time()}) + "\n")
