"""Tests of the class hierarchy of errors and of its diagram in the docstring."""

import concurrent.futures
import inspect

import pytest

from coordinator import errors

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


@pytest.mark.parametrize("error", TREE)
def test_an_error_is_a_subclass_of_its_parents(error: type[Exception]) -> None:
    assert error.__bases__ == TREE[error]


@pytest.mark.parametrize("error", TREE)
def test_the_tree_in_the_docstring_shows_every_error(error: type[Exception]) -> None:
    assert errors.__doc__ is not None
    line = next(line for line in errors.__doc__.splitlines() if error.__name__ in line.split())
    for base in error.__bases__:
        if not issubclass(base, errors.CoordinatorError):
            assert f"({base.__name__})" in line


@pytest.mark.parametrize("error", [errors.WorkerLost, errors.ParameterServerLost])
def test_a_lost_task_is_named(error: type[errors.TaskLost]) -> None:
    lost = error("/job:ps/replica:0/task:1", "It left.")
    assert (lost.task, str(lost)) == ("/job:ps/replica:0/task:1", "It left.")
