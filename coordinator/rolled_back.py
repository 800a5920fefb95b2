"""What was lost when parameter servers were lost and the latest checkpoint was restored."""

import dataclasses


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolledBack:
    """One recovery of lost parameter servers: all variables went back to what a checkpoint holds.

    The unit of a step is what the user counts with the `step` given to `ParameterServerStrategy.restore_from`, and
    finished functions without one. Steps are None where nothing tells them: those before a checkpoint of the user's own
    making, which `restore_from` was given a function for.

    Attributes:
      parameter_servers: the names of those that were lost, such as `/job:ps/task:0`.
      checkpoint: the path of what was restored, or None if there was none yet and all variables began anew.
      step_before: how far training had come when the servers were lost; an estimate, since what a checkpoint holds of
        functions that ran while it was written is not known.
      step_after: where it goes on.
      seconds: from the first attempt to recover until the variables were back.
    """

    parameter_servers: tuple[str, ...]
    checkpoint: str | None
    step_before: int | None
    step_after: int | None
    seconds: float

    @property
    def steps_lost(self) -> int | None:
        """How many steps are to be made again, or None where nothing tells."""
        if self.step_before is None or self.step_after is None:
            return None
        return self.step_before - self.step_after

    def __str__(self) -> str:
        where = f"checkpoint {self.checkpoint}" if self.checkpoint else "the initial values"
        steps = "" if self.steps_lost is None else f", {self.steps_lost} steps back, at step {self.step_after}"
        return f"{', '.join(self.parameter_servers)} recovered from {where}{steps} ({self.seconds:.1f} s)"
