"""What `coordinator run` is asked to do, checked before anything starts."""

import dataclasses
import pathlib

from coordinator.errors import ClusterSpecError, LaunchError


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A program and the cluster to run it on. All times are in seconds.

    Attributes:
      program: the path of a Python program.
      arguments: its arguments.
      workers: how many workers.
      ps: how many parameter servers.
      evaluator: whether the program also runs once as evaluator.
      restarts: how often the program is started again, on the same servers, when it fails.
      evaluator_timeout: how long the evaluator may go on after the chief has ended well.
      start_timeout: how long all servers together may take until they answer.
      log_dir: the folder for the servers' logs; None keeps them only where one explains a failure.

    Raises:
      ClusterSpecError: there is no worker, or no parameter server.
      LaunchError: the program is not a file, the restarts are fewer than none, or a time is not above 0.
    """

    program: pathlib.Path
    arguments: tuple[str, ...] = ()
    workers: int = 1
    ps: int = 1
    restarts: int = 0
    evaluator: bool = False
    evaluator_timeout: float = 300.0
    start_timeout: float = 120.0
    log_dir: pathlib.Path | None = None

    def __post_init__(self) -> None:
        for option, count in (("--workers", self.workers), ("--ps", self.ps)):
            if count < 1:
                raise ClusterSpecError(
                    f"{option} must be at least 1, got {count}: training needs both kinds of server."
                )
        if self.restarts < 0:
            raise LaunchError(f"--restarts must be at least 0, got {self.restarts}.")
        for option, time in (("--evaluator-timeout", self.evaluator_timeout), ("--start-timeout", self.start_timeout)):
            if not time > 0:
                raise LaunchError(f"{option} must be a number of seconds above 0, got {time:g}.")
        if self.program.is_dir():
            raise LaunchError(f"{self.program} is a folder: give the path of a Python program.")
        if not self.program.is_file():
            raise LaunchError(f"There is no program {self.program}: give the path of a Python program.")
