"""Tests of errors and of the texts of statistics."""

import concurrent.futures
import dataclasses
import inspect

from coordinator import errors
from coordinator.statistics import ClusterStatistics, ParameterServerStatistics, WorkerStatistics

TREE = {
    errors.ClusterSpecError: (errors.CoordinatorError, ValueError),
    errors.VersionMismatchError: (errors.CoordinatorError, RuntimeError),
    errors.DeviceMismatchError: (errors.CoordinatorError, RuntimeError),
    errors.TaskLost: (errors.CoordinatorError,),
    errors.WorkerLost: (errors.TaskLost,),
    errors.ParameterServerLost: (errors.TaskLost,),
    errors.ClosureError: (errors.CoordinatorError,),
    errors.ClosureInputError: (errors.ClosureError,),
    errors.ClosureCancelledError: (errors.ClosureError, concurrent.futures.CancelledError),
    errors.ClosureQuarantined: (errors.ClosureError,),
    errors.CheckpointsTakenOver: (errors.CoordinatorError, RuntimeError),
    errors.StrategyClosedError: (errors.CoordinatorError, RuntimeError),
    errors.InvalidTransitionError: (errors.CoordinatorError, RuntimeError),
    errors.LaunchError: (errors.CoordinatorError, RuntimeError),
    errors.EvaluationError: (errors.CoordinatorError, RuntimeError),
    errors.SettingError: (errors.CoordinatorError, ValueError),
}


def test_the_error_tree_contains_every_error() -> None:
    defined = {found for _, found in inspect.getmembers(errors, inspect.isclass) if found.__module__ == errors.__name__}
    assert {found for found in defined if issubclass(found, BaseException)} == {errors.CoordinatorError, *TREE}
    assert {error: error.__bases__ for error in TREE} == TREE


COUNTS = ClusterStatistics(waiting=1, running=2, finished=3, failed=4, cancelled=5, retried=6)


def test_a_snapshot_names_the_unavailable_servers() -> None:
    workers = tuple(
        WorkerStatistics(index, f"/job:worker/task:{index}", state)
        for index, state in enumerate(["live", "lost", "lost"])
    )
    servers = (ParameterServerStatistics(0, "/job:ps/task:0", "lost"),)
    text = str(dataclasses.replace(COUNTS, workers=workers, parameter_servers=servers))
    assert text.endswith("; 3 workers; lost: /job:worker/task:1, /job:worker/task:2, /job:ps/task:0")
