"""The results of a directory: one line of JSON per evaluation, in the order in which they were made.

Promises: a line counts once its end of line is there, so a reader never sees half of one; a writer that was killed
within a line is repaired by the next; reading costs no TensorFlow import.
"""

import os
import pathlib

from coordinator.errors import EvaluationError
from coordinator.evaluation.evaluation_result import EvaluationResult

RESULTS_FILE = "evaluations.jsonl"


def results(directory: str | os.PathLike[str]) -> list[EvaluationResult]:
    """All evaluations made of the checkpoints in `directory`, oldest first; empty if there are none yet.

    Raises:
      EvaluationError: a line before the last cannot be read. (A last line that cannot is still being written.)
    """
    return ResultsFile(directory).read()


def latest_result(directory: str | os.PathLike[str]) -> EvaluationResult | None:
    """The evaluation made last of a checkpoint in `directory`, or None if there is none yet."""
    for line in reversed(ResultsFile(directory).complete_lines()):
        try:
            return EvaluationResult.from_json(line)
        except ValueError:
            continue
    return None


class ResultsFile:
    """The file `evaluations.jsonl` in a checkpoint directory."""

    def __init__(self, directory: str | os.PathLike[str]):
        self.path = pathlib.Path(directory) / RESULTS_FILE

    def append(self, result: EvaluationResult) -> None:
        """Adds one line; it is on disk when this returns.

        Raises:
          OSError: the file cannot be written.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self.path, "a+b") as file:
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)  # cuts off a line that a killed writer left half done
            file.write(result.to_json().encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())

    def read(self) -> list[EvaluationResult]:
        """All results, oldest first; see `results`."""
        lines = self.complete_lines()
        found = []
        for index, line in enumerate(lines):
            try:
                found.append(EvaluationResult.from_json(line))
            except ValueError as error:
                if index < len(lines) - 1:
                    raise EvaluationError(
                        f"Line {index + 1} of {str(self.path)!r} is not an evaluation result: {line[:80]!r}. "
                        "Remove or repair that line."
                    ) from error
        return found

    def complete_lines(self) -> list[bytes]:
        """The lines whose end has been written, without their ends; empty lines are left out."""
        try:
            written = self.path.read_bytes()
        except FileNotFoundError:
            return []
        return [line for line in written.split(b"\n")[:-1] if line.strip()]

    def __repr__(self) -> str:
        return f"ResultsFile({str(self.path)!r})"
