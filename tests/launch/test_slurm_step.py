import pytest

from coordinator.errors import LaunchError
from coordinator.launch.slurm import SlurmStep, role_of

ENVIRONMENT = {
    "SLURM_CLUSTER_NAME": "test",
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_ID": "2",
    "SLURM_PROCID": "3",
    "SLURM_NTASKS": "9",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_STEP_NUM_NODES": "1",
    "SLURM_STEP_NODELIST": "node3",
}


def test_a_step_is_read_from_the_environment_of_srun() -> None:
    assert SlurmStep.from_environment(ENVIRONMENT) == SlurmStep("test.7.2.", 3, 6, 1, "node3")
    assert SlurmStep.from_environment(ENVIRONMENT).first_host() == "127.0.0.1"
    with_key = SlurmStep.from_environment({**ENVIRONMENT, "COORDINATOR_SLURM_KEY": "a secret"})
    assert with_key.key == b"a secret"
    assert "a secret" not in repr(with_key)
    requeued = SlurmStep.from_environment({**ENVIRONMENT, "SLURM_RESTART_COUNT": "1"})
    assert requeued.name == "test.7.2.1", "another step: tasks of the former may still be ending"


@pytest.mark.parametrize("missing", ["SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_STEP_NODELIST"])
def test_a_process_that_srun_did_not_start_is_refused(missing: str) -> None:
    with pytest.raises(LaunchError, match=f"{missing}.* Start it by srun: srun --ntasks 6 coordinator slurm"):
        SlurmStep.from_environment({name: value for name, value in ENVIRONMENT.items() if name != missing})


def test_each_task_has_a_role() -> None:
    step = SlurmStep.from_environment(ENVIRONMENT)
    assert step.workers(2, evaluator=True) == 2
    roles = [role_of(rank, 2, 2) for rank in range(6)]
    assert roles == [("chief", 0), ("ps", 0), ("ps", 1), ("worker", 0), ("worker", 1), ("evaluator", 0)]


@pytest.mark.parametrize(("ps", "evaluator", "needed"), [(5, False, 7), (4, True, 7), (9, True, 12)])
def test_too_few_tasks_are_refused(ps: int, evaluator: bool, needed: int) -> None:
    with pytest.raises(LaunchError, match=f"The step has 6 tasks.* give srun --ntasks {needed} or more"):
        SlurmStep.from_environment(ENVIRONMENT).workers(ps, evaluator=evaluator)
