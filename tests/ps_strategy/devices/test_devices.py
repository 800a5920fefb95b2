"""Workers with two logical CPU devices, or a GPU, learn what one device would."""

import json
import shutil
from pathlib import Path

import pytest

from tests.program_runner import ProgramRunner
from tests.ps_strategy.devices import scenarios

# The methods of `scenarios.py`, by the number of workers.
SCENARIOS = {
    1: (
        "each_device_is_a_replica_and_replicas_combine_their_values",
        "a_variable_is_changed_by_what_its_aggregation_makes_of_all_replicas",
        "datasets_have_an_element_for_each_replica",
        "a_loop_equals_one_device_and_reads_and_changes_variables_once",
        "what_is_done_once_for_a_worker_is_refused_on_each_of_its_devices",
        "rules_take_gradients_that_were_summed_on_the_worker",
        "fit_equals_one_device_whatever_the_data",
        "models_of_any_kind_are_trained_or_refused",
        "rows_of_a_table_are_looked_up_on_each_device_and_changed_once",
        "servers_are_lost_and_a_worker_with_other_devices_takes_no_part",
    ),
    2: ("a_rule_has_the_gradients_of_two_workers_with_two_devices_each",),
}

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def seen() -> dict[str, str]:
    """The tracebacks of the scenarios that have run, or nothing: all of them run in one program."""
    return {}


@pytest.mark.long
@pytest.mark.parametrize("scenario", [name for names in SCENARIOS.values() for name in names])
def test_on_two_devices(seen: dict[str, str], run_program: ProgramRunner, scenario: str) -> None:
    if scenario not in seen:
        ran = run_program(Path(scenarios.__file__).read_text(), json.dumps(SCENARIOS), timeout=280)
        seen.update(json.loads(ran.stdout.splitlines()[-1]))
    assert not seen[scenario], seen[scenario]


ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "0", "TF_FORCE_GPU_ALLOW_GROWTH": "true", "NVIDIA_TF32_OVERRIDE": "0"}


@pytest.mark.release
@pytest.mark.cluster
@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="did not run: this machine has no NVIDIA GPU")
def test_a_worker_with_a_gpu_computes_on_it_and_learns_the_same(run_program: ProgramRunner) -> None:
    run_program(Path(__file__).with_name("gpu_program.py").read_text(), timeout=280, environment=ENVIRONMENT)
