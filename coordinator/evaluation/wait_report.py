"""Says in the log what an evaluator waits for, so that no wait lasts for ever in silence."""

import logging
import time

from coordinator.evaluation.next_move import Situation, is_training_finished

_LOG = logging.getLogger("coordinator")


class WaitReport:
    """Reports on the waits of one evaluator.

    Args:
      directory: the checkpoint directory.
      advice_after: seconds without a new checkpoint after which advice is given, and again after each further such
        time.
    """

    def __init__(self, directory: str, advice_after: float):
        self._directory = directory
        self._advice_after = advice_after
        self._since: float | None = None
        self._advised = 0

    def note_progress(self) -> None:
        """A checkpoint was evaluated: the next wait is a new one."""
        self._since = None

    def note_wait(self, situation: Situation) -> None:
        """The evaluator waits, or goes on waiting."""
        now = time.monotonic()
        if self._since is None:
            self._since, self._advised = now, 0
            _LOG.info("Evaluator: %s.", awaited(situation, self._directory))
        elif now - self._since >= (self._advised + 1) * self._advice_after:
            self._advised = int((now - self._since) / self._advice_after)
            _LOG.warning("%s", advice(situation, self._directory, now - self._since))


def awaited(situation: Situation, directory: str) -> str:
    """What is waited for, as part of a sentence."""
    if situation.newest is None:
        return f"waits for a first checkpoint in {directory!r}"
    if situation.result is None:
        return f"waits until the checkpoint {situation.newest.path!r} can be read"
    return f"waits for a checkpoint newer than {situation.newest.path!r}"


def advice(situation: Situation, directory: str, waited: float) -> str:
    """What to look at when a wait is long."""
    hint = "If training has ended, it should say so: coordinator.evaluation.mark_training_finished(directory)."
    if situation.newest is None:
        hint = "Does training write its checkpoints to this directory, and do both processes see the same one?"
    elif situation.result is None:
        hint = "It may be half written, written again all the time, or damaged; a newer one is taken at once."
    elif situation.marker is not None and situation.marker.is_finished and not is_training_finished(situation):
        hint = "The marker of a finished training is older than that, so a later training is taken to be under way."
    return f"Evaluator: still {awaited(situation, directory)}, for {waited:.0f} s now. {hint}"
