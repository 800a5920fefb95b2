"""What an evaluator does next: a function of what it sees, with no clock, file or thread in it.

stop asked for ------------------------------------------> END
the newest checkpoint has no result yet -----------------> EVALUATE
   ... cannot be read, though training ended long ago ---> GIVE_UP
it has: training has ended, or enough evaluations made --> END, unless that end is doubted
otherwise -----------------------------------------------> WAIT
"""

import dataclasses
import enum

from coordinator.evaluation.checkpoint_file import CheckpointFile
from coordinator.evaluation.evaluation_result import EvaluationResult
from coordinator.evaluation.training_marker import TrainingMarker


class Move(enum.Enum):
    """What to do."""

    EVALUATE = "evaluate the newest checkpoint"
    WAIT = "wait for a newer one"
    END = "end"
    GIVE_UP = "end with an error: the last checkpoint cannot be read"


@dataclasses.dataclass(frozen=True)
class Situation:
    """What an evaluator sees.

    Attributes:
      newest: the newest checkpoint, if there is any.
      result: the result of that checkpoint, if there is one already.
      marker: what training said last, read before `newest` was looked for: if it had ended by then, `newest` is
        its last checkpoint.
      is_stopped: whether the evaluator was asked to stop.
      max_evaluations: end after a checkpoint of this number or a higher one.
      marker_at_start: what training had said when the evaluator started.
      newest_at_start: the newest checkpoint at that time.
      is_settling: whether `newest` is a weights file that was seen to change so recently that training may be writing
        it still: such a file is written in place.
      is_start_doubted: whether so little time has passed since then that a new training may still be about to begin
        in this directory.
      is_out_of_patience: whether the newest checkpoint has been unreadable for so long that nobody can still be
        writing it.
    """

    newest: CheckpointFile | None = None
    result: EvaluationResult | None = None
    marker: TrainingMarker | None = None
    is_stopped: bool = False
    max_evaluations: int | None = None
    marker_at_start: TrainingMarker | None = None
    newest_at_start: CheckpointFile | None = None
    is_settling: bool = False
    is_start_doubted: bool = False
    is_out_of_patience: bool = False


def next_move(situation: Situation) -> Move:
    """What to do in `situation`."""
    if situation.is_stopped:
        return Move.END
    if situation.newest is not None and situation.result is None:
        if situation.is_settling:
            return Move.WAIT
        is_hopeless = situation.is_out_of_patience and is_training_finished(situation)
        return Move.GIVE_UP if is_hopeless else Move.EVALUATE
    if is_training_finished(situation) or has_evaluated_enough(situation):
        return Move.END
    return Move.WAIT


def is_training_finished(situation: Situation) -> bool:
    """Whether training has said that it ended, and that was the training of the newest checkpoint."""
    marker, newest = situation.marker, situation.newest
    if marker is None or not marker.is_finished:
        return False
    if newest is not None and newest.written_ns > marker.written_ns:
        return False  # a later training writes here
    return not (situation.is_start_doubted and marker == situation.marker_at_start)


def has_evaluated_enough(situation: Situation) -> bool:
    """Whether the newest checkpoint is evaluated, and its number reaches `max_evaluations`."""
    if situation.result is None or situation.max_evaluations is None:
        return False
    if situation.result.number < situation.max_evaluations:
        return False
    return not (situation.is_start_doubted and situation.newest == situation.newest_at_start)
