"""Servers are killed, frozen and replaced while functions run in fused calls.

what dies            what the caller sees
a worker             every function has its result; those that were in its call ran again
a parameter server   its variables are restored, every function has its result, and fused calls continue
a worker freezes     every function has its result; the worker is used again when it thaws
workers come and go  one that is added, or moved after its death, takes work; the remaining ones run the rest
"""

import json
from pathlib import Path

import pytest

from tests.program_runner import ProgramRunner
from tests.ps_strategy.failure_programs import fused_losses
from tests.ps_strategy.failure_programs.fused_losses import STEPS

PROGRAM_TIMEOUT = 280
pytestmark = [pytest.mark.cluster, pytest.mark.timeout(300)]


def observed(run_program: ProgramRunner, *scenarios: str) -> dict:
    """Returns what a program printed about each of some scenarios."""
    program = run_program(Path(fused_losses.__file__).read_text(), *scenarios, timeout=PROGRAM_TIMEOUT)
    return json.loads(program.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def seen(interpreter, tmp_path_factory) -> dict:
    """Runs the scenarios that take long in one program."""
    run_program = ProgramRunner(interpreter, tmp_path_factory.mktemp("programs"))
    return observed(run_program, "parameter server", "frozen worker", "changing workers")


@pytest.mark.long
def test_no_fused_function_is_lost_with_its_worker(run_program):
    found = observed(run_program, "worker")["worker"]
    assert found["results"] == list(range(STEPS))
    assert found["fewest runs"] >= 1
    assert found["losses"] >= 1
    assert found["retried"] >= 1


@pytest.mark.long
def test_fused_calls_continue_with_the_variables_of_a_restored_parameter_server(seen):
    found = seen["parameter server"]
    assert found["results"] == found["results afterwards"] == list(range(STEPS))
    assert found["counted afterwards"] == STEPS
    assert found["counted since the checkpoint"] > 0
    assert found["fused afterwards"] > 0
    assert found["traced again"] == 0


@pytest.mark.long
def test_functions_of_a_frozen_worker_run_elsewhere_and_it_is_used_again_later(seen):
    assert seen["frozen worker"] == {"results": list(range(STEPS)), "losses": 1}


@pytest.mark.long
def test_workers_are_added_moved_and_removed_while_the_client_trains(seen):  # row 87
    found = seen["changing workers"]
    assert found["added"] == 2
    assert found["results"] == [3, 4]
    assert found["workers left"] == [0, 1]
    assert found["results afterwards"] == list(range(STEPS))
